"""Words that errors and warnings of every folder use, and where a warning points to; without torch."""

from __future__ import annotations

import inspect

__all__ = ["a_or_an", "outside", "shown"]


def a_or_an(value: object) -> str:
    """The class of a value, in a sentence: "an int", "a Linear"; a class itself as "the class Linear"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def shown(value: object, most: int = 200) -> str:
    """A value as an error quotes it: as Python writes it, cut where it gets long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"{a_or_an(value)}, nested deeply"
    return text if len(text) <= most else f"{text[:most]}…"


def outside() -> int:
    """The stack level of the first frame that is not ours, seen from our caller."""
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("hookline."):
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)
