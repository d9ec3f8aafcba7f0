"""Make the ASGI apps of served models: routes, error handlers, the request gate.

`Server` (or a test) calls `make_app`, the endpoints of another engine call `make_hook_app`. The routes parse a request,
ask the engine and format the answer with the other modules of this folder. Needs ``hookline[serve]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Protocol, get_type_hints

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.exceptions import StarletteHTTPException as HTTPException  # what 404 and 405 are, too
from fastapi.responses import Response

from hookline.engines.request_options import ClientHook
from hookline.errors import Hint, HooklineError
from hookline.serve.http import request_bodies as bodies
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused, error_body, refusal_from_error, refusal_from_validation, to_json
from hookline.serve.http.generation_routes import (
    NAMED,
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    answer,
    stream,
)
from hookline.serve.http.hook_routes import HookRoutes
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.metrics_page import Metrics
from hookline.serve.http.request_gate import Gate
from hookline.serve.serving_engine import Engine

__all__ = ["HookCalls", "json_response", "make_app", "make_hook_app"]

_ABOUT: Final = """A causal language model with hooks: hidden states by request, statistics and exports while it runs.

Every error has one shape: `{"error": {"message", "type", "param", "code"}}`.

The header `X-Request-Id` names a request that generates: hooks know it by that name, and the answer has it in the same
header."""


def make_app(engine: Engine | None, settings: Settings | None = None) -> Any:
    """Return the ASGI app of a served model; set ``app.state.serving.engine`` if the engine comes later.

    Recipe::

        app = hookline.serve.make_app(engine, hookline.serve.Settings(model_name="tiny", token="secret"))

    Any ASGI server runs it, as ``uvicorn.run(app, host="127.0.0.1")``; `Server` is one.
    """
    settings = settings or Settings()
    metrics = Metrics()
    routes = _Routes(Serving(engine), settings, metrics)
    # No pages: those of FastAPI load scripts from the internet, which a closed network has not.
    app = FastAPI(
        title="hookline", version=_version(), description=_ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.serving = routes.serving
    routes.add_to(app)
    _add_exception_handlers(app)
    app.add_middleware(Gate, settings=settings, observe=metrics.observe)
    return app


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # its files are on the path, but it is not installed
        return "unknown"


_ERROR: Final = {"description": 'An error: `{"error": {"message", "type", "param", "code"}}`.'}
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {"4XX": _ERROR, "5XX": _ERROR}
"""What every route may answer, for ``/openapi.json``."""
_WHOLE_OR_STREAM: Final[dict[int | str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}},
    **_ERRORS,
}


class _Routes:
    """Answer each path; the docstring of a route is its description in ``/openapi.json``."""

    def __init__(self, serving: Serving, settings: Settings, metrics: Metrics) -> None:
        self.serving = serving
        self.settings = settings
        self._metrics = metrics
        self._hooks = HookRoutes(serving, settings)

    def add_to(self, app: Any) -> None:
        """Add every route to `app`."""
        generating: dict[str, Any] = {"methods": ["POST"], "responses": _WHOLE_OR_STREAM}
        app.add_api_route("/v1/completions", self.complete, **generating)
        app.add_api_route("/v1/chat/completions", self.chat, **generating)
        _HookPaths(self._hooks).add_to(app)
        app.add_api_route("/v1/models", self.list_models, methods=["GET"], responses=_ERRORS)
        app.add_api_route("/modules", self.list_modules, methods=["GET"], responses=_ERRORS)
        app.add_api_route("/health", self.health, methods=["GET"], responses=_ERRORS)
        text: dict[int | str, Any] = {200: {"content": {"text/plain": {}}}, **_ERRORS}
        app.add_api_route("/metrics", self.metrics, methods=["GET"], response_class=Response, responses=text)

    async def complete(self, body: bodies.CompletionBody, http: HttpRequest) -> Any:
        """Answer one or several prompts, as OpenAI's completions; with `hooks`, add their hidden states."""
        return await self._generate(body, http, CompletionFormat)

    async def chat(self, body: bodies.ChatBody, http: HttpRequest) -> Any:
        """Answer a conversation, as OpenAI's chat completions; with `hooks`, add the hidden states of the answer."""
        return await self._generate(body, http, ChatFormat)

    async def _generate(
        self, body: bodies.CompletionBody | bodies.ChatBody, http: HttpRequest, form: type[AnswerFormat]
    ) -> Any:
        asked = await body.parse(self.serving, self.settings, http.headers.get(NAMED))
        made = form(asked, self.serving, self.settings.model_name)
        return await (stream if body.stream else answer)(http, self.serving, asked, made, self.settings.allow_requests)

    async def list_models(self) -> Any:
        """Name the model that is served."""
        model = {"id": self.settings.model_name, "object": "model", "created": self.serving.started}
        return json_response({"object": "list", "data": [{**model, "owned_by": "hookline"}]})

    async def list_modules(self, pattern: str = "*") -> Any:
        """List the modules that hooks and hidden states may name: all, or those of `?pattern=model.layers.*`."""
        return json_response({"modules": await self._hooks.modules(pattern)})

    async def health(self) -> Any:
        """Tell whether the server takes requests: 200 if so, 503 while it loads or stops, or if its engine failed."""
        status = self.serving.status
        return json_response({"status": status}, 200 if status == "ready" else 503)

    async def metrics(self) -> Any:
        """Give the counts of the engine, its hooks and HTTP, in Prometheus' text format."""
        figures = await self._hooks.figures()
        # After the counts of hooks, which wait for the running round: its tokens are counted by then.
        counts = {} if self.serving.engine is None else self.serving.engine.counts()
        return Response(self._metrics.page(counts, figures), media_type=self._metrics.content_type)


