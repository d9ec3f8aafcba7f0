"""``phases``: how far learning has come, and how quickly it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from hookline.analyses._analysis import Analysis
from hookline.analyses._parts import embedding_of
from hookline.analyses._shared import flatten, ratio, work_of
from hookline.errors import OptionError
from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["PhasesHook"]

_BOUNDS: Final = (5.0, 20.0, 80.0, 99.0)
"""Validation accuracies, in percent, at which the next phase begins."""
_SCALES: Final = ("auto", "fraction", "percent")


class PhasesHook(Analysis):
    """Change of gradient and embedding from snapshot to snapshot, and a code for the accuracy reached.

    Recipe: ``hookline.HookManager(["phases"], sinks=[...])``.

    Args:
        embedding: The name of the table; if left out, the first ``nn.Embedding``. Without one, its metrics are absent.
        accuracy: Whether ``val_acc`` is a ``"fraction"`` of 1 or in ``"percent"``. ``"auto"``: a fraction, until there
            is one over 1.
    """

    name = "phases"
    description = "speed of change of gradient and embedding, and the phase of learning"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    loop_points = {"epoch": {HookPoint.SNAPSHOT}, "step": {HookPoint.SNAPSHOT}}  # noqa: RUF012
    needs_grads = True
    kept = ("norm", "velocity", "table", "in_percent")
    in_percent: bool
    norm: Tensor | None
    velocity: Tensor | None
    table: Tensor | None

    def __init__(self, embedding: str | None = None, accuracy: Literal["auto", "fraction", "percent"] = "auto") -> None:
        if accuracy not in _SCALES:
            raise OptionError(f"accuracy= of hook 'phases' is one of {', '.join(_SCALES)}; got {accuracy!r}.")
        self.embedding = embedding
        self.accuracy = accuracy
        self.reset()

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; 0 at the first snapshot, when there is nothing to compare with."""
        return [
            MetricInfo("grad_velocity", "change of the gradient's length", "‖g‖ − ‖g_prev‖", "above 0: it grows"),
            MetricInfo("grad_acceleration", "change of that change", "v − v_prev", "above 0: it grows faster"),
            MetricInfo("embedding_change", "how far the embedding has moved", "‖E − E_prev‖"),
            MetricInfo("embedding_change_normalized", "the same as a share", "‖E − E_prev‖ / ‖E_prev‖; 0 if that is 0"),
            MetricInfo(
                "phase_code",
                "0 not learning yet, 1 early, 2 rapid, 3 refining, 4 done; absent without a val_acc",
                "val_acc below 5, 20, 80, 99 %, or not",
            ),
        ]

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Since the last snapshot."""
        flat = work_of(ctx).flat_mean_gradient
        return {
            **({} if flat is None else self._of_gradient(torch.linalg.vector_norm(flat))),
            **self._of_embedding(ctx),
            **self._of_accuracy(ctx.val_acc),
        }

    def _of_gradient(self, norm: Tensor) -> dict[str, Any]:
        velocity = torch.zeros_like(norm) if self.norm is None else norm - self.norm.to(norm.device)
        change = torch.zeros_like(norm) if self.velocity is None else velocity - self.velocity.to(norm.device)
        self.norm, self.velocity = norm, velocity
        return {"grad_velocity": velocity, "grad_acceleration": change}

    def _of_embedding(self, ctx: RunDataContext) -> dict[str, Any]:
        found = embedding_of(work_of(ctx).modules, self.embedding)
        table = None if found is None else flatten([found[1]])
        before, self.table = self.table, table
        if table is None:
            return {}
        if before is None or before.shape != table.shape:
            return {"embedding_change": 0.0, "embedding_change_normalized": 0.0}
        before = before.to(table.device)
        change = torch.linalg.vector_norm(table - before)
        share = ratio(change, torch.linalg.vector_norm(before))
        return {"embedding_change": change, "embedding_change_normalized": share}

    def _of_accuracy(self, accuracy: float | None) -> dict[str, Any]:
        if accuracy is None or accuracy != accuracy:
            return {}
        self.in_percent = self.accuracy == "percent" or (self.accuracy == "auto" and (self.in_percent or accuracy > 1))
        percent = accuracy if self.in_percent else 100 * accuracy
        return {"phase_code": sum(percent >= bound for bound in _BOUNDS)}

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.norm = None
        self.velocity = None
        self.table = None
        self.in_percent = False
