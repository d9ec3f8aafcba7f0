"""``--record-trajectory``: the parameters at every snapshot, each in a file of its own.

A hook among the others of the run; takes the model at SNAPSHOT, leaves ``trajectory/step_00000120.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.lifecycle.points import HookPoint
from hookline.training.training_hook import TrainingHook

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["TrajectoryHook"]


class TrajectoryHook(TrainingHook):
    """Saves the model's parameters at every snapshot."""

    name = "trajectory"
    description = "saves the parameters at every snapshot"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    pure = True

    def __init__(self) -> None:
        self._folder: Path | None = None

    def set_run_context(self, **context: Any) -> None:
        """Files go into the folder of the run."""
        if context.get("run_dir") is not None:
            self._folder = Path(context["run_dir"]) / "trajectory"

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Write a file."""
        if ctx.model is None or self._folder is None:
            return None
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous().clone() for name, value in ctx.model.named_parameters()}
        save_file(weights, self._folder / f"step_{ctx.step or 0:08d}.safetensors")
        return None
