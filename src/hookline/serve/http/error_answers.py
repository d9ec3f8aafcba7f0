"""Turn errors into answers: one JSON form for every status, the one that OpenAI's clients read.

Errors come from the engine, from hooks and from pydantic; the app and the request gate write `Refused`. Imports no
package that HTTP needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hookline.errors import EngineBusy, EngineClosed, Hint, HooklineError, NotAllowedError
from hookline.specs.hook_spec import error_of_faults, fault_to_tell

__all__ = ["Refused", "error_body", "refusal_from_error", "refusal_from_validation", "to_json"]

_TYPES: Final[dict[int, str]] = {
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

_LONGEST: Final = 1000
"""Characters of a message: a key may be as long as a body."""


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
    kind = _TYPES.get(refused.status, _TYPES[400] if refused.status < 500 else _TYPES[500])
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


def refusal_from_validation(faults: Sequence[Mapping[str, Any]], kind: type | None = None) -> Refused:
    """Return the answer to a body that pydantic did not take as a ``kind``; it names one mistake."""
    first = fault_to_tell(faults)
    if first["type"] == "json_invalid":
        return Refused(400, f"The body is not JSON: {first.get('ctx', {}).get('error', 'malformed')}.")
    parts = [part for part in first["loc"] if part != "body"]
    place = [*parts[:1], *filter(_is_of_body, parts[1:])]
    if not place and "error" not in first.get("ctx", {}):
        text = "The body is a JSON object with Content-Type: application/json; see /openapi.json for its keys."
        return Refused(400, text, param="$")
    error = error_of_faults([{**first, "loc": place}], kind)
    return Refused(400, error.text(dict.fromkeys(Hint, ""))[:_LONGEST], param=".".join(["$", *map(str, place[:1])]))


def _is_of_body(part: str | int) -> bool:
    """Return whether a part of the place of a fault is in the body; others name the type that pydantic tried."""
    return isinstance(part, int) or part.isidentifier()