# -- /hooks, of every engine -----------------------------------------------------------------------------------


class HookCalls(Protocol):
    """List, attach and remove hooks on the model of an engine; each hook is a dictionary as ``GET /hooks`` shows it."""

    async def list(self) -> list[dict[str, Any]]:
        """Return the attached hooks."""

    async def add(self, given: ClientHook) -> dict[str, Any]:
        """Attach one hook, wholly or not at all."""

    async def remove(self, id: str) -> dict[str, Any]:
        """Remove one hook."""


def make_hook_app(hooks: HookCalls, settings: Settings, more: Mapping[str, Any]) -> Any:
    """Return an ASGI app of the hook paths alone, behind the same gate as those of ``hookline serve``.

    Recipe: ``outer.routes.append(Route("/hooks", make_hook_app(calls, Settings(token="secret"), {})))``.

    Args:
        hooks: Lists, attaches and removes.
        settings: The token, and what it is for.
        more: Other paths to answer to ``GET``, each with its route.
    """
    app = FastAPI(title="hookline", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for path, route in more.items():
        app.add_api_route(path, route, methods=["GET"])
    _HookPaths(hooks).add_to(app)
    _add_exception_handlers(app)
    return Gate(app, settings, observe=lambda method, route, status, seconds: None)


class _HookPaths:
    """Answer each hook path; the docstring of a route is its description in ``/openapi.json``."""

    def __init__(self, hooks: HookCalls) -> None:
        self._hooks = hooks

    def add_to(self, app: Any) -> None:
        """Add the paths to `app`."""
        app.add_api_route("/hooks", self.list_hooks, methods=["GET"], responses=_ERRORS)
        app.add_api_route("/hooks", self.add_hook, methods=["POST"], responses=_ERRORS, status_code=201)
        app.add_api_route("/hooks/{id}", self.remove_hook, methods=["DELETE"], responses=_ERRORS)

    async def list_hooks(self) -> Any:
        """List the attached hooks: on which modules, how often each fired, and what it costs."""
        return json_response({"hooks": await self._hooks.list()})

    async def add_hook(self, body: ClientHook) -> Any:
        """Attach a hook to the running model, between two forwards; wholly, or not at all."""
        return json_response(await self._hooks.add(body), 201)

    async def remove_hook(self, id: str) -> Any:
        """Remove a hook, also one of the server's start; return what it has done until now."""
        return json_response(await self._hooks.remove(id))


# -- exceptions become answers, all in one JSON form -----------------------------------------------------------

_WORDS: Final = {Hint.LIST_MODULES: "See all: GET /modules."}


def _add_exception_handlers(app: Any) -> None:
    """Answer every exception of the routes of `app` in the form of `error_body`."""
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
    return _refused(refusal_from_validation(error.errors(), body))


async def _on_http(http: HttpRequest, error: Any) -> Any:
    message = {
        400: "The body cannot be read as JSON.",
        404: f"There is nothing at {http.url.path!r}; see /openapi.json for what there is.",
        405: f"{http.url.path!r} does not take {http.method}; see /openapi.json for what it takes.",
    }.get(error.status_code, str(error.detail))
    return _refused(Refused(error.status_code, message, headers=error.headers))


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
