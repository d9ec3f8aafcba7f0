"""``phases``: measure how far learning has come, and how quickly it changes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from hookline.analyses._analysis import Analysis
from hookline.analyses._firing_values import values_of
from hookline.analyses._model_parts import embedding_of
from hookline.analyses._vectors import flat_vector_or_none, norm, ratio
from hookline.errors import OptionError
from hookline.lifecycle.context import RunDataContext
from hookline.when import HookPoint

_BOUNDS: Final = (5.0, 20.0, 80.0, 99.0)
"""Validation accuracies, in percent, at which the next phase of learning begins."""
_SCALES: Final = ("auto", "fraction", "percent")


class PhasesHook(Analysis):
    """Measure the change of gradient and embedding from snapshot to snapshot, and a code for the accuracy reached.

    Recipe: ``hookline.HookManager(["phases"], sinks=[...])``.

    Args:
        embedding: The name of the table; if left out, the first ``nn.Embedding``. Without one, its metrics are absent.
        accuracy: Whether ``val_acc`` is a ``"fraction"`` of 1 or in ``"percent"``. ``"auto"``: a fraction, until there
            is one over 1.
    """

    name = "phases"
    description = "speed of change of gradient and embedding, and the phase of learning"
    reduce = MappingProxyType({"phase_code": "none"})  # a code, of which there is no mean
    hook_points = frozenset({HookPoint.SNAPSHOT})
    loop_points = {"epoch": {HookPoint.SNAPSHOT}, "step": {HookPoint.SNAPSHOT}}  # noqa: RUF012
    needs_grads = True
    kept = ("norm", "velocity", "table", "in_percent")
    in_percent = False
    norm: Tensor | None = None
    velocity: Tensor | None = None
    table: Tensor | None = None
    # All are 0 at the first snapshot, when there is nothing to compare with.
    metrics = (
        ("grad_velocity", "change of the gradient's length", "‖g‖ − ‖g_prev‖", "above 0: it grows"),
        ("grad_acceleration", "change of that change", "v − v_prev", "above 0: it grows faster"),
        ("embedding_change", "how far the embedding has moved", "‖E − E_prev‖"),
        ("embedding_change_normalized", "the same as a share", "‖E − E_prev‖ / ‖E_prev‖; 0 if that is 0"),
        (
            "phase_code",
            "0 not learning yet, 1 early, 2 rapid, 3 refining, 4 done; absent without a val_acc",
            "val_acc below 5, 20, 80, 99 %, or not",
        ),
    )

    def __init__(self, embedding: str | None = None, accuracy: Literal["auto", "fraction", "percent"] = "auto") -> None:
        if accuracy not in _SCALES:
            raise OptionError(f"accuracy= of hook 'phases' is one of {', '.join(_SCALES)}; got {accuracy!r}.")
        self.embedding = embedding
        self.accuracy = accuracy

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare with the last snapshot."""
        flat = values_of(ctx).flat_mean_gradient
        return {
            **({} if flat is None else self._of_gradient(norm(flat))),
            **self._of_embedding(ctx),
            **self._of_accuracy(ctx.val_acc),
        }

    def _of_gradient(self, norm: Tensor) -> dict[str, Any]:
        velocity = torch.zeros_like(norm) if self.norm is None else norm - self.norm.to(norm.device)
        change = torch.zeros_like(norm) if self.velocity is None else velocity - self.velocity.to(norm.device)
        self.norm, self.velocity = norm, velocity
        return {"grad_velocity": velocity, "grad_acceleration": change}

    def _of_embedding(self, ctx: RunDataContext) -> dict[str, Any]:
        found = embedding_of(values_of(ctx).modules, self.embedding)
        table = None if found is None else flat_vector_or_none([found[1]])
        before, self.table = self.table, table
        if table is None:
            return {}
        if before is None or before.shape != table.shape:
            return {"embedding_change": 0.0, "embedding_change_normalized": 0.0}
        before = before.to(table.device)
        change = norm(table - before)
        share = ratio(change, norm(before))
        return {"embedding_change": change, "embedding_change_normalized": share}

    def _of_accuracy(self, accuracy: float | None) -> dict[str, Any]:
        if accuracy is None or accuracy != accuracy:
            return {}
        self.in_percent = self.accuracy == "percent" or (self.accuracy == "auto" and (self.in_percent or accuracy > 1))
        percent = accuracy if self.in_percent else 100 * accuracy
        return {"phase_code": sum(percent >= bound for bound in _BOUNDS)}
