"""Collect and compare what a run with a hook leaves behind: metrics, and all that must be as without the hook.

`SmallRun` fills an `Outcome`; `check_hook` compares two of them.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hookline.sinks.memory_sink import MemorySink
from hookline.training.manager import HookManager

if TYPE_CHECKING:
    from torch import nn

    from hookline.training.loops.experiment import Experiment
    from hookline.training.training_hook import TrainingHook

__all__ = ["Outcome", "Trial", "collected_warnings", "differences", "is_same", "kept_streams", "left_by"]


@dataclass
class Outcome:
    """Hold what a run left behind."""

    left: dict[str, Any]
    """Weights, optimizer, random streams and so on, to the last bit."""
    metrics: dict[str, list[Any]]
    """What the hook returned, by metric: when, and what."""
    warned: list[str]
    """The texts of its warnings."""
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
        offload: bool = False,
    ) -> None:
        self.hook = hook
        self._sink = MemorySink()
        self.manager = HookManager(
            hooks=[*before, hook, *after], sinks=[self._sink], reference_weights=reference, offload_state=offload
        )

    @property
    def fired(self) -> int:
        """How often the hook was called."""
        return self.manager.fired[self.hook.name]

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

    def forget(self) -> None:
        """Forget the metrics so far."""
        self._sink.clear()


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings while the block lasts, each once."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += dict.fromkeys(str(warning.message) for warning in caught)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Restore the random streams after the block, as if nothing had been drawn."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def left_by(experiment: Experiment) -> dict[str, Any]:
    """Return weights, buffers, gradients, modes, optimizer, scheduler and random streams."""
    model: Any = experiment.model
    optimizer: Any = experiment.optimizer
    left: dict[str, Any] = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        left[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        left[f"requires_grad of {name}"] = parameter.requires_grad
        for key, value in ({} if optimizer is None else optimizer.state[parameter]).items():
            left[f"optimizer's {key} of {name}"] = torch.as_tensor(value).clone()
    left |= {f"mode of {name or 'the model'}": module.training for name, module in model.named_modules()}
    left["learning rate"] = [float(group["lr"]) for group in getattr(optimizer, "param_groups", ())]
    left["scheduler"] = getattr(experiment.scheduler, "last_epoch", None)
    left["random stream of torch"] = torch.get_rng_state()
    left["random stream of NumPy"] = [
        part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state(legacy=True)
    ]
    left["random stream of Python"] = list(random.getstate())
    generator = getattr(experiment.loader, "generator", None)
    left["random stream of the loader"] = None if generator is None else generator.get_state()
    return left


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not the same to the last bit."""
    return [name for name in {**one, **other} if not is_same(one.get(name), other.get(name))]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal to the last bit; NaN is equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
