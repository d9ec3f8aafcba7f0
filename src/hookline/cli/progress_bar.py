"""The progress bar of a run: moved on by the steps of training, with the newest loss beside it.

Takes the experiment and a bar from `session`; draws nothing itself. Steps of interventions are not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from hookline.sinks.sink import MetricSink

__all__ = ["FigureSink", "steps_counted", "steps_in_all"]

_FIGURES: Final = {
    "training_metrics/loss": "loss",
    "training_metrics/val_acc": "val_acc",
    "eval/val_acc": "val_acc",
    "eval/val_loss": "val_loss",
}
"""What is shown beside the bar."""


class FigureSink(MetricSink):
    """Keeps the newest value of the few metrics that stand beside the bar."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.names: set[str] = set()
        """Every metric that has come."""

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Keep those that are shown; of values by step the last."""
        self.names.update(metrics)
        for name, shown in _FIGURES.items():
            value = metrics.get(name)
            value = value[-1] if isinstance(value, list) and value else value
            if isinstance(value, int | float):
                self.figures[shown] = float(value)


def steps_in_all(experiment: Any, loop: str, length: int) -> int | None:
    """How many steps the run will have; None if only its end will tell."""
    if loop == "step":
        return length
    try:
        batches = len(experiment.get_loader(0) if hasattr(experiment, "get_loader") else experiment.loader)
    except Exception:  # a loader without a length, or one that is made in its epoch
        return None
    return length * math.ceil(batches / max(1, getattr(experiment, "accumulate", 1) or 1))


@contextmanager
def steps_counted(experiment: Any, bar: Any, figures: Mapping[str, float]) -> Iterator[None]:
    """Have the bar move on with every step of the experiment's optimizer, about a microsecond each; without one of
    torch, with its ``train_step``. At the end it has the newest figures."""
    from torch.optim import Optimizer

    from hookline.lifecycle.run_phase import phase
    from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer

    def count(*_: Any) -> None:
        if phase() == "train":
            bar.advance(1, **figures)

    optimizer = unwrap_optimizer(getattr(experiment, "optimizer", None))
    with _after_each(experiment, count) if not isinstance(optimizer, Optimizer) else nullcontext():
        handle = optimizer.register_step_post_hook(count) if isinstance(optimizer, Optimizer) else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
            bar.note(**figures)


@contextmanager
def _after_each(experiment: Any, count: Callable[[], None]) -> Iterator[None]:
    """Call it after each ``train_step`` of the experiment's own, while the block lasts."""
    from hookline.training.loops.experiment import Experiment

    train_step = getattr(experiment, "train_step", None)
    inherited = getattr(train_step, "__func__", None) is Experiment.train_step
    # What `Experiment` brings is left alone: the loops tell by it that there is no step of its own.
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
