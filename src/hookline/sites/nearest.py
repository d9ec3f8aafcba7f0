"""The names that a mistyped one may have been meant for.

Takes what the user wrote and the names there are, hands error messages the few that are worth showing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from typing import Final

__all__ = ["nearest"]

_GLOB: Final = re.compile(r"[*?#\[\]!^$\\()+|]")
_ALIKE: Final = 0.6
"""How much of a name part has to be like what was written; that of difflib. ``mpl`` is 0.67 like ``mlp``."""


def nearest(text: str, names: Iterable[str], n: int = 4) -> list[str]:
    """The names most like the text; where none is, the first few, so that one sees what names look like here.

    Of a pattern, what stands between its wildcards is held against the parts of each name.
    """
    known = list(names)
    whole = get_close_matches(text, known, n=n, cutoff=0.4)
    if _GLOB.search(text) or not whole:
        return _alike_in_parts(text, known)[:n] or whole or known[:4]
    return whole


def _alike_in_parts(text: str, names: list[str]) -> list[str]:
    """The names that have a part like every part of the text, the best and then the shortest first."""
    wanted = [part for part in _GLOB.sub(" ", text.replace("\\.", ".")).replace(".", " ").split() if not part.isdigit()]
    if not wanted:
        return []
    scores = {name: min(_best(part, name) for part in wanted) for name in names}
    alike = [name for name in names if scores[name] >= _ALIKE]
    return sorted(alike, key=lambda name: (-scores[name], name.count(".")))


def _best(part: str, name: str) -> float:
    return max(SequenceMatcher(None, part, other).ratio() for other in name.split("."))
