"""Collect and compare what a run with a hook leaves behind: metrics, and all that must be as without the hook.

`SmallRun` fills an `Outcome`; `check_hook` compares two of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.guard.rng import RandomStates, stream_states
from hookline.lifecycle.manager import HookManager
from hookline.sinks.memory_sink import MemorySink

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.hook import TrainingHook
    from hookline.training.experiment import Experiment

__all__ = ["Outcome", "Trial", "collected_warnings", "differences", "is_same", "kept_streams", "left_by"]

_INEXACT: Final = (float, complex, np.inexact)


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
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()


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
    left |= stream_states()
    generator = getattr(experiment.loader, "generator", None)
    left["random stream of the loader"] = None if generator is None else generator.get_state()
    return left


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not the same to the last bit."""
    return [name for name in {**one, **other} if not is_same(one.get(name), other.get(name))]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal to the last bit; NaN is equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _has_same_bits(one, other)
    if isinstance(one, _INEXACT) and isinstance(other, _INEXACT):
        return repr(complex(one)) == repr(complex(other))  # has all digits, and the sign of zero
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and is_same(one.tolist(), other.tolist())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    same = (one == other) & (one.signbit() == other.signbit())
    return bool((same | (one.isnan() & other.isnan())).all())
