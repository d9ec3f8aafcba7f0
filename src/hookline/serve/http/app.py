"""Make the ASGI apps of served models: routes, error handlers, the request gate.

`Server` (or a test) calls `make_app`, the endpoints of another engine call `make_hook_app`. The routes parse a request,
ask the engine and format the answer with the other modules of this folder. Needs ``hookline[serve]``.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any, Final

from fastapi import FastAPI, Header
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from hookline import __version__
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import ERRORS, add_exception_handlers, json_response
from hookline.serve.http.generation_routes import NAMED, ChatFormat, CompletionFormat, Generation
from hookline.serve.http.hook_routes import HookPaths, LiveHookPaths
from hookline.serve.http.metrics_page import Metrics
from hookline.serve.http.request_bodies import ChatBody, CompletionBody, GenerationBody
from hookline.serve.http.request_gate import Gate, Settings
from hookline.serve.serving_engine import Engine
from hookline.sites.find import find

__all__ = ["make_app", "make_hook_app"]

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
        title="hookline", version=__version__, description=_ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.serving = routes.serving
    routes.add_to(app)
    add_exception_handlers(app)
    app.add_middleware(Gate, settings=settings, observe=metrics.observe)
    return app


_WHOLE_OR_STREAM: Final[dict[int | str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}},
    **ERRORS,
}
_Name = Annotated[str | None, Header(alias=NAMED, pattern="^[A-Za-z0-9._:-]{1,128}$")]
"""What a client calls its request: nothing that a pattern of names, or a line of a log, could be confused by."""


class _Routes:
    """Answer each path; the docstring of a route is its description in ``/openapi.json``."""

    def __init__(self, serving: Serving, settings: Settings, metrics: Metrics) -> None:
        self.serving = serving
        self.settings = settings
        self._metrics = metrics
        self._hooks = LiveHookPaths(serving, settings)

    def add_to(self, app: Any) -> None:
        """Add every route to `app`."""
        generating: dict[str, Any] = {"methods": ["POST"], "responses": _WHOLE_OR_STREAM}
        app.add_api_route("/v1/completions", self.complete, **generating)
        app.add_api_route("/v1/chat/completions", self.chat, **generating)
        self._hooks.add_to(app)
        app.add_api_route("/v1/models", self.list_models, methods=["GET"], responses=ERRORS)
        app.add_api_route("/modules", self.list_modules, methods=["GET"], responses=ERRORS)
        app.add_api_route("/health", self.health, methods=["GET"], responses=ERRORS)
        text: dict[int | str, Any] = {200: {"content": {"text/plain": {}}}, **ERRORS}
        app.add_api_route("/metrics", self.metrics, methods=["GET"], response_class=Response, responses=text)

    async def complete(self, body: CompletionBody, http: HttpRequest, name: _Name = None) -> Any:
        """Answer one or several prompts, as OpenAI's completions; with `hooks`, add their hidden states."""
        return await self._generate(http, body, name or f"cmpl-{uuid.uuid4().hex}", CompletionFormat)

    async def chat(self, body: ChatBody, http: HttpRequest, name: _Name = None) -> Any:
        """Answer a conversation, as OpenAI's chat completions; with `hooks`, add the hidden states of the answer."""
        return await self._generate(http, body, name or f"chatcmpl-{uuid.uuid4().hex}", ChatFormat)

    async def _generate(self, http: HttpRequest, body: GenerationBody, id: str, form: type[CompletionFormat]) -> Any:
        generation = Generation(http, body, id, await body.requests(self.serving, self.settings, id))
        made = form(id, body, self.serving, self.settings.model_name)
        return await generation.run(self.serving.ready(), made, self.settings.allow_requests)

    async def list_models(self) -> Any:
        """Name the model that is served."""
        model = {"id": self.settings.model_name, "object": "model", "created": self.serving.started}
        return json_response({"object": "list", "data": [{**model, "owned_by": "hookline"}]})

    async def list_modules(self, pattern: str = "*") -> Any:
        """List the modules that hooks and hidden states may name: all, or those of `?pattern=model.layers.*`."""
        engine = self.serving.ready()
        # In a thread: of a thousand modules it takes milliseconds, for which no other client should wait.
        return await asyncio.to_thread(_modules, engine, pattern)

    async def health(self) -> Any:
        """Tell whether the server takes requests: 200 if so, 503 while it loads or stops, or if its engine failed."""
        status = self.serving.status
        return json_response({"status": status}, 200 if status == "ready" else 503)

    async def metrics(self) -> Any:
        """Give the counts of the engine, its hooks and HTTP, in Prometheus' text format."""
        figures = await self._hooks.figures() if self.serving.status == "ready" else []
        # After the counts of hooks, which wait for the running round: its tokens are counted by then.
        counts = {} if self.serving.engine is None else self.serving.engine.counts()
        return Response(self._metrics.page(counts, figures), media_type=self._metrics.content_type)


def _modules(engine: Engine, pattern: str) -> Any:
    found = [
        {"name": at.name, "type": at.type, "parameters": at.num_parameters, "width": engine.widths.get(at.name)}
        for at in find(engine.model, pattern)
    ]
    return json_response({"modules": found})


def make_hook_app(hooks: HookPaths) -> Any:
    """Return an ASGI app of the hook paths alone, behind the same gate as those of ``hookline serve``.

    Recipe: ``outer.routes.append(Route("/hooks", make_hook_app(paths)))``.
    """
    app = FastAPI(title="hookline", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    hooks.add_to(app)
    add_exception_handlers(app)
    return Gate(app, hooks.settings, observe=lambda method, route, status, seconds: None)
