"""What the run is doing: training, evaluating, or something in between that is undone again.

Set by the loops and by whoever runs interventions, asked by trackers, which count training unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from hookline.errors import OptionError

__all__ = ["PHASES", "Phases", "checked_phases", "in_phase", "phase"]

PHASES: Final = ("train", "eval", "intervention")
Phases = frozenset[str]


class _Now:
    # Of the process, not of a context: on CUDA the backward runs in a thread that has no context of ours.
    phase = "train"


def phase() -> str:
    """What the run is doing now: "train" unless somebody said otherwise."""
    return _Now.phase


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """For as long as the block lasts, the run is doing this."""
    (checked,) = checked_phases([name])
    before, _Now.phase = _Now.phase, checked
    try:
        yield
    finally:
        _Now.phase = before


def checked_phases(during: str | Iterable[str]) -> Phases:
    """The phases that ``during=`` names."""
    names = frozenset([during] if isinstance(during, str) else during)
    unknown = sorted(names - set(PHASES))
    if unknown or not names:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise OptionError(f"during= names phases of a run: {', '.join(map(repr, PHASES))}; got {got}.")
    return names
