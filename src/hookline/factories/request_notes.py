"""Carry what hooks find out about a request to the engine that answers it: flags, and the wish to stop.

A serving engine runs its forwards in ``noting(notes)`` and reads `RequestNotes` when the tokens of the forward have
been chosen; ``probe`` adds to the current ones. Numbers stay on their device until they are read, all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from hookline.observe.host_values import on_host

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.observe.tokens import ChosenTokens

__all__ = ["RequestFlag", "RequestNotes", "current_notes", "merge_flags", "noting", "set_notes"]


@dataclass(frozen=True, slots=True)
class RequestFlag:
    """What one probe found at one module, in one request."""

    probe: str
    module: str
    tokens: int = 1
    """How many tokens scored over the threshold."""
    position: int | None = None
    """Which was the first of them in the sequence of prompt and answer, from 0."""
    score: float = 1.0
    """The highest score."""
    stops: bool = False
    """Whether the answer is to end."""
    hook: int = 0
    """Which hook it was: two may have one name."""

    def to_plain(self, *, stopped: bool) -> dict[str, Any]:
        """Return the flag as answers have it; ``stopped`` says whether the engine did end the answer."""
        return {
            "probe": self.probe,
            "module": self.module,
            "tokens": self.tokens,
            "position": self.position,
            "score": self.score,
            "stopped": stopped,
        }


class RequestNotes:
    """Collect the notes of one forward.

    Recipe: ``with noting(notes): model(input_ids)``; then ``notes.read()["r1"]`` are the flags of request ``r1``.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[RequestFlag, ChosenTokens, Tensor, float]] = []

    def add(self, flag: RequestFlag, chosen: ChosenTokens, scores: Tensor, threshold: float) -> None:
        """Note the score of each of the ``chosen`` tokens; one over ``threshold`` is a ``flag``, with its numbers."""
        self._noted.append((flag, chosen, scores, threshold))

    def clear(self) -> None:
        """Drop the notes of a forward that failed."""
        self._noted.clear()

    def read(self) -> dict[str, list[RequestFlag]]:
        """Return the flags by request, and drop all notes; one transfer for each device."""
        if not self._noted:
            return {}
        noted, self._noted = self._noted, []
        found: dict[str, list[RequestFlag]] = {}
        all_scores = on_host(scores.flatten() for _, _, scores, _ in noted)
        for (flag, chosen, _, threshold), scores in zip(noted, all_scores, strict=True):
            for (request, position), score in zip(chosen.owners(), scores.tolist(), strict=True):
                if score > threshold:
                    found.setdefault(request, []).append(replace(flag, position=position, score=score))
        return {request: merge_flags(flags) for request, flags in found.items()}


def merge_flags(flags: list[RequestFlag]) -> list[RequestFlag]:
    """Return one flag for each hook and module, in the order in which they came."""
    found: dict[tuple[int, str, str], RequestFlag] = {}
    for flag in flags:
        place = flag.hook, flag.probe, flag.module
        known = found.setdefault(place, flag)
        if known is not flag:
            found[place] = replace(
                known,
                tokens=known.tokens + flag.tokens,
                score=max(known.score, flag.score),
                stops=known.stops or flag.stops,
            )
    return list(found.values())


_NOTES: Final[ContextVar[RequestNotes | None]] = ContextVar("hookline_request_notes", default=None)


def current_notes() -> RequestNotes | None:
    """Return the notes of the engine that runs this forward; None without one."""
    return _NOTES.get()


def set_notes(notes: RequestNotes | None) -> None:
    """Let hooks add to ``notes`` from now on, for an engine that tells of begin and end of a step separately."""
    _NOTES.set(notes)


@contextmanager
def noting(notes: RequestNotes) -> Iterator[None]:
    """Let hooks add to ``notes`` for as long as the block lasts; what a failed forward left in them is dropped."""
    notes.clear()
    token = _NOTES.set(notes)
    try:
        yield
    finally:
        _NOTES.reset(token)
