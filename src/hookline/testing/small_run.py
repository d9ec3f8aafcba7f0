"""Run what hooks are checked in: a small model that has what goes wrong easily, trained for some twenty steps.

`check_hook` makes it anew for every run, from one seed, with other hooks beside the one under test; what the run leaves
behind is compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.guard.digest import RunDigest, run_digest
from hookline.guard.rng import RandomStates
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import InterventionHook, TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.sinks.memory_sink import MemorySink
from hookline.training.experiment import Experiment
from hookline.training.loops import epoch_loop, step_loop
from hookline.tree import map_tensors, tensors_of
from hookline.when import HookPoint

__all__ = [
    "DrawingHook", "Outcome", "ReplacingHook", "SmallModel", "SmallRun", "StirringHook", "Trial", "kept_streams",
    "left_by", "small_experiment",
]  # fmt: skip

_TOKENS: Final = 11
_CLASSES: Final = 3
_BATCH: Final = 6
_BATCHES: Final = 6
"""In one pass over the data."""
_SNAPSHOT_STEPS: Final = 5


class SmallModel(nn.Module):
    """Classify four tokens: embedding, attention, BatchNorm, dropout.

    Recipe: ``SmallModel()(torch.zeros(2, 4, dtype=torch.long)).shape`` is ``(2, 3)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.decoder = nn.Linear(16, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, 4) to (B, 3)
        """Return the logits."""
        x = self.embedding(tokens)
        x = (x + self.attention(x, x, x, need_weights=False)[0]).mean(1)
        logits: Tensor = self.decoder(self.dropout(self.act(self.norm(self.hidden(x)))))
        return logits


def small_experiment() -> Experiment:
    """Return an experiment: dropout and BatchNorm, AdamW, a scheduler, a loader that shuffles, an evaluation.

    Recipe: ``hookline.epoch_loop(hookline.testing.small_experiment(), epochs=2)``.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = SmallModel()
    data = torch.Generator().manual_seed(1)
    tokens = torch.randint(_TOKENS, (_BATCH * _BATCHES, 4), generator=data)
    dataset = TensorDataset(tokens, tokens.sum(1) % _CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        right = (model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean()
        return {"train_acc": right, "val_acc": right}

    return Experiment(
        model,
        optimizer,
        DataLoader(dataset, batch_size=_BATCH, shuffle=True, generator=torch.Generator().manual_seed(2)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.95),
        evaluate=evaluate,
        target_gradient=lambda model, step: {name: torch.ones_like(p) for name, p in model.named_parameters()},
    )


class SmallRun:
    """Run one of the loops, as far as it goes."""

    def __init__(self, loop: str, make: Callable[[], Experiment], steps: int) -> None:
        self.loop = loop
        self.make = make
        self._steps = max(steps, 2 * _BATCHES)
        self._epochs = max(4, -(-self._steps // _BATCHES))

    @property
    def length(self) -> str:
        """How long it is, in words."""
        return f"{self._epochs} epochs" if self.loop == "epoch" else f"{self._steps} steps"

    @property
    def _end(self) -> int:
        return self._epochs if self.loop == "epoch" else self._steps

    def whole(self, trial: Trial | None) -> Outcome:
        """Train from the beginning to the end."""
        experiment = self.make()
        self._go(experiment, trial, 0, self._end)
        return Outcome(left_by(experiment), trial.metrics if trial else {}, experiment.model)

    def in_two(self, first: Trial, make_second: Callable[[Trial], Trial]) -> Outcome:
        """Train some way with one manager, the rest with another that is made from it."""
        experiment = self.make()
        middle = self._end // 2
        self._go(experiment, first, 0, middle)
        second = make_second(first)
        self._go(experiment, second, middle, self._end)
        before, after = {} if second is first else first.metrics, second.metrics
        metrics = {name: before.get(name, []) + after.get(name, []) for name in {**before, **after}}
        return Outcome(left_by(experiment), metrics, experiment.model)

    def _go(self, experiment: Experiment, trial: Trial | None, first: int, end: int) -> None:
        manager = None if trial is None else trial.manager
        if self.loop == "epoch":
            epoch_loop(experiment, epochs=end, first_epoch=first, manager=manager, snapshot_every=1)
        else:
            step_loop(experiment, steps=end, first_step=first, manager=manager, snapshot_every=_SNAPSHOT_STEPS)


# -- hooks beside the one under test ---------------------------------------------------------------------------


class DrawingHook(TrainingHook):
    """Draw random numbers of all kinds."""

    hook_points = frozenset(HookPoint)

    def __init__(self, name: str) -> None:
        self.name = f"draws {name}"

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        """Return a random number."""
        return {"sum": float(torch.rand(3).sum()) + random.random() + float(np.random.rand())}


class StirringHook(InterventionHook):
    """Fill weights with other numbers, which the guard undoes."""

    name = "stirs"
    hook_points = frozenset({HookPoint.SNAPSHOT})

    def intervene(self, run_ctx: RunDataContext, model_ctx: Any) -> None:
        """Fill the weights."""
        with torch.no_grad():
            for parameter in model_ctx.model.parameters():
                parameter.fill_(9.0)


class ReplacingHook(TrainingHook):
    """Replace the state tensors of another hook by copies, as waiting on the CPU does."""

    name = "shakes"
    hook_points = frozenset(HookPoint)
    pure = True

    def __init__(self, target: TrainingHook) -> None:
        self._target = target

    def compute(self, ctx: RunDataContext) -> None:
        """Take the tensors, and give copies back."""
        tensors = self._target.get_state_tensors()
        if tensors_of(tensors):
            self._target.set_state_tensors(map_tensors(tensors, lambda _, tensor: tensor.detach().clone()))


# -- what a run leaves behind ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Hold what a run left behind."""

    left: RunDigest
    """Weights, optimizer, random streams and so on, to the last bit."""
    metrics: dict[str, list[Any]]
    """What the hook returned, by metric: when, and what."""
    model: nn.Module


class Trial:
    """Put a hook into a manager of its own, perhaps among others."""

    def __init__(
        self,
        hook: TrainingHook,
        *,
        before: Sequence[TrainingHook] = (),
        after: Sequence[TrainingHook] = (),
        reference: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.hook = hook
        self._sink = MemorySink()
        self.manager = HookManager(hooks=[*before, hook, *after], sinks=[self._sink], reference_weights=reference)

    @property
    def fired(self) -> int:
        """How often the hook was called."""
        return self.manager.hooks.fired[self.hook.name]

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """What the hook returned, by metric: when, and what."""
        found: dict[str, list[Any]] = {}
        for record in self._sink.records:
            for key, value in record.metrics.items():
                hook, _, metric = key.partition(f"{self.hook.name}/")
                if not hook and metric:
                    steps = tuple(getattr(value, "steps", ()))
                    found.setdefault(metric, []).append((str(record.hook_point), record.epoch, steps, value))
        return found

    def forgotten(self) -> Trial:
        """Forget the metrics so far, and return this."""
        self._sink.clear()
        return self


@contextmanager
def kept_streams() -> Iterator[None]:
    """Restore the random streams after the block, as if nothing had been drawn."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()


def left_by(experiment: Experiment) -> RunDigest:
    """Return the digest of weights, buffers, gradients, modes, optimizer, scheduler, switches and random streams."""
    generator = getattr(experiment.loader, "generator", None)
    others = {
        "scheduler": getattr(experiment.scheduler, "last_epoch", None),
        "random stream of the loader": None if generator is None else generator.get_state(),
    }
    return run_digest([experiment.model], [] if experiment.optimizer is None else [experiment.optimizer], others)
