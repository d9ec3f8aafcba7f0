"""``norms``: measure the length of each step's gradient, before and after clipping, and the mean gradient."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from hookline.analyses._base import Analysis
from hookline.analyses._values import values_of
from hookline.analyses._vectors import norm, norm_of_all
from hookline.lifecycle.context import RunDataContext
from hookline.phases import phase
from hookline.sites import _torch
from hookline.sites.functions.replaced_function import BACKWARD, Mark
from hookline.when import HookPoint, growing_interval

_DENSE_STEPS: Final = 2000
"""Steps that have a point of their own; then points are twice as far apart whenever the run becomes twice as long."""


class NormsHook(Analysis):
    """Measure the length of the gradient at each step, before and after clipping, and the mean gradient since a report.

    Recipe: ``hookline.HookManager(["norms"], sinks=[...])``.

    ``grad_norm`` is read when ``backward()`` has returned, so whatever clips comes later; biases count. The norms of
    the mean gradient, at reports, are of what the optimizer was given, after clipping, and leave biases out.
    """

    name = "norms"
    description = "length of the gradient before and after clipping, norm of the mean gradient by parameter"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.POST_STEP})
    loop_points = MappingProxyType(
        {"epoch": {HookPoint.POST_EPOCH, HookPoint.POST_STEP}, "step": {HookPoint.SNAPSHOT, HookPoint.POST_STEP}}
    )
    reduce = MappingProxyType({"max_component": "max", "grad_norm*": "max"})
    needs_grads = True
    metrics = (
        ("grad_norm",
         "length of the whole gradient of a step before clipping, with biases; the largest since the last point", "‖g‖",
         "a jump: a bad batch, or an instability", "‖g‖"),
        ("grad_norm_clipped", "the same after clipping, as the optimizer was given it", "‖g‖", "", "clipped"),
        ("total_norm", "norm of the mean gradient since the last report, after clipping, without biases", "‖ḡ‖"),
        ("max_component", "largest entry of it", "max |ḡᵢ|", "far above the mean: few weights learn", "max"),
        ("mean_component", "mean size of an entry of it", "mean |ḡᵢ|", "", "mean |g|"),
        ("norm_{param}", "norm of one parameter's part of it", "‖ḡ_w‖", "0: that part does not learn"),
    )  # fmt: skip
    kept = ("largest",)
    largest: Mapping[str, Tensor] | None = None
    """Of the steps since the last point."""
    _read: _BeforeClipping | None = None
    _scaler: Any = None

    def take_scaler(self, scaler: Any) -> None:
        """Report gradients without the scale of this ``GradScaler``; the loops and hosts call it."""
        self._scaler = scaler

    def start(self, model: nn.Module) -> None:
        """Read gradients at the end of each backward pass."""
        self.finish()
        self._read = _BeforeClipping(model, self._scaler)

    def finish(self) -> None:
        """Read them no more."""
        if self._read is not None:
            BACKWARD.discard(self._read)
        self._read = None

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return the norms, on the device."""
        if ctx.hook_point is HookPoint.POST_STEP:
            return self._of_step(ctx)
        values = values_of(ctx)
        flat = values.flat_mean_gradient
        if flat is None:
            return None
        sizes = flat.abs()
        return {
            "total_norm": norm(flat),
            "max_component": sizes.max(),
            "mean_component": sizes.mean(),
            **{f"norm_{name}": norm(grad) for name, grad in values.mean_gradients.items()},
        }

    def _of_step(self, ctx: RunDataContext) -> Mapping[str, Tensor] | None:
        whole = None if self._read is None else self._read.take()
        lengths = {"grad_norm": whole, "grad_norm_clipped": values_of(ctx).step_gradient_length}
        found = {name: length for name, length in lengths.items() if length is not None}
        for name, before in (self.largest or {}).items():
            found[name] = torch.maximum(found.get(name, before), before)  # NaN if one is
        step = self.step_of(ctx)
        is_point = step % growing_interval(step, every=1, first=_DENSE_STEPS) == 0
        self.largest = None if is_point else found
        return found if is_point else None


class _BeforeClipping:
    """The length of a model's gradients when ``backward()`` returned last: of a whole step, if that was the last."""

    is_off = False

    def __init__(self, model: nn.Module, scaler: Any) -> None:
        self._model, self._scaler = model, scaler
        self._length: Tensor | None = None
        BACKWARD.add(self)

    def take(self) -> Tensor | None:
        """Return it, on its device; None if there was no backward since the last time."""
        length, self._length = self._length, None
        return length

    def is_wanted(self) -> bool:
        """Return whether the model is trained: not what interventions and evaluations do."""
        return phase() == "train"

    def note(self, loss: Any) -> None:
        """Leave the loss to others."""

    def marks(self) -> list[Mark]:
        """Compare nothing."""
        return []

    def note_gradients(self, before: list[Mark]) -> None:
        """Read the length."""
        with torch.no_grad():
            length = norm_of_all(each.grad for each in self._model.parameters() if each.grad is not None)
            scale = None if self._scaler is None else _torch.scale_of(self._scaler)
            self._length = length if length is None or scale is None else length / scale
