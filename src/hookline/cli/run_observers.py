"""Watch a run for its own flags: steps for the progress bar, ``--record-trajectory``, ``--validate-checkpoints``.

`run_session` puts these around training; they call `sinks`, `training` and safetensors. Imports torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from hookline import checkpoint_file
from hookline.lifecycle.hook import TrainingHook
from hookline.phases import phase
from hookline.records.sink import MetricSink
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer
from hookline.training.checkpoints import Checkpoints
from hookline.training.experiment import Experiment
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.context import RunDataContext

__all__ = ["BarMetricsSink", "TrajectoryHook", "ValidatedCheckpoints", "differing", "steps_counted", "steps_in_all"]

_BAR_METRICS: Final = {
    "training_metrics/loss": "loss",
    "training_metrics/val_acc": "val_acc",
    "eval/val_acc": "val_acc",
    "eval/val_loss": "val_loss",
}
"""The metrics that are shown beside the bar, with their names there."""


class BarMetricsSink(MetricSink):
    """Keep the newest value of the few metrics that are shown beside the bar."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self.names: set[str] = set()
        """Every metric that has come."""

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Keep the metrics that are shown; of values by step the last."""
        self.names.update(metrics)
        for name, shown in _BAR_METRICS.items():
            value = metrics.get(name)
            value = value[-1] if isinstance(value, list) and value else value
            if isinstance(value, int | float):
                self.newest[shown] = float(value)


def steps_in_all(experiment: Any, loop: str, length: int) -> int | None:
    """Return how many steps the run will have; None if that is not known before its end."""
    if loop == "step":
        return length
    try:
        batches = len(experiment.get_loader(0) if hasattr(experiment, "get_loader") else experiment.loader)
    except Exception:  # a loader without a length, or one that is made in its epoch
        return None
    return length * math.ceil(batches / max(1, getattr(experiment, "accumulate", 1) or 1))


@contextmanager
def steps_counted(experiment: Any, bar: Any, metrics: Mapping[str, float]) -> Iterator[None]:
    """Advance the bar with every step of the experiment's optimizer (about 1 µs), or with its ``train_step``.

    Steps of interventions are not counted. At the end the bar shows the newest metrics.
    """

    def count(*_: Any) -> None:
        if phase() == "train":
            bar.advance(1, **metrics)

    optimizer = unwrap_optimizer(getattr(experiment, "optimizer", None))
    with _after_each(experiment, count) if not isinstance(optimizer, torch.optim.Optimizer) else nullcontext():
        handle = optimizer.register_step_post_hook(count) if isinstance(optimizer, torch.optim.Optimizer) else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
            bar.note(**metrics)


@contextmanager
def _after_each(experiment: Any, count: Callable[[], None]) -> Iterator[None]:
    """Call `count` after each ``train_step`` that the experiment has of its own, while the block lasts."""
    train_step = getattr(experiment, "train_step", None)
    inherited = getattr(train_step, "__func__", None) is Experiment.train_step
    # That of `Experiment` is not replaced: by it the loops know that there is no step of its own.
    if train_step is None or inherited or not hasattr(experiment, "__dict__"):
        yield
        return
    own = vars(experiment).get("train_step")

    @functools.wraps(train_step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        found = train_step(*args, **kwargs)
        count()
        return found

    experiment.train_step = counted
    try:
        yield
    finally:
        if own is None:
            del experiment.train_step
        else:
            experiment.train_step = own


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
