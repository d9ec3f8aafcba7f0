"""Hold the outcome of a loop.

`epoch_loop` and `step_loop` return it; `Run` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.tables import Table, number_text

__all__ = ["LoopResult"]


@dataclass(frozen=True)
class LoopResult:
    """The outcome of a loop.

    Recipe: ``result = hookline.epoch_loop(experiment, epochs=10)``; then ``result.loss``, ``result.metrics``.
    """

    epochs: int
    """How many epochs (in the step loop: passes over the data) were begun, those before a resumption included."""
    steps: int
    """How many steps were made, likewise."""
    stopped_early: bool
    """Whether the experiment had enough before the end."""
    loss: float | None
    """The training loss: the mean of the last epoch, or that of the last step."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The newest evaluation."""
    interrupted: str | None = None
    """The signal, ``"SIGINT"`` or ``"SIGTERM"``, that asked a run with checkpoints to stop; it was saved then."""

    def _repr_html_(self) -> str:
        ended = f"interrupted by {self.interrupted}" if self.interrupted else "early" if self.stopped_early else "done"
        rows = [("epochs", f"{self.epochs:,}"), ("steps", f"{self.steps:,}"), ("ended", ended)]
        rows += [] if self.loss is None else [("loss", number_text(self.loss))]
        rows += [(name, number_text(value)) for name, value in self.metrics.items()]
        return Table(("LoopResult", ""), rows, numbers=(1,)).html()
