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
    tokens: int
    """How many tokens scored over the threshold."""
    position: int | None
    """Which was the first of them in the sequence of prompt and answer, from 0."""
    score: float
    """The highest score."""
    stops: bool
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


@dataclass(frozen=True, slots=True)
class _Scores:
    probe: str
    module: str
    chosen: ChosenTokens
    values: Tensor
    threshold: float
    stops: bool
    hook: int


class RequestNotes:
    """Collect the notes of one forward.

    Recipe: ``with noting(notes): model(input_ids)``; then ``notes.read()["r1"]`` are the flags of request ``r1``.
    """

    def __init__(self) -> None:
        self._scores: list[_Scores] = []

    def add(
        self,
        probe: str,
        module: str,
        chosen: ChosenTokens,
        values: Tensor,
        threshold: float,
        *,
        stops: bool,
        hook: int = 0,
    ) -> None:
        """Note the scores of tokens, one for each of the ``chosen`` tokens; ``hook`` tells probes of one name apart."""
        self._scores.append(_Scores(probe, module, chosen, values, threshold, stops, hook))

    def clear(self) -> None:
        """Drop the notes of a forward that failed."""
        self._scores.clear()

    def read(self) -> dict[str, list[RequestFlag]]:
        """Return the flags by request, and drop all notes; one transfer for each device."""
        if not self._scores:
            return {}
        noted, self._scores = self._scores, []
        found: dict[str, list[RequestFlag]] = {}
        for scores, values in zip(noted, on_host(each.values.flatten() for each in noted), strict=True):
            for request, flag in _flags(scores, values.tolist()):
                found.setdefault(request, []).append(flag)
        return {request: merge_flags(flags) for request, flags in found.items()}


def _flags(scores: _Scores, values: list[float]) -> Iterator[tuple[str, RequestFlag]]:
    for (request, position), value in zip(scores.chosen.owners(), values, strict=True):
        if value > scores.threshold:
            yield request, RequestFlag(scores.probe, scores.module, 1, position, value, scores.stops, scores.hook)


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
