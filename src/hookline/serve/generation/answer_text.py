"""The text of an answer as it grows: no character is cut in two, and nothing of a stop text slips out.

Takes the tokens of one request from ``row``, one at a time, and hands back what each adds. A tokenizer is whatever
has ``decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["TextStream"]

_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
_CONTEXT: Final = 6
"""So many tokens of the prompt are decoded along, because a token's text depends on what it follows: at the very
beginning, many tokenizers drop its leading space."""
_LONGEST_CHARACTER: Final = 4  # bytes in UTF-8, so at most three tokens of it are there while it is incomplete
_LONGEST_WINDOW: Final = 64
"""After so many tokens that end in no whole character, the bytes are no text, and are let out as they are."""


class TextStream:
    """Turns tokens into text, one after the other.

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
        """What one more token adds to the answer."""
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
        """What was held back, now that nothing follows; broken characters are shown as such."""
        if self._tokenizer is None or self.met is not None:
            return ""
        text = self._decode()
        added = self._until_stop(self._new(text, text))
        if self.met is None:
            added, self._held = added + self._held, ""
        self._known = text
        return added

    def _new(self, text: str, whole: str) -> str:
        """What of the whole characters was not there before."""
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
        """All is out: only the tokens since the last time are still of interest, as what the next one follows."""
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
    """The text without what may yet become a character."""
    for _ in range(_LONGEST_CHARACTER - 1):
        text = text.removesuffix(_BROKEN)
    return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of the text are the first of the stop text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
