"""The engine as HTTP sees it: not there yet, ready, draining, or gone.

Filled by `server` once the model is loaded, asked by the routes of `app`. Imports nothing that HTTP needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

from hookline.serve.http.error_answers import Refused
from hookline.serve.serving_engine import Engine

__all__ = ["Serving"]

T = TypeVar("T")

_PATIENCE_S: Final = 60.0
"""How long a route waits for its turn between two forwards."""
_LONG_TEXT: Final = 10_000
"""Characters from which on a text is turned into tokens outside of the event loop: about 5 ms of it."""
_LONG_AT_ONCE: Final = 2
"""So many long texts are turned into tokens at a time: one of 4 MB takes up to a gigabyte for that."""


class Serving:
    """The engine, and whether it takes requests.

    Recipe: ``serving = Serving(engine); await serving.between_forwards(engine.hooks.metrics)``.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self.is_draining = False
        self.has_failed = False
        """The engine has stopped by itself, and only a new process helps."""
        self.started = int(time.time())
        self._long_texts = asyncio.Semaphore(_LONG_AT_ONCE)

    @property
    def status(self) -> Literal["loading", "ready", "draining", "failed"]:
        """What ``/health`` says; asked by the server itself every second."""
        if self.engine is not None and not self.is_draining and not self.engine.is_running:
            self.has_failed = True
        if self.has_failed:
            return "failed"
        if self.is_draining:
            return "draining"
        return "loading" if self.engine is None else "ready"

    def ready(self) -> Engine:
        """The engine; an error that says to come back later if it takes no requests."""
        if self.is_draining:
            raise Refused(503, "The server is stopping; it takes no more requests.", headers={"Retry-After": "5"})
        if self.engine is None:
            raise Refused(503, "The model is being loaded; ask /health until it is.", headers={"Retry-After": "2"})
        return self.engine

    async def between_forwards(self, act: Callable[[], T]) -> T:
        """Do what waits for the running forward to end, and may take its time, in a thread."""
        return await self._in_time(asyncio.to_thread(act))

    async def on_engine(self, act: Callable[[], T]) -> T:
        """The same for what is short: no thread waits meanwhile, of which the process has few."""
        return await self._in_time(asyncio.wrap_future(self.ready().between(act)))

    async def _in_time(self, done: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(done, _PATIENCE_S)
        except TimeoutError:
            raise Refused(503, f"The engine had no time for this within {_PATIENCE_S:g} s; try again.") from None

    @property
    def tokenizer(self) -> Any:
        """What turns text into tokens."""
        found = self.ready().tokenizer
        if found is None:
            raise Refused(400, "The model has no tokenizer, so that text means nothing to it; send token ids.")
        return found

    async def tokens_of(self, text: str) -> tuple[int, ...]:
        """A text in tokens, with those that the model's tokenizer puts before and after."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refused(400, f"A text has half a character in it (a lone surrogate), at {error.start}.") from None
        tokenizer = self.tokenizer
        if len(text) < _LONG_TEXT:
            return tuple(tokenizer.encode(text))
        async with self._long_texts:
            return tuple(await asyncio.to_thread(tokenizer.encode, text))

    def text_of(self, ids: tuple[int, ...]) -> str:
        """Tokens as text."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
