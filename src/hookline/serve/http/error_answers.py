"""Turn errors into answers: one JSON form for every status, the one that OpenAI's clients read.

Errors come from the engine, from hooks and from pydantic; the app and the request gate write `Refused`. Imports no
package that HTTP needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hookline.errors import EngineBusy, EngineClosed, Hint, HooklineError, NotAllowedError
from hookline.messages import did_you_mean

__all__ = ["TYPES", "Refused", "error_body", "refusal_from_error", "refusal_from_validation", "to_json"]

TYPES: Final[dict[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    408: "request_timeout_error",
    413: "request_too_large_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
"""What ``error.type`` says for each status."""

_UNIONS: Final[dict[str, str]] = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists; none of them empty",
    "content": "a text, or a list of parts of text ({'type': 'text', 'text': ...}); pictures and sound are not served",
    "stop": "a text, or a list of at most 16 texts; none of them empty",
    "positions": "'all', 'last', or a list of whole numbers",
    "target_modules": "a list of module names or patterns; none of them empty",
    "exclude": "a list of module names or patterns",
}
"""What a field takes that pydantic would complain of once for each possibility."""


class Refused(Exception):
    """Answer a request with an error: a status and a message."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})


def error_body(refused: Refused) -> dict[str, Any]:
    """Return the JSON of the answer."""
    kind = TYPES.get(refused.status, TYPES[400] if refused.status < 500 else TYPES[500])
    return {
        "error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.status},
    }


def to_json(value: Any) -> bytes:
    """Return JSON in ASCII: half of a surrogate pair, which a client may send, has an escape but no UTF-8."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def refusal_from_error(error: BaseException, words: Mapping[Hint, str] | None = None) -> Refused:
    """Return the answer to an error that the engine, or attaching a hook, raised.

    Clients have no Python: hints are left out, except those that `words` says as a client can follow them.
    """
    if isinstance(error, Refused):
        return error
    said = error.text({**dict.fromkeys(Hint, ""), **(words or {})}) if isinstance(error, HooklineError) else str(error)
    message = said or type(error).__name__
    if isinstance(error, EngineBusy):
        return Refused(429, message, headers={"Retry-After": "1"})
    if isinstance(error, EngineClosed):
        return Refused(503, message, headers={"Retry-After": "5"})
    if isinstance(error, NotAllowedError):
        return Refused(403, message)
    if isinstance(error, HooklineError):
        return Refused(400, message)
    return Refused(500, f"{type(error).__name__}: {message}")


def refusal_from_validation(
    errors: Sequence[Mapping[str, Any]], keys_at: Callable[[Sequence[str | int]], Sequence[str]] | None = None
) -> Refused:
    """Return the answer to a body that pydantic rejected; it names the first mistake.

    `keys_at` returns the keys that an object takes, by the place of the unknown one in it.
    """
    unknown = (each for each in errors if each["type"] == "extra_forbidden")
    # A key that is missing may be there, mistyped.
    first = next(unknown, errors[0]) if errors[0]["type"] == "missing" else errors[0]
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "not_done":
        place.append(first["ctx"]["key"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "malformed")
        return Refused(400, f"The body is not JSON: {reason}, at character {place[0] if place else 0}.")
    if not place and first["type"] != "too_many_keys":
        return Refused(
            400,
            "The body is a JSON object with Content-Type: application/json; see /openapi.json for its keys.",
            param="$",
        )
    depth, words = _union(place)
    param = _spelled(place[:depth])
    if first["type"] == "string_unicode":
        return Refused(400, f"{param} has half a character in it (a lone surrogate).", param=param)
    if words is not None:
        return Refused(400, f"{param} is {words}.", param=param)
    if first["type"] == "extra_forbidden":
        keys = () if keys_at is None else keys_at(place)
        meant = did_you_mean(_short(place[-1]), keys)
        there = f" There are {', '.join(keys)}." if keys else ""
        return Refused(400, f"{param} is no key that is known here.{meant}{there}", param=param)
    if first["type"] == "missing":
        return Refused(400, f"{param} is missing.", param=param)
    if first["type"] == "model_type":  # pydantic would name a class of ours
        return Refused(400, f"{param} is an object, got {_short(repr(first.get('input')))}.", param=param)
    given = "" if first["type"] == "not_done" else f", got {_short(repr(first.get('input')))}"
    return Refused(400, f"{param}: {_sentence(str(first['msg']))}{given}.", param=param)


def _union(place: Sequence[str | int]) -> tuple[int, str | None]:
    """Return how many parts of `place` the client wrote, and what goes there."""
    for depth, part in enumerate(place, 1):
        if isinstance(part, str) and part in _UNIONS and len(place) > depth:
            return depth, _UNIONS[part]
    return len(place), None


def _spelled(place: Sequence[str | int]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{_short(part)}" for part in place)


def _sentence(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _short(value: Any) -> str:
    """Return text of bounded length: a key may be as long as a body."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
