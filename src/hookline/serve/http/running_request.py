"""One HTTP request while its answers are made: several sequences in the engine, one listener.

Takes `Request`s from the routes, hands back what the engine says of them on the event loop. However the HTTP request
ends, its sequences leave the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from hookline.serve.generation_request import Event, Finished, Request, Token
from hookline.serve.http.error_answers import Refused
from hookline.serve.serving_engine import Engine, Ticket

__all__ = ["Gathered", "Running", "check_ended_well"]


@dataclass
class Gathered:
    """What is known of one answer."""

    request: Request
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(token.text for token in self.tokens)


class Running:
    """The sequences of one HTTP request.

    Recipe::

        running = Running(engine, requests, every_token=False)
        answers = await running.all()
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], *, every_token: bool) -> None:
        self.answers = [Gathered(request) for request in requests]
        self._every_token = every_token
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(requests):
                self._tickets.append(engine.submit(request, partial(self.hear, index)))
        except Exception:  # there was room for some of them: all or none
            self.cancel()
            raise

    def hear(self, index: int, event: Event) -> None:
        """Called on the engine's thread: must not wait."""
        if isinstance(event, Token):
            # A list of Python may be appended to by one thread and read by another.
            self.answers[index].tokens.append(event)
            if not self._every_token:
                return  # waking the event loop costs about 20 µs, and nobody waits for this token
        try:
            self._loop.call_soon_threadsafe(self._heard.put_nowait, (index, event))
        except RuntimeError:  # the event loop has gone, and with it whoever asked
            self.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """What happens, until all have ended."""
        open_ones = len(self.answers)
        while open_ones:
            index, event = await self._heard.get()
            if isinstance(event, Finished):
                self.answers[index].finished = event
                open_ones -= 1
            yield index, event

    async def all(self) -> list[Gathered]:
        """All answers, whole; an error if one of them has none."""
        async for _, event in self.events():
            if isinstance(event, Finished):
                check_ended_well(event)
        return self.answers

    def cancel(self) -> None:
        """Take what still runs out of the engine; may be called again."""
        for ticket in self._tickets:
            ticket.cancel()


def check_ended_well(finished: Finished) -> None:
    """Raise for an answer that was cut off: half an answer must not look like a whole one."""
    said = (finished.error or "").rstrip(".")
    if finished.reason == "error":
        raise Refused(500, f"{said or 'The model failed on this request'}; see the server's log.")
    if finished.reason == "cancelled":
        raise Refused(503, f"{said or 'The server stopped before this answer was whole'}.")
