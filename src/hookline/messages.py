"""Build the sentences of errors and warnings: values and sizes in short, near names, where a warning points to.

Most folders call these: errors and reports `type_name`, `counted`, `listed`, `short_repr` and the functions for near
names; warnings `caller_stacklevel`. This file imports nothing but the standard library: files that start without torch
import it, and files of every layer.

Many tests and docs pages have sentences that are made here, so a change of the form shows there: run the tests, of
which tests/test_pages.py compares what the pages show.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

_GLOB: Final = re.compile(r"[*?#\[\]!^$\\()+|]")
_PASSED: Final = frozenset({"hookline", "contextlib", "functools", "weakref"})
"""Packages whose frames a warning passes over, on its way to the line of the user."""


def type_name(value: object) -> str:
    """Return the class of ``value`` with its article: "an int", "a Linear"; for a class, "the class Linear"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "module"), counted(1200, "call")
    ('1 module', '1,200 calls')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_text(size: float) -> str:
    """Return a number of bytes in words: ``1.5 MB``."""
    units = ["GB", "MB", "kB", "B"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{size:.0f} B" if units[-1] == "B" else f"{size:,.1f} {units[-1]}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first names of a list, and how many there are more.

    >>> listed(["a", "b", "c"], 2)
    "'a', 'b' and 1 more"
    """
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def short_repr(value: object, most: int = 200) -> str:
    """Return ``repr(value)``, cut after ``most`` characters."""
    try:
        text = repr(value)
    except RecursionError:
        return f"{type_name(value)}, nested deeply"
    return text if len(text) <= most else f"{text[:most]}…"


def caller_stacklevel() -> int:
    """Return the ``stacklevel`` with which our caller has `warnings.warn` point at the first frame outside hookline.

    Frames of `_PASSED` in between (of ``with``, of finalizers, of wrapped functions) are passed over too.
    """
    level = 1
    frame: FrameType | None = sys._getframe()  # `inspect` would add 10 ms to every import of this
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED:
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)


def close_names(text: str, names: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return at most ``n`` names that are like ``text``, the most similar first."""
    return get_close_matches(text, list(names), n=n, cutoff=cutoff)


def suggest(text: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``"; did you mean 'name'?"`` for the name most like ``text``, or nothing where none is like it."""
    near = close_names(str(text), names, 1, cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def did_you_mean(text: object, names: Iterable[str]) -> str:
    """Return the sentence ``" Did you mean 'name'?"`` for the name most like ``text``, or nothing."""
    return suggest(text, names).replace("; d", " D")  # "; did you mean" becomes " Did you mean"


def unknown_name_text(asked: str, names: Sequence[str], what: str = "There are") -> str:
    """Return the end of an error about the unknown name ``asked``: the most similar of ``names``, then all of them."""
    return f"{did_you_mean(asked, names)} {what}: {', '.join(names) or 'none'}."


def nearest_names(text: str, names: Iterable[str], n: int = 4) -> list[str]:
    """Return the ``n`` names most like ``text``; the first few names where none is like it, as examples.

    For a pattern, what is between its wildcards is compared with the parts of each name (between the dots).
    """
    known = list(names)
    whole = close_names(text, known, n, 0.4)
    alike = _alike_in_parts(text, known)[:n] if _GLOB.search(text) or not whole else []
    return alike or whole or known[:4]


def _alike_in_parts(text: str, names: list[str]) -> list[str]:
    """Return the names that have a part like each part of ``text``: the most similar first, of these the shortest."""
    wanted = [part for part in _GLOB.sub(" ", text.replace("\\.", ".")).replace(".", " ").split() if not part.isdigit()]

    def alike(name: str) -> float:
        best = [max(SequenceMatcher(None, part, own).ratio() for own in name.split(".")) for part in wanted]
        return min(best, default=0.0)

    return sorted((name for name in names if alike(name) >= 0.6), key=lambda name: (-alike(name), name.count(".")))
