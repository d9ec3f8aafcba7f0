"""What the run is doing: training, evaluating, or something in between that is undone again.

Set by the loops and by whoever runs interventions, asked by trackers, which count training unless told otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from hookline.errors import OptionError

__all__ = ["PHASES", "Phases", "checked_phases", "in_phase", "phase"]

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


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """For as long as the block lasts, the run is doing this."""
    mine = list(checked_phases([name]))
    _change(mine, _Now.entered.append)
    try:
        yield
    finally:
        _change(mine, _leave)


def _change(mine: list[str], how: Callable[[list[str]], None]) -> None:
    with _Now.lock:
        how(mine)
        _Now.phase = _Now.entered[-1][0] if _Now.entered else "train"


def _leave(mine: list[str]) -> None:
    _Now.entered[:] = [other for other in _Now.entered if other is not mine]


def checked_phases(during: str | Iterable[str]) -> Phases:
    """The phases that ``during=`` names."""
    names = frozenset([during] if isinstance(during, str) else during)
    unknown = sorted(names - set(PHASES))
    if unknown or not names:
        got = ", ".join(map(repr, unknown)) or "nothing"
        raise OptionError(f"during= names phases of a run: {', '.join(map(repr, PHASES))}; got {got}.")
    return names
