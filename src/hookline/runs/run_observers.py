"""Watch a run for its own flags: ``--record-trajectory`` and ``--validate-checkpoints``. `session` calls it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hookline import checkpoint_file
from hookline.lifecycle.hook import TrainingHook
from hookline.training.checkpoints import Checkpoints
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.context import RunDataContext

__all__ = ["TrajectoryHook", "ValidatedCheckpoints", "differing"]


class TrajectoryHook(TrainingHook):
    """Save the model's parameters at every snapshot: ``trajectory/step_00000120.safetensors``."""

    name = "trajectory"
    description = "saves the parameters at every snapshot"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    pure = True

    def __init__(self) -> None:
        self._folder: Path | None = None

    def set_run_context(self, **context: Any) -> None:
        """Take the folder of the run, for the files."""
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


class ValidatedCheckpoints(Checkpoints):
    """Read each checkpoint back when it is written, and print OK or what differs, bit for bit.

    Recipe: ``ValidatedCheckpoints("run/checkpoints", every=1, say=print)``.
    """

    def __init__(self, folder: str | Path, *, say: Callable[[str], None], **options: Any) -> None:
        super().__init__(folder, **options)
        self._say = say

    def write(self, tree: Mapping[str, Any], steps: int) -> Path:
        """Write a checkpoint, read it, compare."""
        path = super().write(tree, steps)
        wrong = list(differing(tree, checkpoint_file.read(path), "$"))
        self._say(f"{path.name}: {'OK' if not wrong else 'MISMATCH at ' + ', '.join(wrong[:5])}")
        return path


def differing(saved: Any, found: Any, path: str) -> Iterator[str]:
    """Yield the places where two trees differ."""
    if isinstance(saved, Mapping):
        if not isinstance(found, Mapping) or list(saved) != list(found):
            yield path
        else:
            for key in saved:
                yield from differing(saved[key], found[key], f"{path}.{key}")
    elif isinstance(saved, list | tuple):
        if type(found) not in (list, tuple) or len(saved) != len(found):
            yield path
        else:
            for place, (one, other) in enumerate(zip(saved, found, strict=True)):
                yield from differing(one, other, f"{path}[{place}]")
    elif not _same(saved, found):
        yield path


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one).__module__ == type(other).__module__ and _bits(one) == _bits(other)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _bits(value: Any) -> tuple[Any, ...]:
    """Return everything of a tensor or array: its type, its shape, its bytes."""
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    return str(value.dtype), tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)
