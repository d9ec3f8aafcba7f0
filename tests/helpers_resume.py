"""A run with everything that a checkpoint has to hold; also a program, to be killed and started again.

python helpers_resume.py FOLDER LOOP WORKERS PAUSE
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from helpers_loops import left_by, rich_experiment, seed_everything
from helpers_training import differences
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hookline as hl
from hookline.phases import phase
from hookline.training import checkpoints as saving
from hookline.training import state
from hookline.training.checkpoints import Checkpoints

__all__ = [
    "PASS",
    "NeedsAll",
    "Sampled",
    "StopAt",
    "all_hooks",
    "left_by_both",
    "make",
    "outcome",
    "read_points",
    "read_records",
    "stop_and_go",
    "train",
    "uninterrupted",
    "with_loader",
]

BATCHES = 6
EPOCHS = 4
STEPS = 25
PASS = 5
"""Batches of a pass over the data, in the runs of `stop_and_go`."""


class Sampled(Dataset):
    """Rows with noise that is drawn as they are read, in the workers if there are some."""

    def __init__(self, rows: int) -> None:
        data = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, 6, generator=data)
        self.y = torch.randint(3, (rows,), generator=data)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6) * 0.1 + float(np.random.rand()) * 0.01 + random.random() * 0.01
        return self.x[index] + noise, self.y[index]


class Remembers(hl.TrainingHook):
    """Keeps tensors, a window and a count from step to step."""

    name = "remembers"
    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.SNAPSHOT}

    def __init__(self) -> None:
        self.average: torch.Tensor | None = None
        self.window: deque[float] = deque(maxlen=3)
        self.fired = 0

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        weight = ctx.model[0].weight.detach()
        self.average = weight.clone() if self.average is None else self.average * 0.9 + weight * 0.1
        self.window.append(float(ctx.loss))
        self.fired += 1
        return {"average": self.average.norm(), "window": sum(self.window), "fired": self.fired}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "window": self.window, "fired": self.fired}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.window, self.fired = state["average"], state["window"], state["fired"]


class Draws(hl.TrainingHook):
    """Reports numbers from all three streams, at every point."""

    name = "draws"
    hook_points = set(hl.HookPoint)

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        return {"torch": torch.rand(()).item(), "numpy": float(np.random.normal()), "python": random.random()}


class Elsewhere(hl.InterventionHook):
    """Trains on a shuffle, another one every time."""

    name = "elsewhere"
    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.SNAPSHOT}
    step_schedule = hl.StepSchedule("stride", stride=5)

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, Any]:
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        return {"weight": model_ctx.model[0].weight.norm()}


class NeedsAll(hl.InterventionHook):
    """Mean gradients, those of the step before, and the state before the epoch where there is one."""

    name = "needs_all"
    hook_points = {hl.HookPoint.PRE_STEP, hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH, hl.HookPoint.SNAPSHOT}
    intervention_points = {hl.HookPoint.POST_EPOCH}
    needs_grads = needs_prev_step_grads = needs_pre_epoch_state = True

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        grads = ctx.prev_step_grads if ctx.hook_point.is_step else ctx.accumulated_grads
        return {"norm": sum(grad.norm() for grad in (grads or {}).values())}

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, Any]:
        mean = sum(grad.norm() for grad in run_ctx.accumulated_grads.values())
        if self.needs_pre_epoch_state:
            model_ctx.restore_pre_epoch()
        return {"mean": mean, "before": model_ctx.model[0].weight.norm(), "moments": model_ctx.model[1].running_mean}


def all_hooks(experiment: hl.Experiment) -> list[Any]:
    watch = hl.watch(experiment.model, optimizer=experiment.optimizer, every=2)
    needs_gradients = NeedsAll()
    needs_gradients.needs_pre_epoch_state = False  # with it there are no checkpoints in the middle of an epoch
    return [Remembers(), Draws(), Elsewhere(), needs_gradients, watch]


class Everything(hl.Experiment):
    """Dropout, BatchNorm, a buffer that is not saved with the model, AdamW, an average, a scheduler, a generator."""

    def __init__(self, workers: int = 0, **options: Any) -> None:
        seed_everything()
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        model.register_buffer("hidden", torch.zeros(()), persistent=False)
        loader = DataLoader(
            Sampled(8 * BATCHES),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator().manual_seed(2),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        super().__init__(model, optimizer, loader, scheduler=scheduler, scheduler_per="step", **options)
        self.average = nn.Linear(6, 16).requires_grad_(False).eval()
        self.generator = torch.Generator().manual_seed(3)
        self.seen = 0
        self.history: list[float] = []
        self.pause = 0.0
        self.progress: Any = None

    def loss_fn(self, model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.randn(len(batch[0]), 6, generator=self.generator) * 0.01
        return F.cross_entropy(model(batch[0] + noise), batch[1])

    def train_step(self, batch: Any) -> Any:
        result = super().train_step(batch)
        with torch.no_grad():
            self.average.weight.lerp_(self.model[0].weight, 0.1)
            self.model.hidden.add_(result.loss)
        self.seen += 1
        if self.progress is not None and phase() == "train":  # not one of an intervention
            self.progress.value += 1
        time.sleep(self.pause)
        return {"loss": result.loss, "seen": self.seen, "hidden": self.model.hidden.clone()}

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        data = self.loader.dataset
        value = (model(data.x + 0.01 * torch.randn_like(data.x)).argmax(1) == data.y).float().mean()
        self.history.append(round(value.item(), 4))
        return {"val_acc": value, "average": self.average.weight.norm()}


def make(folder: Path | None, workers: int = 0, **options: Any) -> tuple[Everything, hl.HookManager]:
    """The run; its log is in the folder."""
    experiment = Everything(workers, **options)
    manager = hl.HookManager(hooks=all_hooks(experiment), log=None if folder is None else folder / "records.jsonl")
    return experiment, manager


def train(loop: str, experiment: Any, manager: Any, **options: Any) -> hl.training.LoopResult:
    if loop == "epoch":
        return hl.epoch_loop(experiment, epochs=EPOCHS, manager=manager, snapshot_every=2, **options)
    return hl.step_loop(experiment, steps=STEPS, manager=manager, snapshot_every=4, **options)


def outcome(experiment: Everything, manager: hl.HookManager) -> dict[str, torch.Tensor]:
    """Everything that a run leaves, to the last bit."""
    left = left_by(experiment)
    left |= {f"average {name}": value.clone() for name, value in experiment.average.state_dict().items()}
    left["hidden"] = experiment.model.hidden.clone()
    left["generator"] = experiment.generator.get_state()
    left["seen"] = torch.tensor([experiment.seen, *experiment.history])
    left["hook"] = manager.hooks["remembers"].average.clone()
    left["window"] = torch.tensor(manager.hooks["remembers"].window)
    left["steps"] = torch.tensor(manager.global_step)
    return left


class StopAt(hl.TrainingHook):
    """Presses Ctrl-C after some steps of the run."""

    hook_points = {hl.HookPoint.POST_STEP}
    pure = True

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def compute(self, ctx: hl.RunDataContext) -> None:
        if ctx.step in self.steps:
            signal.raise_signal(signal.SIGINT)


def stop_and_go(
    make_experiment: Callable[[], Any], tmp_path: Any, stops: tuple[int, ...], loop: str = "epoch", **options: Any
) -> tuple[Any, hl.training.LoopResult]:
    """Train until it is done, stopped after these steps, each time by another process as far as one can tell."""
    length = {"epochs": 3} if loop == "epoch" else {"steps": 3 * PASS, "snapshot_every": 4}
    left, times = stops, len(stops)
    for number in range(times + 1):
        experiment = make_experiment()
        if number:  # streams stand elsewhere in another process
            torch.rand(17), np.random.rand(3)
        manager = hl.HookManager(hooks=[StopAt(*left)])
        run = hl.epoch_loop if loop == "epoch" else hl.step_loop
        checkpoints = Checkpoints(tmp_path / "checkpoints", **options)
        result = run(experiment, manager=manager, checkpoints=checkpoints, resume=True, **length)
        if result.interrupted is None:
            assert number == times
            return experiment, result
        assert result.interrupted == "SIGINT"
        left = tuple(step for step in left if step > manager.global_step)
    raise AssertionError("it was stopped more often than it was to be")


def uninterrupted(make_experiment: Callable[[], Any], loop: str = "epoch") -> tuple[Any, hl.training.LoopResult]:
    experiment = make_experiment()
    if loop == "epoch":
        return experiment, hl.epoch_loop(experiment, epochs=3)
    return experiment, hl.step_loop(experiment, steps=3 * PASS, snapshot_every=4)


def left_by_both(
    make_experiment: Callable[[], Any], tmp_path: Any, stops: tuple[int, ...], loop: str = "epoch", **options: Any
) -> tuple[Any, Any]:
    """Train without a stop, and with `stops`; check that both leave the same to the last bit, and return both."""
    expected, expected_result = uninterrupted(make_experiment, loop)
    experiment, result = stop_and_go(make_experiment, tmp_path, stops, loop, **options)
    assert differences(left_by(expected), left_by(experiment)) == []
    assert result == expected_result
    return expected, experiment


def with_loader(loader: Callable[[], Any], **options: Any) -> Callable[[], hl.Experiment]:
    """An experiment over data of some kind."""

    def make_experiment() -> hl.Experiment:
        experiment = rich_experiment(evaluate=None, **options)
        experiment.loader = loader()
        return experiment

    return make_experiment


TIMING = ("time", "home")
"""What may differ in the log of a resumed run."""


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The log, line by line, without when."""
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMING} for line in lines]


