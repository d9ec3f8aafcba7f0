"""Hooks that a hook under test has to get along with.

Put into the manager beside it by `check_hook`.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch

from hookline.lifecycle.points import HookPoint
from hookline.lifecycle.run_context import RunDataContext
from hookline.training.hook_state import map_tensors
from hookline.training.training_hook import InterventionHook, TrainingHook

__all__ = ["Drawing", "Shaking", "Stirring"]


class Drawing(TrainingHook):
    """Draws random numbers of all kinds."""

    hook_points = frozenset(HookPoint)

    def __init__(self, name: str) -> None:
        self.name = f"draws {name}"

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        """A random number."""
        return {"sum": float(torch.rand(3).sum()) + random.random() + float(np.random.rand())}


class Stirring(InterventionHook):
    """Fills weights with other numbers; what is put back afterwards."""

    name = "stirs"
    hook_points = frozenset({HookPoint.SNAPSHOT})

    def intervene(self, run_ctx: RunDataContext, model_ctx: Any) -> None:
        """Fill them."""
        with torch.no_grad():
            for parameter in model_ctx.model.parameters():
                parameter.fill_(9.0)


class Shaking(TrainingHook):
    """Does to another hook what waiting on the CPU does: its tensors are taken, and come back as other objects."""

    name = "shakes"
    hook_points = frozenset(HookPoint)
    pure = True
    target: TrainingHook

    def compute(self, ctx: RunDataContext) -> None:
        """Take them, and give them back."""
        there: list[torch.Tensor] = []
        moved = map_tensors(self.target.get_state_tensors(), partial(_copied, there))
        if there:
            self.target.set_state_tensors(moved)


def _copied(there: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    there.append(tensor)
    return tensor.detach().clone()
