"""Turn errors into answers: one JSON form for every status, the one that OpenAI's clients read.

Errors come from the engine, from hooks and from pydantic. The apps answer what their routes raise with
`add_exception_handlers`; the request gate, which is outside of them, with `refused_response`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_type_hints

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.exceptions import StarletteHTTPException as HTTPException  # what 404 and 405 are, too
from fastapi.responses import Response

from hookline.errors import EngineBusy, EngineClosed, HooklineError, HookNameError, NotAllowedError
from hookline.specs.hook_spec import error_of_faults, fault_to_tell

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
"""What ``error.type`` says for these statuses."""
_ERROR: Final = {"description": 'An error: `{"error": {"message", "type", "param", "code"}}`.'}
ERRORS: Final[dict[int | str, dict[str, Any]]] = {"4XX": _ERROR, "5XX": _ERROR}
"""What every route may answer, for ``/openapi.json``."""
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
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.status}}


def to_json(value: Any) -> bytes:
    """Return JSON in ASCII: half of a surrogate pair, which a client may send, has an escape but no UTF-8."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    """Return `value` as a response in JSON."""
    return Response(to_json(value), status, headers, media_type="application/json")


def refused_response(refused: Refused) -> Any:
    """Return the response that says why a request is refused; an ASGI app by itself."""
    return json_response(error_body(refused), refused.status, refused.headers)


def refusal_from_error(error: Exception) -> Refused:
    """Return the answer to an error that the engine, or attaching a hook, raised."""
    if isinstance(error, Refused):
        return error
    message = str(error) or type(error).__name__
    if isinstance(error, EngineBusy):
        return Refused(429, message, headers={"Retry-After": "1"})
    if isinstance(error, EngineClosed):
        return Refused(503, message, headers={"Retry-After": "5"})
    if isinstance(error, HookNameError):
        return Refused(404, message)
    return Refused(403 if isinstance(error, NotAllowedError) else 400, message)


def _refusal_from_validation(faults: Sequence[Mapping[str, Any]], kind: type | None = None) -> Refused:
    """Return the answer to a body that pydantic did not take as a ``kind``; it names one mistake."""
    first = fault_to_tell(faults)
    if first["type"] == "json_invalid":
        return Refused(400, f"The body is not JSON: {first.get('ctx', {}).get('error', 'malformed')}.")
    if first["loc"][0] == "header":
        return Refused(400, f"The header {first['loc'][1]} is not taken: {first['msg']}.", param=first["loc"][1])
    parts = [part for part in first["loc"] if part != "body"]
    # Other texts name the type that pydantic tried.
    place = [*parts[:1], *(part for part in parts[1:] if isinstance(part, int) or part.isidentifier())]
    if not place and "error" not in first.get("ctx", {}):
        text = "The body is a JSON object with Content-Type: application/json; see /openapi.json for its keys."
        return Refused(400, text, param="$")
    error = error_of_faults([{**first, "loc": place}], kind)
    return Refused(400, str(error)[:_LONGEST], param=".".join(["$", *map(str, place[:1])]))


# -- exceptions of routes ------------------------------------------------------------------------------------------


async def _on_refused(http: HttpRequest, error: Exception) -> Any:
    return refused_response(refusal_from_error(error))


async def _on_body(http: HttpRequest, error: Any) -> Any:
    body = get_type_hints(http.scope["endpoint"]).get("body")  # the class that the route reads
    return refused_response(_refusal_from_validation(error.errors(), body))


async def _on_http(http: HttpRequest, error: Any) -> Any:
    message = f"{error.detail}: {http.method} {http.url.path!r}; see /openapi.json for what there is."
    return refused_response(Refused(error.status_code, message, headers=error.headers))


async def _on_bug(_: HttpRequest, error: Exception) -> Any:
    # The details are in the server's log, with the traceback; clients get the type alone.
    return refused_response(Refused(500, f"The server failed on this request ({type(error).__name__}); see its log."))


def add_exception_handlers(app: Any) -> None:
    """Answer every exception of the routes of `app`."""
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(HooklineError, _on_refused)
    app.add_exception_handler(RequestValidationError, _on_body)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
