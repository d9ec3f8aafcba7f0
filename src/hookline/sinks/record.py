"""What goes to sinks: the metrics of one moment, and which moment that was.

Made by the dispatcher, written to the log first, then handed to each sink by ``write``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.tables import Table, number_text

__all__ = ["Record", "StepSeries", "own_rank"]


def own_rank() -> int:
    """Which process of a distributed run this is, as ``torchrun`` says; 0 if there is none."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


class StepSeries(list[Any]):
    """The values of one metric over several steps; ``steps`` says which.

    Recipe: ``dict(zip(series.steps, series))``. To a sink that does not ask, it is a list.
    """

    def __init__(self, values: Iterable[Any] = (), steps: Iterable[int] = ()) -> None:
        super().__init__(values)
        self.steps: list[int] = list(steps)
        """The step of each value, counted from 0."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StepSeries, (list(self), self.steps)


@dataclass(frozen=True, slots=True)
class Record:
    """The metrics of one moment of a run.

    Recipe: ``def write(self, record): print(record.step, record.metrics)`` in a sink.
    """

    metrics: Mapping[str, Any]
    """By ``"hook/metric"``: numbers, strings, None, lists and dictionaries of these; no tensors. Of single steps, a
    `StepSeries` each."""
    epoch: int
    """What it is plotted over: the epoch in the epoch loop, the step in the step loop."""
    hook_point: Any
    """At which moment of it: a `HookPoint`, or the name of one."""
    step: int | None = None
    """The step of the whole run by then, counted from 0; None before the first."""
    strategy: str | None = None
    """Which of the runs that an experiment makes."""
    rank: int = 0
    """Which process of a distributed run."""
    time: float = 0.0
    """When it was made, in seconds since 1970."""
    number: int = field(default=-1, compare=False)
    """Its place in the log, counted from 0; -1 if there is none."""

    @property
    def point(self) -> str:
        """The name of the moment."""
        return str(getattr(self.hook_point, "name", self.hook_point))

    def _repr_html_(self) -> str:
        rows = [(name, number_text(value)) for name, value in self.metrics.items()]
        of = "" if self.strategy is None else f", {self.strategy}"
        step = "" if self.step is None else f", step {self.step}"
        title = f"epoch {self.epoch}{step}, {self.point}{of}"
        return Table(("metric", "value"), rows, numbers=(1,), title=title).html()
