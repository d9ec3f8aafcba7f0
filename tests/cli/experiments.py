"""A small experiment, and things that go wrong, for the tests of the command line: named by ``experiments.py:NAME``."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline import HookPoint


@dataclass
class Config:
    """What the tiny experiment takes."""

    epochs: int = 2
    """How often to go through the data."""
    snapshot_every: int = 1
    batch_size: int = 8
    """How many rows make a step."""
    lr: float = 1e-2
    sizes: tuple[int, ...] = (6,)
    kind: Literal["plain", "wide"] = "plain"
    normalize: bool = False
    """Whether there is a BatchNorm."""
    pause: float = 0.0
    """Seconds that a step takes longer."""
    seed: int = 0
    """Shared with the flag of that name."""


class Tiny(hl.Experiment):
    """Dropout and AdamW on random rows."""

    name = "tiny"
    config_class = Config
    strategies = ("forward", "backward")
    hook_sets = {
        "none": [],
        "minimal": ["training_metrics"],
        "observers": ["norms", "training_metrics"],
        "sloppy": ["norms", "counterfactual_validator"],
    }
    live_metrics = {"training": {"loss": "training_metrics/loss"}}

    def __init__(self, config: Config, strategy: str) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(24, 4, generator=generator), torch.randint(2, (24,), generator=generator)
        model = nn.Sequential(nn.Linear(4, config.sizes[0]), nn.ReLU(), nn.Dropout(0.2), nn.Linear(config.sizes[0], 2))
        loader = DataLoader(TensorDataset(x, y), batch_size=config.batch_size, shuffle=strategy == "forward")
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=config.lr), loader, config=config)
        self.held_out = (x, y)
        self.strategy = strategy

    def loss_fn(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(self.config.pause)
        device = next(model.parameters()).device
        x, y = (part.to(device) for part in batch)
        return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        x, y = self.held_out
        return {"val_acc": (model(x.to(next(model.parameters()).dtype)).argmax(1) == y).float().mean()}


@dataclass
class Optimizer:
    """A part of a configuration."""

    lr: float = 1e-2
    """Of AdamW."""


@dataclass
class NestedConfig(Config):
    """A configuration that holds another, and a switch that is on."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    shuffle: bool = True


class Nested(Tiny):
    """Takes a configuration of parts."""

    name = "nested"
    config_class = NestedConfig


@dataclass
class NeedyConfig:
    """A configuration with a field that has to be given."""

    width: int
    """No default."""
    epochs: int = 1


class Needy(Tiny):
    """Cannot be run without --width."""

    name = "needy"
    config_class = NeedyConfig

    def __init__(self, config: NeedyConfig) -> None:
        super().__init__(Config(sizes=(config.width,)), "forward")


class Steps(Tiny):
    """The same in the step loop; its configuration says nothing of snapshots."""

    name = "steps"
    loop = "step"
    config_class = None
    strategies = ()
    hook_sets = {}

    def __init__(self) -> None:
        super().__init__(Config(), "forward")


class Broken(Tiny):
    """Fails in its second step."""

    name = "broken"
    calls = 0

    def loss_fn(self, model: nn.Module, batch: Any) -> torch.Tensor:
        Broken.calls += 1
        if Broken.calls > 1:
            raise ZeroDivisionError("the user's own mistake")
        return super().loss_fn(model, batch)


class NoBatches(Tiny):
    """Gives the loop nothing to train on."""

    name = "no_batches"

    def __init__(self, config: Config, strategy: str) -> None:
        super().__init__(config, strategy)
        self.loader = []


def make_tiny(strategy: str) -> hl.Experiment:
    """A function that makes an experiment."""
    model = nn.Linear(4, 2)
    model.strategy = strategy
    data = [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))]
    return hl.Experiment(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def make_model() -> nn.Module:
    """Something to look for modules in."""
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU()))


def make_nothing() -> int:
    """No experiment."""
    return 3


NUMBER = 3


class NotedHook(hl.TrainingHook):
    """A hook of the user's file, with an argument."""

    name = "noted"
    description = "notes what it was made with"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    pure = True
    made: list[NotedHook] = []

    def __init__(self, scale: float = 1.0) -> None:
        NotedHook.made.append(self)
        self.scale, self.resets = scale, 0

    def compute(self, ctx: Any) -> dict[str, Any]:
        return {"scale": self.scale, "resets": self.resets}

    def reset(self) -> None:
        self.resets += 1


class LinesSink(hl.MetricSink):
    """Writes one line per record into the folder of the run."""

    def __init__(self, ending: str = "txt") -> None:
        self.ending = ending
        self.path = ""

    def set_run_context(self, **context: Any) -> None:
        self.path = os.path.join(context["run_dir"], f"lines.{self.ending}")

    def emit(self, metrics: Any, epoch: int, hook_point: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{epoch} {sorted(metrics)}\n")


def count_calls(config: dict[str, Any]) -> Any:
    """A factory of hooks on modules, for specs."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        with open(config["file"], "a", encoding="utf-8") as file:
            file.write("x")

    return hook
