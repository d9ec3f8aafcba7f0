"""What the run is doing: training, evaluating, or something in between that is undone again.

Set by the loops and by whoever runs interventions, asked by trackers, which count training unless told otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import ClassVar, Final

from hookline.errors import OptionError

__all__ = ["PHASES", "Phases", "checked_phases", "in_phase", "phase", "told_phase"]

PHASES: Final = ("train", "eval", "intervention")
Phases = frozenset[str]


class _Now:
    # Of the process, not of a context: on CUDA the backward runs in a thread that has no context of ours.
    phase = "train"
    entered: ClassVar[list[list[str]]] = []
    """What was entered and not left, oldest first; each a list of its own, so that whoever leaves finds theirs."""
    lock = threading.Lock()


def phase() -> str:
    """What the run is doing now: what was entered last, by whichever thread; "train" if nothing was."""
    return _Now.phase


def told_phase() -> str | None:
    """Return what was entered last, by whichever thread; None where nobody has said what the run is doing."""
    return _Now.phase if _Now.entered else None


class in_phase:
    """For as long as the block lasts, the run is doing this. One may be entered again, also inside itself."""

    # A class, as every firing enters one: 1 µs, and 3 as a generator.
    __slots__ = ("_mine",)

    def __init__(self, name: str) -> None:
        self._mine = [name] if name in PHASES else list(checked_phases([name]))

    def __enter__(self) -> None:
        with _Now.lock:
            _Now.entered.append(self._mine)
            _Now.phase = self._mine[0]

    def __exit__(self, *exc_info: object) -> None:
        with _Now.lock:
            entered = _Now.entered
            place = len(entered) - 1
            while entered[place] is not self._mine:  # another thread has entered since, and has not left
                place -= 1
            del entered[place]
            _Now.phase = entered[-1][0] if entered else "train"


def checked_phases(during: str | Iterable[str]) -> Phases:
    """The phases that ``during=`` names."""
    names = frozenset([during] if isinstance(during, str) else during)
    unknown = sorted(names - set(PHASES))
    if unknown or not names:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise OptionError(f"during= names phases of a run: {', '.join(map(repr, PHASES))}; got {got}.")
    return names