def read_points(folder: Path) -> list[tuple[Any, ...]]:
    """Every value of the log with its step, in order, however series were cut into records."""
    series: dict[tuple[Any, ...], list[Any]] = {}
    for line in read_records(folder)[1:]:  # the first says where the log is
        steps = line.get("steps", {})
        for name, value in line["metrics"].items():
            values = list(zip(steps[name], value, strict=True)) if name in steps else [value]
            # In the step loop a series is plotted over the step that it was flushed at, which may be another.
            series.setdefault((line["point"], name, -1 if name in steps else line["epoch"]), []).extend(values)
    return sorted(series.items())


def main(
    folder: str | Path, loop: str, workers: int, progress: Any = None, forget: bool = False, pause: float = 0.005
) -> None:
    """Train, or go on; leave ``outcome.pt`` when done."""
    torch.set_num_threads(1)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    experiment, manager = make(folder, workers)
    experiment.pause, experiment.progress = pause, progress
    if forget:  # the negative control: streams are not put back
        saving.set_streams = state.set_streams = lambda *args: None
    checkpoints = Checkpoints(folder / "checkpoints", every_steps=2)
    result = train(loop, experiment, manager, checkpoints=checkpoints, resume=True)
    manager.close()
    print(result.interrupted or "done", flush=True)
    if result.interrupted is None:
        torch.save(outcome(experiment, manager), folder / "outcome.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), pause=float(sys.argv[4]))
