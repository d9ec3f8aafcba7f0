"""Tell whether a run has come back to the state in which a step began, by one number for each tensor of the model.

`KeptSteps` takes `StateMarks` at the beginning of steps that have no snapshot of their own, and compares them after the
steps before were run again. Nothing waits for a device until then.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from hookline.sites import _torch

__all__ = ["StateMarks"]

_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUNDING: Final = 1e-3
"""Up to this relative difference of norms a step that is not deterministic has repeated."""


class StateMarks:
    """The norms of parameters and buffers at one moment, in 64 bits: one bit of a float32 in 1e6 numbers shows."""

    __slots__ = ("_norms",)

    def __init__(self, model: nn.Module) -> None:
        self._norms: list[Tensor] = []
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                local = _torch.local_tensor(tensor.detach())
                if local is not None and local.dtype in _TYPES and local.layout is torch.strided:
                    self._norms.append(torch.linalg.vector_norm(local, dtype=torch.float64))

    def difference(self, model: nn.Module) -> str:
        """Return how the model differs now: ``""``, ``"rounding"`` or ``"other"``; waits for the device."""
        before, now = ([float(norm) for norm in marks._norms] for marks in (self, StateMarks(model)))
        if len(before) != len(now):
            return "other"
        pairs = [pair for pair in zip(before, now, strict=True) if not _is_same(*pair)]
        if not pairs:
            return ""
        return "rounding" if all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in pairs) else "other"


def _is_same(before: float, now: float) -> bool:
    return before == now or (math.isnan(before) and math.isnan(now))
