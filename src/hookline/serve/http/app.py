"""Make the ASGI app of a served model: routes, error handlers, the request gate.

`Server` (or a test) calls `make_app`; the routes parse a request, ask the engine and format the answer with the other
modules of this folder. Needs ``hookline[serve]``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from hookline.serve.http import request_bodies as bodies
from hookline.serve.http.chat_format import ChatFormat
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.exception_handlers import add_exception_handlers, json_response
from hookline.serve.http.generation_routes import NAMED, CompletionFormat, answer, stream
from hookline.serve.http.hook_paths import ERRORS, HookPaths
from hookline.serve.http.hook_routes import HookRoutes
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.metrics_page import Metrics
from hookline.serve.http.parsed_request import parse_chat, parse_completion
from hookline.serve.http.request_gate import Gate
from hookline.serve.serving_engine import Engine

__all__ = ["make_app"]

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
    add_exception_handlers(app)
    app.add_middleware(Gate, settings=settings, observe=metrics.observe)
    return app


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # its files are on the path, but it is not installed
        return "unknown"


_WHOLE_OR_STREAM: Final[dict[int | str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}},
    **ERRORS,
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
        HookPaths(self._hooks).add_to(app)
        app.add_api_route("/v1/models", self.list_models, methods=["GET"], responses=ERRORS)
        app.add_api_route("/modules", self.list_modules, methods=["GET"], responses=ERRORS)
        app.add_api_route("/health", self.health, methods=["GET"], responses=ERRORS)
        text: dict[int | str, Any] = {200: {"content": {"text/plain": {}}}, **ERRORS}
        app.add_api_route("/metrics", self.metrics, methods=["GET"], response_class=Response, responses=text)

    async def complete(self, body: bodies.CompletionBody, http: HttpRequest) -> Any:
        """Answer one or several prompts, as OpenAI's completions; with `hooks`, add their hidden states."""
        asked = await parse_completion(body, self.serving, self.settings, _name_of(http))
        with_usage = _wants_usage(body.stream_options)
        with_ids = bool(body.return_token_ids)
        form = CompletionFormat(
            asked, self.serving, self.settings.model_name, include_usage=with_usage, with_ids=with_ids
        )
        return await (stream if body.stream else answer)(http, self.serving, asked, form)

    async def chat(self, body: bodies.ChatBody, http: HttpRequest) -> Any:
        """Answer a conversation, as OpenAI's chat completions; with `hooks`, add the hidden states of the answer."""
        asked = await parse_chat(body, self.serving, self.settings, _name_of(http))
        form = ChatFormat(
            asked, self.serving, self.settings.model_name, include_usage=_wants_usage(body.stream_options)
        )
        return await (stream if body.stream else answer)(http, self.serving, asked, form)

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


def _name_of(http: HttpRequest) -> str | None:
    """Return what the client calls its request."""
    name: str | None = http.headers.get(NAMED)
    return name


def _wants_usage(options: bodies.StreamOptions | None) -> bool:
    return options is not None and bool(options.include_usage)
