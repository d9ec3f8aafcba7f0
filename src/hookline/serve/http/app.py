"""The HTTP side of a served model: routes, and what FastAPI is told about them.

Takes the engine and the settings from `server` (or a test), hands an ASGI app back. The routes read what they are
asked, ask the engine and write the answer; what they write lies in the files called ``http_…``. Needs
``hookline[serve]``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.exceptions import StarletteHTTPException as HTTPException  # what 404 and 405 are, too
from fastapi.responses import HTMLResponse, Response

from hookline.errors import HooklineError
from hookline.serve.http import answer_bodies as told
from hookline.serve.http import request_bodies as bodies
from hookline.serve.http.docs_page import page_of
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused, as_json, error_body, refusal_of, refusal_of_body
from hookline.serve.http.generation_routes import CompletionShape, GenerateShape, answer, stream
from hookline.serve.http.hook_routes import Attaching
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.metrics_page import Metrics
from hookline.serve.http.openapi_fixes import true_openapi
from hookline.serve.http.parse_request import asked_by_completion, asked_by_generate
from hookline.serve.http.request_gate import Gate
from hookline.serve.serving_engine import Engine

__all__ = ["make_app"]

_ABOUT: Final = """A causal language model with hooks: hidden states by request, statistics and exports while it runs.

Every error has one shape: `{"error": {"message", "type", "param", "code"}}`."""


_NOTHING_ELSE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def make_app(engine: Engine | None, settings: Settings | None = None) -> Any:
    """The ASGI app of a served model; ``app.state.serving.engine`` takes the engine if it comes later.

    Recipe::

        app = make_app(engine, Settings(model_name="tiny", token="secret"))
        uvicorn.run(app, host="127.0.0.1")
    """
    settings = settings or Settings()
    routes = _Routes(Serving(engine), settings, Metrics())
    # No pages of FastAPI's own: they load scripts from the internet, which a closed network has not.
    app = FastAPI(
        title="hookline", version=_version(), description=_ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.serving = routes.serving
    for add in (routes.add_generation, routes.add_hooks, routes.add_rest):
        add(app)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Gate, settings=settings, observe=routes.metrics.observe)
    made = app.openapi
    app.openapi = lambda: true_openapi(made(), settings)
    return app


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # its files lie on the path, and nobody installed it
        return "unknown"


def _can_fail(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": told.ErrorAnswer} for status in statuses}


_GENERATION: Final = (400, 401, 408, 413, 429, 500, 503)


class _Routes:
    """What is done for each path; the docstring of a route is what ``/docs`` says of it."""

    def __init__(self, serving: Serving, settings: Settings, metrics: Metrics) -> None:
        self.serving = serving
        self.settings = settings
        self.metrics = metrics
        self._attaching = Attaching(serving, settings)

    # -- generation --------------------------------------------------------------------------------------------

    def add_generation(self, app: Any) -> None:
        """Completions, in two dialects."""
        app.add_api_route(
            "/v1/completions", self.completions, methods=["POST"], tags=["generation"], name="complete",
            response_model=told.Completion, responses=_can_fail(*_GENERATION, 404),
        )  # fmt: skip
        app.add_api_route(
            "/generate", self.generate, methods=["POST"], tags=["generation"], name="generate",
            response_model=told.Generated | list[told.Generated], responses=_can_fail(*_GENERATION),
        )  # fmt: skip
        app.add_api_route(
            "/v1/models", self.models, methods=["GET"], tags=["generation"], name="list_models",
            response_model=told.ModelList, responses=_can_fail(401),
        )  # fmt: skip

    async def completions(self, body: bodies.CompletionBody, http: HttpRequest) -> Any:
        """Answers to one or several prompts, as OpenAI's completions; with `hooks`, their hidden states."""
        asked = await asked_by_completion(body, self.serving, self.settings)
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        shape = CompletionShape(asked, self.serving, self.settings.model_name, include_usage=with_usage)
        return await (stream if body.stream else answer)(http, self.serving, asked, shape)

    async def generate(self, body: bodies.GenerateBody, http: HttpRequest) -> Any:
        """Answers to one or several prompts, as SGLang's; with `hooks`, their hidden states."""
        asked = await asked_by_generate(body, self.serving, self.settings)
        return await (stream if body.stream else answer)(http, self.serving, asked, GenerateShape(asked))

    async def models(self) -> Any:
        """The model that is served."""
        model = {"id": self.settings.model_name, "object": "model", "created": self.serving.started}
        return _json({"object": "list", "data": [{**model, "owned_by": "hookline"}]})

    # -- hooks -------------------------------------------------------------------------------------------------

    def add_hooks(self, app: Any) -> None:
        """The hooks of the running model."""
        app.add_api_route(
            "/hooks", self.list_hooks, methods=["GET"], tags=["hooks"], name="list_hooks",
            response_model=told.HookList, responses=_can_fail(401, 503),
        )  # fmt: skip
        app.add_api_route(
            "/hooks", self.add_hook, methods=["POST"], tags=["hooks"], name="add_hook", status_code=201,
            response_model=told.HookAnswer, responses=_can_fail(400, 401, 403, 408, 413, 503),
        )  # fmt: skip
        app.add_api_route(
            "/hooks/{id}", self.remove_hook, methods=["DELETE"], tags=["hooks"], name="remove_hook",
            response_model=told.HookAnswer, responses=_can_fail(401, 403, 404, 503),
        )  # fmt: skip

    async def list_hooks(self) -> Any:
        """What is attached, on which modules, how often it fired, and what it costs."""
        return _json({"hooks": await self._attaching.list()})

    async def add_hook(self, body: bodies.HookBody) -> Any:
        """Attach a hook to the running model, between two forwards; wholly, or not at all."""
        return _json(await self._attaching.add(body), 201)

    async def remove_hook(self, id: str) -> Any:
        """Take a hook off; what it has done until now comes back. Hooks of the server's start can go, too."""
        return _json(await self._attaching.remove(id))

    # -- the rest ----------------------------------------------------------------------------------------------

    def add_rest(self, app: Any) -> None:
        """Health, metrics, the page."""
        app.add_api_route(
            "/health", self.health, methods=["GET"], tags=["server"], name="health",
            response_model=told.Health, responses={503: {"model": told.Health}},
        )  # fmt: skip
        app.add_api_route(
            "/metrics", self.metrics_page, methods=["GET"], tags=["server"], name="metrics",
            response_class=Response, responses={200: {"content": {"text/plain": {}}}, **_can_fail(401)},
        )  # fmt: skip

        async def docs() -> Any:
            return HTMLResponse(page_of(app.openapi()), headers={"Content-Security-Policy": _NOTHING_ELSE})

        app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)

    async def health(self) -> Any:
        """Whether the server takes requests: 200 if it does, 503 while it loads or stops, or if its engine failed."""
        status = self.serving.status
        return _json({"status": status}, 200 if status == "ready" else 503)

    async def metrics_page(self) -> Any:
        """Counts of the engine, its hooks and HTTP, in Prometheus' text format."""
        figures = await self._attaching.figures()
        # After the figures, which wait for the running step: its tokens are counted by then.
        counts = {} if self.serving.engine is None else self.serving.engine.counts()
        return Response(self.metrics.page(counts, figures), media_type=self.metrics.content_type)


