"""The names that a mistyped one may have been meant for.

Takes what the user wrote and the names there are, hands error messages the few that are worth showing.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest"]


def nearest(text: str, names: Iterable[str], n: int = 4) -> list[str]:
    """The names most like the text; where none is, the first few, so that one sees what names look like here."""
    known = list(names)
    return get_close_matches(text, known, n=n, cutoff=0.4) or known[:4]
