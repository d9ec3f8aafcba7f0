"""Saying what went wrong once, when it can be said: a warning may be an error, so nothing else is under way then.

Takes sentences from the fan-out and its helper process, warns the user in ``tell``.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from contextlib import suppress

from hookline.errors import HooklineWarning
from hookline.messages import caller_stacklevel

__all__ = ["Teller", "say"]


class Teller:
    """What is to be said, and how often what has happened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """How often each has failed."""
        self._untold: list[str] = []
        self._said: set[str] = set()

    def once(self, about: str, sentence: str) -> bool:
        """Have it said, unless something was said about that; whether it is new."""
        if about in self._said:
            return False
        self._said.add(about)
        self._untold.append(sentence)
        return True

    def tell(self) -> None:
        """Warn of what is new."""
        while self._untold:
            warnings.warn(self._untold.pop(0), HooklineWarning, stacklevel=caller_stacklevel())


def say(sentence: str) -> None:
    """A line for who sits before the screen: no warning, as nothing is wrong."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed
            print(f"hookline: {sentence}", file=sys.stderr, flush=True)