def _json(value: Any, status: int = 200) -> Any:
    return Response(as_json(value), status_code=status, media_type="application/json")


# -- errors ----------------------------------------------------------------------------------------------------


def _refused(refused: Refused) -> Any:
    return Response(
        as_json(error_body(refused)), refused.status, media_type="application/json", headers=refused.headers
    )


async def _on_refused(_: HttpRequest, error: Exception) -> Any:
    return _refused(refusal_of(error))


async def _on_body(_: HttpRequest, error: Any) -> Any:
    return _refused(refusal_of_body(error.errors(), bodies.KEYS))


async def _on_http(http: HttpRequest, error: Any) -> Any:
    message = {
        400: "The body cannot be read as JSON.",
        404: f"There is nothing at {http.url.path!r}; see /docs for what there is.",
        405: f"{http.url.path!r} does not take {http.method}; see /docs for what it takes.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    if error.status_code == 405:  # where two routes share a path, the first would tell of itself alone
        headers["Allow"] = ", ".join(sorted(_methods_at(http)))
    return _refused(Refused(error.status_code, message, headers=headers))


def _methods_at(http: HttpRequest) -> set[str]:
    here = [route for route in http.app.routes if route.path_regex.match(http.url.path)]
    return {method for route in here for method in route.methods}


async def _on_bug(_: HttpRequest, error: Exception) -> Any:
    # What went wrong inside is in the server's log, with its traceback; it is nobody else's business.
    return _refused(Refused(500, f"The server failed on this request ({type(error).__name__}); see its log."))


_HANDLERS: Final[dict[Any, Any]] = {
    Refused: _on_refused,
    HooklineError: _on_refused,
    RequestValidationError: _on_body,
    HTTPException: _on_http,
    Exception: _on_bug,
}
