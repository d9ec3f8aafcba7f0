"""One request while it waits and runs: its answer as tokens and text, and how it ends.

`Engine.submit` makes a `RequestRow`; the batch, the loop and the gathering of hidden states carry it. It lives on the
engine's thread, except for ``cancelled``, which any thread may set.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal

from hookline.factories.request_notes import RequestFlag, merge_flags
from hookline.serve.generation_request import Event, Finished, GenerationRequest, Token
from hookline.serve.sampling import NO_TOKEN, ChosenToken

if TYPE_CHECKING:
    from hookline.engines.hidden_states import RequestStates
    from hookline.engines.request_hooks import PreparedHooks

__all__ = ["RequestRow", "TextStream", "Ticket"]

_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
_CONTEXT: Final = 6
"""So many tokens of the prompt are decoded along, because a token's text depends on what it follows: at the very
beginning, many tokenizers drop its leading space."""
_LONGEST_CHARACTER: Final = 4  # bytes in UTF-8, so at most three tokens of it are there while it is incomplete
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
        self._prompt = self._decode()
        """The text of the prompt, for as long as its tokens are among them."""
        self._known = self._prompt.rstrip(_BROKEN)
        """What of their text was there before; without half a character, which the next token may complete."""
        self._new_from = len(self._window)
        self._held = ""
        """Text that may be the beginning of a stop text."""
        self.met: str | None = None

    def add(self, token: int) -> str:
        """Return the text that `token` adds to the answer."""
        if self._tokenizer is None or self.met is not None:
            return ""
        self._window.append(token)
        text = self._decode()
        whole = _without_broken_end(text)
        if len(self._window) - self._new_from >= _LONGEST_WINDOW:
            whole = text
        added = self._new(text, whole)
        self._known = max(self._known, whole, key=len)
        if whole == text:
            self._move_on()
        return self._until_stop(added)

    def rest(self) -> str:
        """Return the text held back, at the end; incomplete characters become replacement characters."""
        if self._tokenizer is None or self.met is not None:
            return ""
        text = self._decode()
        added = self._until_stop(self._new(text, text))
        if self.met is None:
            added, self._held = added + self._held, ""
        self._known = text
        return added

    def _new(self, text: str, whole: str) -> str:
        """Return the part of `whole` that was not there before."""
        known = len(self._known)
        if text.startswith(self._prompt):  # what that ended in was no half of a character, or it still is one
            known = max(known, len(self._prompt))
        return whole[known:]

    def _decode(self) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _move_on(self) -> None:
        """Keep only the tokens since the last time, as context for the next one."""
        self._window = self._window[self._new_from :]
        self._prompt = ""
        self._new_from = len(self._window)
        self._known = self._decode()

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


def _without_broken_end(text: str) -> str:
    """Return the text without an incomplete character at its end."""
    for _ in range(_LONGEST_CHARACTER - 1):
        text = text.removesuffix(_BROKEN)
    return text


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of `text` are the first of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


logger = logging.getLogger("hookline.serve.serving_engine")


class RequestRow:
    """A request that waits or runs."""

    def __init__(
        self,
        request: GenerationRequest,
        on_event: Callable[[Event], None],
        *,
        tokenizer: Any = None,
        eos: frozenset[int] = frozenset(),
        states: RequestStates | None = None,
        most_bytes: int = 0,
    ) -> None:
        self.request = request
        self.states = states
        self.most_bytes = most_bytes
        """What its hidden states can come to."""
        self.ticket: Ticket
        """What its client holds."""
        self.hooks: PreparedHooks | None = None
        """Its own hooks, if it asks for any."""
        self.hook_results: tuple[dict[str, Any], ...] = ()
        """What its hooks did, once they are closed."""
        self.answer: list[int] = []
        self.draws = Random(secrets.randbits(64) if request.seed is None else request.seed)
        self.cancelled = False
        self.finished: Finished | None = None
        self.flags: list[RequestFlag] = []
        self._ending: Literal["stop", "length"] | None = None
        self._on_event = on_event
        self._eos = frozenset() if request.ignore_eos else eos
        self._text = TextStream(tokenizer, request.prompt_ids, request.stop)

    @property
    def is_over(self) -> bool:
        """Return whether it takes no more tokens."""
        return self._ending is not None or self.finished is not None

    @property
    def last(self) -> int:
        """Return the token that goes into the next forward."""
        return self.answer[-1]

    @property
    def position(self) -> int:
        """Return the position of that token in the sequence of prompt and answer."""
        return len(self.request.prompt_ids) + len(self.answer) - 1

    def flag(self, flags: list[RequestFlag]) -> None:
        """Keep what probes found in the last forward; one that stops ends the answer before the next token."""
        if flags:
            self.flags = merge_flags([*self.flags, *flags])
            if any(each.stops for each in flags):
                self._ending = "stop"

    def take(self, choice: ChosenToken) -> None:
        """Add the chosen token, or end the answer where there is none."""
        if self._ending is not None:
            return
        if self.request.max_tokens == 0:
            self._ending = "length"
        elif choice.id == NO_TOKEN:
            logger.warning(
                "Request %r ends after %d tokens: its logits are NaN or infinite. The hook "
                "hookline.factories:nan_alarm on '*' names the modules that give them",
                self.request.id,
                len(self.answer),
            )
            self.fail("The model gave logits that are not numbers (NaN or infinite), of which none can be chosen.")
        else:
            self._add(choice)

    def _add(self, choice: ChosenToken) -> None:
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
        """Report the end that the last token brought, with hidden states; do nothing if it has failed."""
        if self._ending is None or self.finished is not None:
            return
        try:
            states = self.states.result() if self.states is not None else None
        except Exception as error:
            self.fail(f"Its hidden states could not be put together: {error}")
            return
        self._end(
            Finished(
                self._ending,
                states,
                *self._counts(),
                stop=self._text.met,
                hooks=self.hook_results,
                flags=tuple(self.flags),
            )
        )

    def fail(self, error: str) -> None:
        """End it with an error."""
        self._end(Finished("error", None, *self._counts(), error=error))

    def cancel(self, why: str | None = None) -> None:
        """End it before its answer is complete."""
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
    """Cancel a request, or several that were submitted together; `Engine.submit` returns it.

    Recipe::

        request = hookline.serve.GenerationRequest("r1", prompt_ids=(5, 6, 7), max_tokens=64)
        ticket = engine.submit(request, on_event=print)
        ticket.cancel()
    """

    def __init__(self, rows: Sequence[RequestRow], wake: Callable[[], None], *, hold: bool = False) -> None:
        self._rows = rows
        self._wake = wake
        self._is_held = hold
        self.nbytes = sum(row.most_bytes for row in rows)
        """What all their hidden states can come to."""
        self.has_room = False
        """Whether the engine has set these bytes aside; it does so for all rows at once, or they would wait for each
        other."""
        for row in rows:
            row.ticket = self

    @property
    def finished(self) -> bool:
        """Return whether the end of all has been reported."""
        return all(row.finished is not None for row in self._rows)

    @property
    def needs_room(self) -> bool:
        """Return whether the bytes of the hidden states are still in use."""
        return self._is_held or not self.finished

    def cancel(self) -> None:
        """Cancel the requests at the next round; ``Finished("cancelled")`` follows, unless they have ended meanwhile.

        From any thread, and as often as one likes.
        """
        for row in self._rows:
            row.cancelled = True
        self._wake()

    def release(self) -> None:
        """Say that the hidden states are kept no longer, if they were submitted with ``hold``; from any thread."""
        self._is_held = False
        self._wake()
