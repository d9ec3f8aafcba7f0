"""Turn the exceptions of routes into answers, all in one JSON form.

The app of ``hookline serve`` and the hook paths of other engines call `add_exception_handlers`. Needs
``hookline[serve]``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, get_type_hints

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.exceptions import StarletteHTTPException as HTTPException  # what 404 and 405 are, too
from fastapi.responses import Response

from hookline.errors import Hint, HooklineError
from hookline.serve.http.error_answers import Refused, error_body, refusal_from_error, refusal_from_validation, to_json
from hookline.serve.http.request_bodies import keys_at

__all__ = ["add_exception_handlers", "json_response"]

_WORDS: Final = {Hint.LIST_MODULES: "See all: GET /modules."}


def add_exception_handlers(app: Any) -> None:
    """Answer every exception of the routes of `app` in the form of `error_body`.

    Recipe: ``add_exception_handlers(FastAPI())``.
    """
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)


def json_response(value: Any, status: int = 200) -> Any:
    """Return `value` as a response in JSON."""
    return Response(to_json(value), status_code=status, media_type="application/json")


def _refused(refused: Refused) -> Any:
    return Response(
        to_json(error_body(refused)), refused.status, media_type="application/json", headers=refused.headers
    )


async def _on_refused(http: HttpRequest, error: Exception) -> Any:
    has_modules = any(route.path == "/modules" for route in http.app.routes)  # beside another engine's, there is none
    return _refused(refusal_from_error(error, _WORDS if has_modules else None))


async def _on_body(http: HttpRequest, error: Any) -> Any:
    body = get_type_hints(http.scope["endpoint"]).get("body")  # the class that the route reads
    return _refused(refusal_from_validation(error.errors(), None if body is None else partial(keys_at, body)))


async def _on_http(http: HttpRequest, error: Any) -> Any:
    message = {
        400: "The body cannot be read as JSON.",
        404: f"There is nothing at {http.url.path!r}; see /openapi.json for what there is.",
        405: f"{http.url.path!r} does not take {http.method}; see /openapi.json for what it takes.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    if error.status_code == 405:  # where two routes share a path, the first would tell of itself alone
        headers["Allow"] = ", ".join(sorted(_methods_at(http)))
    return _refused(Refused(error.status_code, message, headers=headers))


def _methods_at(http: HttpRequest) -> set[str]:
    here = [route for route in http.app.routes if route.path_regex.match(http.url.path)]
    return {method for route in here for method in route.methods}


async def _on_bug(_: HttpRequest, error: Exception) -> Any:
    # The details are in the server's log, with the traceback; clients get the type alone.
    return _refused(Refused(500, f"The server failed on this request ({type(error).__name__}); see its log."))


_HANDLERS: Final[dict[Any, Any]] = {
    Refused: _on_refused,
    HooklineError: _on_refused,
    RequestValidationError: _on_body,
    HTTPException: _on_http,
    Exception: _on_bug,
}
