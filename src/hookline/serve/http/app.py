"""Make the ASGI apps of served models: routes, error handlers, the request gate.

`Server` (or a test) calls `make_app`, the endpoints of another engine call `make_hook_app`. The routes parse a request,
ask the engine and format the answer with the other modules of this folder. Needs ``hookline[serve]``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import FastAPI, Header
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from hookline import __version__
from hookline.serve.http.error_answers import ERRORS, Refused, add_exception_handlers, json_response
from hookline.serve.http.generation_routes import NAMED, ChatFormat, CompletionFormat, Generation
from hookline.serve.http.hook_routes import PATIENCE_S, HookPaths, LiveHookPaths, metrics_page
from hookline.serve.http.request_bodies import ChatBody, CompletionBody
from hookline.serve.http.request_gate import Gate, Settings
from hookline.serve.serving_engine import Engine
from hookline.sites.find import find

T = TypeVar("T")

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
    routes = _Routes(Serving(engine), settings)
    # No pages: those of FastAPI load scripts from the internet, which a closed network has not.
    app = FastAPI(
        title="hookline", version=__version__, description=_ABOUT, responses=ERRORS, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.state.serving = routes.serving
    routes.add_to(app)
    add_exception_handlers(app)
    app.add_middleware(Gate, settings=settings)
    return app


_WHOLE_OR_STREAM: Final[dict[int | str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_Name = Annotated[str | None, Header(alias=NAMED, pattern="^[A-Za-z0-9._:-]{1,128}$")]
"""What a client calls its request: nothing that a pattern of names, or a line of a log, could be confused by."""


class _Routes(LiveHookPaths):
    """Answer each path; the docstring of a route is its description in ``/openapi.json``."""

    def add_to(self, app: Any) -> None:
        """Add every route to `app`."""
        generating: dict[str, Any] = {"methods": ["POST"], "responses": _WHOLE_OR_STREAM}
        app.add_api_route("/v1/completions", self.complete, **generating)
        app.add_api_route("/v1/chat/completions", self.chat, **generating)
        super().add_to(app)
        app.add_api_route("/v1/models", self.list_models, methods=["GET"])
        app.add_api_route("/modules", self.list_modules, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        text: dict[int | str, Any] = {200: {"content": {"text/plain": {}}}}
        app.add_api_route("/metrics", self.show_metrics, methods=["GET"], response_class=Response, responses=text)

    async def complete(self, body: CompletionBody, http: HttpRequest, name: _Name = None) -> Any:
        """Answer one or several prompts, as OpenAI's completions; with `hooks`, add their hidden states."""
        return await self._generate(http, body, name or f"cmpl-{uuid.uuid4().hex}", CompletionFormat)

    async def chat(self, body: ChatBody, http: HttpRequest, name: _Name = None) -> Any:
        """Answer a conversation, as OpenAI's chat completions; with `hooks`, add the hidden states of the answer."""
        return await self._generate(http, body, name or f"chatcmpl-{uuid.uuid4().hex}", ChatFormat)

    async def _generate(
        self, http: HttpRequest, body: CompletionBody | ChatBody, id: str, form: type[CompletionFormat]
    ) -> Any:
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

    async def show_metrics(self) -> Any:
        """Give the counts of the engine and its hooks, in Prometheus' text format."""
        figures = await self.figures() if self.serving.status == "ready" else []
        # After the counts of hooks, which wait for the running round: its tokens are counted by then.
        counts = {} if self.serving.engine is None else self.serving.engine.counts()
        return metrics_page(counts, figures)


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
    return Gate(app, hooks.settings)


# -- what routes know of the engine ---------------------------------------------------------------------------------

_LONG_TEXT: Final = 10_000
"""Characters from which on a text is turned into tokens outside of the event loop: about 5 ms of it."""
_MESSAGE: Final = 50
"""Characters that take as long as the chat template takes for one message."""
_LONG_AT_ONCE: Final = 2
"""So many long texts are turned into tokens at a time: one of 4 MB takes up to a gigabyte for that."""


class Serving:
    """Hold the engine, and whether it takes requests.

    Recipe: ``serving = Serving(engine); await serving.on_engine(engine.hooks.metrics)``.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self.is_draining = False
        self.started = int(time.time())
        self._long_texts = asyncio.Semaphore(_LONG_AT_ONCE)

    @property
    def status(self) -> Literal["loading", "ready", "draining", "failed"]:
        """Return what ``/health`` says; an engine that has stopped by itself has failed: only a new process helps."""
        engine = self.engine
        if engine is not None and (engine.has_failed or not (engine.is_running or self.is_draining)):
            return "failed"
        if self.is_draining:
            return "draining"
        return "loading" if engine is None else "ready"

    def ready(self) -> Engine:
        """Return the engine; raise a 503 if it takes no requests."""
        if self.is_draining:
            raise Refused(503, "The server is stopping; it takes no more requests.", headers={"Retry-After": "5"})
        if self.engine is None:
            raise Refused(503, "The model is being loaded; ask /health until it is.", headers={"Retry-After": "2"})
        return self.engine

    async def on_engine(self, act: Callable[[], T]) -> T:
        """Run a short `act` between two forwards; no thread waits meanwhile, of which the process has few."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.ready().between(act)), PATIENCE_S)
        except TimeoutError:
            raise Refused(503, f"The engine had no time for this within {PATIENCE_S:g} s; try again.") from None

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer; raise a 400 if there is none."""
        found = self.ready().tokenizer
        if found is None:
            raise Refused(
                400, "The model is served without a tokenizer, so that text means nothing to it; send token ids."
            )
        return found

    async def tokens_of(self, text: str) -> tuple[int, ...]:
        """Return `text` in tokens, with those that the model's tokenizer adds before and after."""
        return await self._encoded(partial(self.tokenizer.encode, text), len(text))

    async def tokens_of_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Return a conversation in tokens, as the model's chat template writes it, up to where the answer begins."""
        tokenizer = self.tokenizer

        def encode() -> Sequence[int]:
            text = _render_chat(tokenizer, messages)
            found: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
            return found

        return await self._encoded(encode, sum(len(each["content"]) + _MESSAGE for each in messages))

    async def _encoded(self, encode: Callable[[], Sequence[int]], size: int) -> tuple[int, ...]:
        """Run `encode`, of so many characters; if they are many, in a thread: no other client should wait for it."""
        if size < _LONG_TEXT:
            return tuple(encode())
        async with self._long_texts:
            return tuple(await asyncio.to_thread(encode))

    def word_of(self, id: int) -> str:
        """Return one token as text, for log-probabilities; its number if there is no tokenizer."""
        tokenizer = getattr(self.engine, "tokenizer", None)
        return f"token_id:{id}" if tokenizer is None else str(tokenizer.decode([id]))


# -- conversations: the template is the model's; transformers runs it in Jinja's sandbox -------------------------


def _render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt of `messages`; raise a 400 if the tokenizer has no template."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise Refused(
            400,
            "The model's tokenizer has no chat template, so that messages mean nothing to it; send a prompt to "
            "/v1/completions, or start the server with --chat-template FILE.",
        )
    if "developer" not in str(template):
        messages = [{**each, "role": each["role"].replace("developer", "system")} for each in messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # the template is a program, which may raise anything on messages it does not like
        said = str(error) or type(error).__name__
        raise Refused(400, f"The model's chat template refuses these messages: {said}", param="$.messages") from error
