"""One request while it waits and runs: its answer so far, whether it is to end, and who is told.

Made by ``engine`` when a request is accepted, carried through ``batch`` and ``states``; lives on the engine's thread,
but for ``cancelled``, which any thread may set.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from hookline.serve.generation.answer_text import TextStream
from hookline.serve.generation.sampling import NO_TOKEN, Choice
from hookline.serve.generation_request import Event, Finished, Request, Token

if TYPE_CHECKING:
    from hookline.serve.generation.row_hidden_states import RowStates

__all__ = ["Row", "Ticket"]

logger = logging.getLogger("hookline.serve.serving_engine")


class Row:
    """A request on its way."""

    def __init__(
        self,
        request: Request,
        on_event: Callable[[Event], None],
        *,
        tokenizer: Any = None,
        eos: frozenset[int] = frozenset(),
        states: RowStates | None = None,
    ) -> None:
        self.request = request
        self.states = states
        self.answer: list[int] = []
        self.draws = Random(secrets.randbits(64) if request.seed is None else request.seed)
        self.cancelled = False
        self.finished: Finished | None = None
        self._ending: Literal["stop", "length"] | None = None
        self._on_event = on_event
        self._eos = frozenset() if request.ignore_eos else eos
        self._text = TextStream(tokenizer, request.prompt_ids, request.stop)

    @property
    def is_over(self) -> bool:
        """Whether it takes no more tokens."""
        return self._ending is not None or self.finished is not None

    @property
    def last(self) -> int:
        """The token that goes into the next forward."""
        return self.answer[-1]

    @property
    def position(self) -> int:
        """Its position in the sequence of prompt and answer."""
        return len(self.request.prompt_ids) + len(self.answer) - 1

    def take(self, choice: Choice) -> None:
        """One more token, or the end where there cannot be one."""
        if self.request.max_tokens == 0:
            self._ending = "length"
        elif choice.id == NO_TOKEN:
            self.fail("The model gave logits that are not numbers (NaN or infinite), of which none can be chosen.")
        else:
            self._add(choice)

    def _add(self, choice: Choice) -> None:
        self.answer.append(choice.id)
        is_end = choice.id in self._eos
        text = "" if is_end else self._text.add(choice.id)
        if is_end or self._text.met is not None:
            self._ending = "stop"
        elif len(self.answer) >= self.request.max_tokens:
            self._ending = "length"
        if self._ending is not None:
            text += self._text.rest()
            if self._text.met is not None:  # it was complete but for what the last token had held back
                self._ending = "stop"
        self._tell(Token(choice.id, text, choice.logprob, choice.top_logprobs))

    def finish(self) -> None:
        """The end that its last token brought, with what it asked for; nothing if it has failed."""
        if self._ending is None or self.finished is not None:
            return
        try:
            states = self.states.result() if self.states is not None else None
        except Exception as error:
            self.fail(f"Its hidden states could not be put together: {error}")
            return
        self._end(Finished(self._ending, states, *self._counts(), stop=self._text.met))

    def fail(self, error: str) -> None:
        """An end that nobody wanted."""
        self._end(Finished("error", None, *self._counts(), error=error))

    def cancel(self, why: str | None = None) -> None:
        """An end before the end."""
        self._end(Finished("cancelled", None, *self._counts(), error=why))

    def _counts(self) -> tuple[int, int]:
        return len(self.request.prompt_ids), len(self.answer)

    def _end(self, finished: Finished) -> None:
        if self.finished is None:
            self.finished = finished
            self._tell(finished)

    def _tell(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            # One client's listener is no reason to keep the others waiting.
            logger.exception("The listener of request %r raised; the request is cancelled", self.request.id)
            self.cancelled = True


class Ticket:
    """What ``submit`` gives back: the means to call a request off."""

    def __init__(self, row: Row, wake: Callable[[], None]) -> None:
        self._row = row
        self._wake = wake

    @property
    def finished(self) -> bool:
        """Whether its end has been told."""
        return self._row.finished is not None

    def cancel(self) -> None:
        """Leave at the next step; ``Finished("cancelled")`` follows, unless it has ended meanwhile.

        From any thread, and as often as one likes.
        """
        self._row.cancelled = True
        self._wake()
