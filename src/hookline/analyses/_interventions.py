"""What the built-in interventions share: vectors by parameter name, angles and shares, the way to a solution, shuffles.

Takes gradients and reference weights from ``hessian``, ``adam_dynamics`` and the two counterfactual hooks, and hands
them figures as tensors, still on their device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hookline.analyses._shared import Work, flatten, is_bias, ratio, wide
from hookline.guard.rng import kept_rng
from hookline.lifecycle.schedule import StepSchedule
from hookline.training.training_hook import InterventionHook

if TYPE_CHECKING:
    from torch import nn

    from hookline.guard.model_context import ModelDataContext
    from hookline.lifecycle.run_context import RunDataContext

__all__ = [
    "Compared",
    "bursts",
    "by_parameter",
    "cosine",
    "joined",
    "loss_on_batch",
    "norm",
    "numbers_of",
    "parameters_of",
    "ratio",
    "shuffled_epochs",
    "step_of",
    "way_to_solution",
    "weight_names",
]


class Compared(InterventionHook):
    """An intervention that compares with reference weights where the run has some, and does without where not."""

    needs_reference_weights = True
    reference: Mapping[str, Tensor] | None = None
    """The weights to compare with, by parameter, if the run has found any."""

    def set_reference_weights(self, reference: Mapping[str, Tensor]) -> None:
        """There are some."""
        self.reference = reference

    def reset(self) -> None:
        """Another run begins, which may have other weights to compare with, or none."""
        self.reference = None


def bursts(every_n_steps: int, burst_length: int) -> StepSchedule:
    """So many steps in a row every n, not at the beginning of the run: the first burst begins at step n."""
    return StepSchedule("burst", stride=every_n_steps, burst_length=burst_length, warmup=every_n_steps)


# -- vectors -------------------------------------------------------------------------------------------------


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by names without wrappers, tied ones once."""
    return Work(model, None).parameters


def weight_names(*vectors: Mapping[str, Tensor]) -> list[str]:
    """The names that all of them have, without biases, sorted: the order of every flat vector."""
    return sorted(name for name in vectors[0] if not is_bias(name) and all(name in other for other in vectors[1:]))


def joined(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """The tensors of these names in one vector, in no less than float32; there has to be one."""
    flat = flatten(tensors[name] for name in names)
    assert flat is not None
    return flat


def norm(vector: Tensor) -> Tensor:
    """Its length."""
    length: Tensor = torch.linalg.vector_norm(vector)
    return length


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """Of the angle between two vectors; 0 if one of them is zero.

    Each is brought to length 1 first: the product of two small lengths is 0 in float32 long before they are.
    """
    return torch.dot(ratio(one, norm(one)), ratio(other, norm(other)))


def by_parameter(names: Iterable[str], figures: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of each parameter, as ``"figure/parameter"``."""
    return {f"{figure}/{name}": value for name in names for figure, value in figures(name).items()}


# -- where to, and what else might have been -----------------------------------------------------------------


def way_to_solution(reference: Mapping[str, Tensor] | None, model: nn.Module) -> dict[str, Tensor]:
    """From the weights as they are to the reference, by parameter; without those that are there already."""
    ways: dict[str, Tensor] = {}
    for name, parameter in parameters_of(model).items() if reference else ():
        assert reference is not None
        target = reference.get(name, reference.get(f"module.{name}"))
        if target is None or target.shape != parameter.shape:
            continue
        way = wide(target).to(parameter.device) - wide(parameter)
        if bool((way != 0).any()):
            ways[name] = way
    return ways


def shuffled_epochs(model_ctx: ModelDataContext, count: int) -> Iterator[dict[str, Tensor]]:
    """Train the epoch that is over again so many times, each time in another order: the mean gradients of each."""
    for _ in range(count):
        model_ctx.restore_pre_epoch()
        yield model_ctx.run_training_epoch(model_ctx.get_shuffled_loader(), step=True)


def step_of(ctx: RunDataContext, hook: InterventionHook) -> int:
    """Which step it is; in a loop of one's own that does not say so in the context, by the manager's count."""
    return ctx.step if ctx.step is not None else int(getattr(hook.manager, "global_step", 0))


def loss_on_batch(model_ctx: ModelDataContext, step: int) -> Tensor:
    """The loss on the batch of the step in the mode that the model trains in, always with the same random numbers."""
    with numbers_of(step):
        return model_ctx.batch_loss().float().reshape(())


@contextmanager
def numbers_of(step: int) -> Iterator[None]:
    """Random numbers that depend on the step alone: each block gets the same, whatever other hooks have drawn."""
    with kept_rng():
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        yield
