"""Give routes the engine: its state, and what its tokenizer makes of texts and conversations.

The server sets the engine once the model is loaded; the routes and the bodies of requests ask `Serving` for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar

from hookline.serve.http.error_answers import Refused
from hookline.serve.serving_engine import Engine

__all__ = ["PATIENCE_S", "Serving"]

T = TypeVar("T")

PATIENCE_S: Final = 60.0
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
        _check_text(text)
        return await self._encoded(partial(self.tokenizer.encode, text), len(text))

    async def tokens_of_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Return a conversation in tokens, as the model's chat template writes it, up to where the answer begins."""
        tokenizer = self.tokenizer
        for message in messages:
            _check_text(message["content"])

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


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"A text has half a character in it (a lone surrogate), at {error.start}.") from None


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
