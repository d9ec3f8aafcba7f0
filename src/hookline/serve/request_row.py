"""One request while it waits and runs: its answer as tokens and text, and how it ends.

`Engine.submit` makes a `RequestRow`; the loop and the batch carry it. It lives on the engine's thread, except for
``cancelled``, which any thread may set.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal

from hookline.factories.request_notes import RequestFlag, merge_flags
from hookline.serve.generation_request import Event, Finished, GenerationRequest, Reason, Token
from hookline.serve.row_batch import NO_TOKEN, ChosenToken

if TYPE_CHECKING:
    from hookline.engines.hidden_states import RequestStates
    from hookline.engines.live_hooks import PreparedHooks
    from hookline.engines.session import Session

logger = logging.getLogger("hookline.serve.serving_engine")

_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
_CONTEXT: Final = 6
"""So many tokens of the prompt are decoded along, because a token's text depends on what it follows: at the very
beginning, many tokenizers drop its leading space."""
_LONGEST_WINDOW: Final = 64
"""After so many tokens that end in no whole character, the bytes are no text, and are let out as they are."""


class TextStream:
    """Turn tokens into text one by one; cut no character in two, and let no part of a stop text out.

    Recipe::

        stream = TextStream(tokenizer, prompt_ids, stop=("END",))
        for token in answer:
            print(stream.add(token), end="")
        print(stream.rest())

    ``met`` is the stop text that has ended it, if one has.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = list(prompt_ids[-_CONTEXT:])
        """The tokens that are decoded together: those of the last text, then those that came since."""
        self._known = self._decode()
        """Their text, without those that came since."""
        self._new_from = len(self._window)
        self._held = ""
        """Text that may be the beginning of a stop text."""
        self.met: str | None = None

    def add(self, token: int) -> str:
        """Return the text that `token` adds to the answer."""
        self._window.append(token)
        text = self._decode()
        if text.endswith(_BROKEN) and len(self._window) - self._new_from < _LONGEST_WINDOW:
            return ""
        added = self._new(text)
        self._window = self._window[self._new_from :]
        self._known = self._decode()
        self._new_from = len(self._window)
        return self._until_stop(added)

    def rest(self) -> str:
        """Return the text held back, at the end; incomplete characters become replacement characters."""
        if self.met is not None:
            return ""
        added = self._until_stop(self._new(self._decode()))
        return added if self.met is not None else added + self._held

    def _new(self, text: str) -> str:
        """Return the part of `text` that was not there before; of half a character that is now whole, all of it."""
        known = self._known if text.startswith(self._known) else self._known.rstrip(_BROKEN)
        return text[len(known) :]

    def _decode(self) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _until_stop(self, added: str) -> str:
        if not self._stop:
            return added
        text = self._held + added
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.met = min(found, key=lambda each: each[0])
            self._held = ""
            return text[:place]
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of `text` are the first of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class RequestRow:
    """A request that waits or runs; it alone knows how far its answer is, and how it ends."""

    def __init__(
        self,
        request: GenerationRequest,
        on_event: Callable[[Event], None],
        *,
        tokenizer: Any = None,
        end_tokens: frozenset[int] = frozenset(),
        states: RequestStates | None = None,
    ) -> None:
        self.request = request
        self.states = states
        self.hooks: PreparedHooks | None = None
        """Its own hooks, if it asks for any."""
        self.answer: list[int] = []
        self.draws = Random(secrets.randbits(64) if request.seed is None else request.seed)
        self.cancelled = False
        self.error: str | None = None
        """Why it has failed."""
        self.finished: Reason | None = None
        """How it has ended, once that is reported."""
        self._flags: list[RequestFlag] = []
        self._ending: Literal["stop", "length"] | None = None
        self._on_event = on_event
        self._end_tokens = frozenset() if request.ignore_eos else end_tokens
        self._text = TextStream(tokenizer, request.prompt_ids, request.stop)

    @property
    def is_over(self) -> bool:
        """Return whether it takes no more tokens."""
        return self._ending is not None or self.error is not None

    @property
    def position(self) -> int:
        """Return the position of its last token in the sequence of prompt and answer."""
        return len(self.request.prompt_ids) + len(self.answer) - 1

    def open(self, session: Session) -> None:
        """Attach its hooks, and what gathers its hidden states; called before its first forward."""
        if self.states is not None:
            session.states.open(self.states)
        if self.hooks is not None:
            self.hooks.open()

    def take(self, choice: ChosenToken, flags: Sequence[RequestFlag] = ()) -> None:
        """Take what a forward gave: the chosen token, and what probes found; one that stops ends the answer before."""
        self._flags = merge_flags([*self._flags, *flags]) if flags else self._flags
        if any(flag.stops for flag in flags):
            self._ending = "stop"
        elif self.request.max_tokens == 0:
            self._ending = "length"
        elif choice.id == NO_TOKEN:
            self.error = (
                "The model gave logits that are not numbers (NaN or infinite), of which none can be chosen; the hook "
                "hookline.factories:nan_alarm on '*' names the modules that give them."
            )
        else:
            self._add(choice)
        if self.states is not None and self.states.error is not None:
            self.error = f"Its hidden states cannot be had: {str(self.states.error).rstrip('.')}."

    def _add(self, choice: ChosenToken) -> None:
        self.answer.append(choice.id)
        is_end = choice.id in self._end_tokens
        try:
            text = "" if is_end else self._text.add(choice.id)
            if is_end or self._text.met is not None:
                self._ending = "stop"
            elif len(self.answer) >= self.request.max_tokens:
                self._ending = "length"
            if self._ending is not None:
                text += self._text.rest()
                if self._text.met is not None:  # it was complete but for what the last token had held back
                    self._ending = "stop"
        except Exception as error:  # the tokenizer's, of whom a model's larger vocabulary may ask too much
            logger.exception("Token %d of request %r has no text", choice.id, self.request.id)
            self.error = f"Token {choice.id} has no text: {type(error).__name__}: {error}"
            return
        self._tell(Token(choice.id, text, choice.logprob, choice.top_logprobs))

    def end(self, session: Session) -> None:
        """Take off its hooks and report its end: as failed, as complete with all that was asked for, or as cancelled.

        Only the first call does something.
        """
        if self.finished is not None:
            return
        # First of all: their metrics are part of the answer.
        hooks = () if self.hooks is None else tuple(self.hooks.close())
        states = None
        if self.states is not None:
            session.states.close(self.states)
            try:
                states = self.states.result() if self._ending is not None and self.error is None else None
            except Exception as error:
                self.error = f"Its hidden states could not be put together: {error}"
        self.states = None
        self.finished = "error" if self.error is not None else self._ending or "cancelled"
        counts = len(self.request.prompt_ids), len(self.answer)
        if self.finished in ("stop", "length"):
            self._tell(Finished(self.finished, states, *counts, hooks=hooks, flags=tuple(self._flags)))
        else:
            self._tell(Finished(self.finished, None, *counts, error=self.error))
        self._on_event = lambda event: None  # who still has this row must not keep the answer, with its hidden states

    def _tell(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            # One client's listener is no reason to keep the others waiting.
            logger.exception("The listener of request %r raised; the request is cancelled", self.request.id)
            self.cancelled = True


class Ticket:
    """Cancel a request, or several that were submitted together; `Engine.submit` returns it.

    Recipe::

        request = hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7), max_tokens=64)
        ticket = engine.submit(request, on_event=print)
        ticket.cancel()
    """

    def __init__(self, rows: Sequence[RequestRow], *, hold: bool = False) -> None:
        self.rows = rows
        self.nbytes = sum(row.states.most_bytes or 0 for row in rows if row.states is not None)
        """What the hidden states of all can come to."""
        self._is_held = hold

    @property
    def finished(self) -> bool:
        """Return whether the end of all has been reported."""
        return all(row.finished is not None for row in self.rows)

    @property
    def is_open(self) -> bool:
        """Return whether the bytes of the hidden states are still in use."""
        return self._is_held or not self.finished

    def cancel(self) -> None:
        """Cancel the requests at the next round; ``Finished("cancelled")`` follows, unless they have ended meanwhile.

        From any thread, and as often as one likes.
        """
        for row in self.rows:
            row.cancelled = True

    def release(self) -> None:
        """Say that the hidden states are kept no longer, if they were submitted with ``hold``; from any thread."""
        self._is_held = False
