"""Give routes the engine: its state, its tokenizer, and the sequences of one HTTP request.

The server sets the engine once the model is loaded; the routes ask `Serving` for it and run a `RunningRequest` on it.
However an HTTP request ends, its sequences leave the engine. Imports no package that HTTP needs.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeVar

from hookline.errors import EngineBusy
from hookline.serve.generation_request import Event, Finished, GenerationRequest, Token
from hookline.serve.http.error_answers import Refused
from hookline.serve.serving_engine import Engine, Ticket

__all__ = ["AnswerSoFar", "RunningRequest", "Serving", "check_complete"]

T = TypeVar("T")

_PATIENCE_S: Final = 60.0
"""How long a route waits for its turn between two forwards."""
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

    async def change_hooks(self, change: Callable[..., T]) -> T:
        """Call `change` of the live hooks in a thread: it waits for the running forward, and may take long."""
        try:
            return await asyncio.to_thread(change, patience_s=_PATIENCE_S)
        except EngineBusy as busy:
            raise Refused(503, str(busy)) from None

    async def on_engine(self, act: Callable[[], T]) -> T:
        """Run a short `act` between two forwards; no thread waits meanwhile, of which the process has few."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.ready().between(act)), _PATIENCE_S)
        except TimeoutError:
            raise Refused(503, f"The engine had no time for this within {_PATIENCE_S:g} s; try again.") from None

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
        _check_text(text)
        return await self._encoded(partial(self.tokenizer.encode, text), len(text))

    async def tokens_of_chat(self, messages: Sequence[dict[str, str]], more: Mapping[str, Any]) -> tuple[int, ...]:
        """Return a conversation in tokens, as the model's chat template writes it, up to where the answer begins."""
        tokenizer = self.tokenizer
        for message in messages:
            _check_text(message["content"])

        def encode() -> Sequence[int]:
            text = _render_chat(tokenizer, messages, more)
            found: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
            return found

        return await self._encoded(encode, sum(len(each["content"]) + _MESSAGE for each in messages))

    async def _encoded(self, encode: Callable[[], Sequence[int]], size: int) -> tuple[int, ...]:
        """Run `encode`, of so many characters: in a thread if they are many, for which no other client should wait."""
        if size < _LONG_TEXT:
            return tuple(encode())
        async with self._long_texts:
            return tuple(await asyncio.to_thread(encode))

    def text_of(self, ids: tuple[int, ...]) -> str:
        """Return tokens as text."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def word_of(self, id: int) -> str:
        """Return one token as text, for log-probabilities; its number if there is no tokenizer."""
        tokenizer = getattr(self.engine, "tokenizer", None)
        return f"token_id:{id}" if tokenizer is None else str(tokenizer.decode([id]))


@dataclass
class AnswerSoFar:
    """One answer, as far as it has come."""

    request: GenerationRequest
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(token.text for token in self.tokens)


class RunningRequest:
    """Run the sequences of one HTTP request.

    Recipe::

        running = RunningRequest(requests, every_token=False)
        running.submit(engine)
        answers = await running.all()
    """

    def __init__(self, requests: Sequence[GenerationRequest], *, every_token: bool) -> None:
        self.answers = [AnswerSoFar(request) for request in requests]
        self._every_token = every_token
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._ticket: Ticket | None = None
        self._is_over = False

    def submit(self, engine: Engine, allow: Sequence[str] = ()) -> None:
        """Hand all sequences to the engine, or none; `allow` is for factories of their hooks. From any thread."""
        listeners = [partial(self.on_event, index) for index in range(len(self.answers))]
        requests = [answer.request for answer in self.answers]
        self._ticket = engine.submit_all(requests, listeners, allow=allow, hold=True)
        if self._is_over:  # the client went meanwhile
            self.end()

    def on_event(self, index: int, event: Event) -> None:
        """Take an event of sequence `index`; called on the engine's thread, so it must not wait."""
        if isinstance(event, Token):
            # A list of Python may be appended to by one thread and read by another.
            self.answers[index].tokens.append(event)
            if not self._every_token:
                return  # waking the event loop costs about 20 µs, and this token is read later
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
        except RuntimeError:  # the event loop has ended, and with it the client's connection
            self.end()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield events until all sequences have ended."""
        open_ones = len(self.answers)
        while open_ones:
            index, event = await self._events.get()
            if isinstance(event, Finished):
                self.answers[index].finished = event
                open_ones -= 1
            yield index, event

    async def all(self) -> list[AnswerSoFar]:
        """Return all answers, complete; raise if one of them was cut off."""
        async for _, event in self.events():
            if isinstance(event, Finished):
                check_complete(event)
        return self.answers

    def end(self) -> None:
        """Cancel what still runs, and let go of the hidden states: the answer is sent, or its client has gone."""
        self._is_over = True
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket.release()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"A text has half a character in it (a lone surrogate), at {error.start}.") from None


def check_complete(finished: Finished) -> None:
    """Raise for an answer that was cut off: half an answer must not look like a whole one."""
    said = (finished.error or "").rstrip(".")
    if finished.reason == "error":
        raise Refused(500, f"{said or 'The model failed on this request'}; see the server's log.")
    if finished.reason == "cancelled":
        raise Refused(503, f"{said or 'The server stopped before this answer was whole'}.")


# -- conversations: the template is the model's; transformers runs it in Jinja's sandbox -------------------------


def _render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], more: Mapping[str, Any]) -> str:
    """Return the prompt of `messages`; `more` are other variables of the template. Raise a 400 if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise Refused(
            400,
            "The model's tokenizer has no chat template, so that messages mean nothing to it; send a prompt to "
            "/v1/completions, or start the server with --chat-template FILE.",
        )
    wrong = sorted({"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} & more.keys())
    if wrong:  # it would replace the template, the messages or the form of the result
        text = f"chat_template_kwargs may not set {wrong[0]!r}, which the server sets."
        raise Refused(400, text, param="$.chat_template_kwargs")
    if "developer" not in str(template):
        messages = [{**each, "role": each["role"].replace("developer", "system")} for each in messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))
    except Exception as error:  # the template is a program, which may raise anything on messages it does not like
        said = str(error) or type(error).__name__
        raise Refused(400, f"The model's chat template refuses these messages: {said}", param="$.messages") from error
