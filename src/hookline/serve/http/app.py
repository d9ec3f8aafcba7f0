"""Make the ASGI app of a served model: routes, error handlers, the request gate.

`Server` (or a test) calls `make_app`; the routes parse a request, ask the engine and format the answer with the other
modules of this folder. Needs ``hookline[serve]``.
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
from hookline.serve.http import answer_bodies as answers
from hookline.serve.http import request_bodies as bodies
from hookline.serve.http.api_docs import correct_openapi, render_docs
from hookline.serve.http.engine_state import Serving
from hookline.serve.http.error_answers import Refused, error_body, refusal_from_error, refusal_from_validation, to_json
from hookline.serve.http.generation_routes import CompletionFormat, GenerateFormat, answer, stream
from hookline.serve.http.hook_routes import HookRoutes
from hookline.serve.http.http_settings import Settings
from hookline.serve.http.metrics_page import Metrics
from hookline.serve.http.request_bodies import parse_completion, parse_generate
from hookline.serve.http.request_gate import Gate
from hookline.serve.serving_engine import Engine

__all__ = ["make_app"]

_ABOUT: Final = """A causal language model with hooks: hidden states by request, statistics and exports while it runs.

Every error has one shape: `{"error": {"message", "type", "param", "code"}}`."""


_NOTHING_ELSE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def make_app(engine: Engine | None, settings: Settings | None = None) -> Any:
    """Return the ASGI app of a served model; set ``app.state.serving.engine`` if the engine comes later.

    Recipe::

        app = make_app(engine, Settings(model_name="tiny", token="secret"))
        uvicorn.run(app, host="127.0.0.1")
    """
    settings = settings or Settings()
    metrics = Metrics()
    routes = _Routes(Serving(engine), settings, metrics)
    # No pages of FastAPI's own: they load scripts from the internet, which a closed network has not.
    app = FastAPI(
        title="hookline", version=_version(), description=_ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.serving = routes.serving
    routes.add_to(app)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Gate, settings=settings, observe=metrics.observe)
    made = app.openapi
    app.openapi = lambda: correct_openapi(made(), settings)
    return app


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # its files are on the path, but it is not installed
        return "unknown"


def _can_fail(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": answers.ErrorAnswer} for status in statuses}


_GENERATION: Final = (400, 401, 408, 413, 429, 500, 503)


class _Routes:
    """Answer each path; the docstring of a route is its description on ``/docs``."""

    def __init__(self, serving: Serving, settings: Settings, metrics: Metrics) -> None:
        self.serving = serving
        self.settings = settings
        self._metrics = metrics
        self._hooks = HookRoutes(serving, settings)

    def add_to(self, app: Any) -> None:
        """Add every route to `app`."""
        generated = answers.Generated | list[answers.Generated]
        described: list[tuple[str, str, str, Any, Any, tuple[int, ...]]] = [
            ("POST", "/v1/completions", "generation", self.complete, answers.Completion, (*_GENERATION, 404)),
            ("POST", "/generate", "generation", self.generate, generated, _GENERATION),
            ("GET", "/v1/models", "generation", self.list_models, answers.ModelList, (401,)),
            ("GET", "/hooks", "hooks", self.list_hooks, answers.HookList, (401, 503)),
            ("POST", "/hooks", "hooks", self.add_hook, answers.HookAnswer, (400, 401, 403, 408, 413, 503)),
            ("DELETE", "/hooks/{id}", "hooks", self.remove_hook, answers.HookAnswer, (401, 403, 404, 503)),
        ]
        for method, path, tag, handler, model, statuses in described:
            app.add_api_route(
                path, handler, methods=[method], tags=[tag], name=handler.__name__, response_model=model,
                responses=_can_fail(*statuses), status_code=201 if handler == self.add_hook else None,
            )  # fmt: skip
        app.add_api_route(
            "/health", self.health, methods=["GET"], tags=["server"], name="health",
            response_model=answers.Health, responses={503: {"model": answers.Health}},
        )  # fmt: skip
        app.add_api_route(
            "/metrics", self.metrics, methods=["GET"], tags=["server"], name="metrics",
            response_class=Response, responses={200: {"content": {"text/plain": {}}}, **_can_fail(401)},
        )  # fmt: skip

        async def docs() -> Any:
            return HTMLResponse(render_docs(app.openapi()), headers={"Content-Security-Policy": _NOTHING_ELSE})

        app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)

    async def complete(self, body: bodies.CompletionBody, http: HttpRequest) -> Any:
        """Answer one or several prompts, as OpenAI's completions; with `hooks`, add their hidden states."""
        asked = await parse_completion(body, self.serving, self.settings)
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        form = CompletionFormat(asked, self.serving, self.settings.model_name, include_usage=with_usage)
        return await (stream if body.stream else answer)(http, self.serving, asked, form)

    async def generate(self, body: bodies.GenerateBody, http: HttpRequest) -> Any:
        """Answer one or several prompts, as SGLang does; with `hooks`, add their hidden states."""
        asked = await parse_generate(body, self.serving, self.settings)
        return await (stream if body.stream else answer)(http, self.serving, asked, GenerateFormat(asked))

    async def list_models(self) -> Any:
        """Name the model that is served."""
        model = {"id": self.settings.model_name, "object": "model", "created": self.serving.started}
        return _json({"object": "list", "data": [{**model, "owned_by": "hookline"}]})

    async def list_hooks(self) -> Any:
        """List the attached hooks: on which modules, how often each fired, and what it costs."""
        return _json({"hooks": await self._hooks.list()})

    async def add_hook(self, body: bodies.HookBody) -> Any:
        """Attach a hook to the running model, between two forwards; wholly, or not at all."""
        return _json(await self._hooks.add(body), 201)

    async def remove_hook(self, id: str) -> Any:
        """Remove a hook, also one of the server's start; return what it has done until now."""
        return _json(await self._hooks.remove(id))

    async def health(self) -> Any:
        """Tell whether the server takes requests: 200 if so, 503 while it loads or stops, or if its engine failed."""
        status = self.serving.status
        return _json({"status": status}, 200 if status == "ready" else 503)

    async def metrics(self) -> Any:
        """Give the counts of the engine, its hooks and HTTP, in Prometheus' text format."""
        figures = await self._hooks.figures()
        # After the counts of hooks, which wait for the running round: its tokens are counted by then.
        counts = {} if self.serving.engine is None else self.serving.engine.counts()
        return Response(self._metrics.page(counts, figures), media_type=self._metrics.content_type)


def _json(value: Any, status: int = 200) -> Any:
    return Response(to_json(value), status_code=status, media_type="application/json")


# -- errors ----------------------------------------------------------------------------------------------------


def _refused(refused: Refused) -> Any:
    return Response(
        to_json(error_body(refused)), refused.status, media_type="application/json", headers=refused.headers
    )


async def _on_refused(_: HttpRequest, error: Exception) -> Any:
    return _refused(refusal_from_error(error))


async def _on_body(_: HttpRequest, error: Any) -> Any:
    return _refused(refusal_from_validation(error.errors(), bodies.KEYS))


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
    # The details are in the server's log, with the traceback; clients get the type alone.
    return _refused(Refused(500, f"The server failed on this request ({type(error).__name__}); see its log."))


_HANDLERS: Final[dict[Any, Any]] = {
    Refused: _on_refused,
    HooklineError: _on_refused,
    RequestValidationError: _on_body,
    HTTPException: _on_http,
    Exception: _on_bug,
}
