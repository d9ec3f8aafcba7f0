"""Hold the parts of a training step: its batches, its gradients, its outcome, and the loss where none is given.

`Experiment.train_step` calls `backward` and `usual_loss`; `Run` reads the `StepResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.tree import map_tensors

__all__ = ["Mean", "MicroBatches", "StepResult", "as_result", "backward", "grouped", "usual_loss"]


class MicroBatches(tuple[Any, ...]):
    """The batches that make one step together (``accumulate=``); the gradient of the step is the mean of theirs."""

    __slots__ = ()


def grouped(loader: Iterable[Any], size: int) -> Iterator[MicroBatches]:
    """Yield as many batches of a loader at a time as make a step; the last may be fewer."""
    group: list[Any] = []
    for batch in loader:
        if isinstance(batch, MicroBatches):  # of a loader that was grouped already
            yield batch
            continue
        group.append(batch)
        if len(group) == size:
            yield MicroBatches(group)
            group = []
    if group:
        yield MicroBatches(group)


class StepResult(NamedTuple):
    """The outcome of one training step.

    Recipe: ``return hookline.training.StepResult(loss, trained=False)`` in a ``train_step`` that left this batch out.
    """

    loss: Tensor | float | None
    """Its loss, where it is; nothing is fetched from the device."""
    trained: bool = True
    """Whether the weights were updated: a `GradScaler` passes over steps whose gradients overflow."""
    metrics: Mapping[str, Any] = {}
    """Whatever else the step told of itself."""


def as_result(given: Any) -> StepResult:
    """Return the `StepResult` of what a ``train_step`` returned: a loss or None, a mapping with ``loss``, False."""
    if isinstance(given, StepResult):
        return given._replace(loss=_detached(given.loss))
    if given is None or isinstance(given, bool):
        return StepResult(None, trained=given is not False)
    if isinstance(given, Mapping):
        others = {name: value for name, value in given.items() if name != "loss"}
        return StepResult(_detached(given.get("loss")), metrics=others)
    if isinstance(given, (Tensor, int, float)):
        return StepResult(_detached(given))
    raise OptionError(f"train_step() returns the loss, a dictionary with 'loss', or False; got {type_name(given)}.")


def backward(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor], scale: Callable[..., Tensor]) -> Tensor:
    """Compute the gradients of a batch, or the mean of those of several; return the loss, or their mean."""
    parts = batch if isinstance(batch, MicroBatches) else (batch,)
    losses = []
    for number, part in enumerate(parts, 1):
        # Under DDP only the last batch of a step needs averaging over processes.
        no_sync = getattr(model, "no_sync", nullcontext) if number < len(parts) else nullcontext
        with no_sync():
            loss = _checked(loss_fn(model, part))
            if len(parts) > 1:
                loss = loss / len(parts)
            scale(loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise OptionError(f"loss_fn(model, batch) gives a tensor to call backward() on, got {type_name(loss)}.")
    if loss.numel() != 1:
        raise OptionError(f"loss_fn(model, batch) gives one number, got {tuple(loss.shape)}: take its mean.")
    return loss


def _detached(loss: Any) -> Any:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise OptionError(f"train_step() returns one number as the loss, got {tuple(loss.shape)}: return its mean.")
    return loss.detach() if isinstance(loss, Tensor) else loss


class Mean:
    """Average a number over the steps of an epoch, on its device."""

    state: tuple[Any, int] = (None, 0)
    """The sum so far, and the number of steps in it."""

    def add(self, number: Any) -> None:
        """Add the number of a step; None does not count."""
        if number is None:
            return
        if isinstance(number, Tensor):
            number = number.detach() if number.requires_grad else number
            if number.dtype is not torch.float32:  # half precision would stop growing after a few hundred steps
                number = number.to(torch.promote_types(number.dtype, torch.float32))
        total, count = self.state
        self.state = (number if total is None else total + number, count + 1)

    def take(self) -> Any:
        """Return the mean since the last time, a tensor if one was among the numbers; None of nothing."""
        (total, count), self.state = self.state, (None, 0)
        return total / count if count else None


# -- the loss, for experiments that bring none ---------------------------------------------------------------

_NEXT = "Give the experiment a loss_fn(model, batch)."


def usual_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the usual loss for such a batch.

    A dictionary goes to the model as keywords, and the output has the loss. Of anything else the last item is the
    target: whole numbers are classes (cross entropy), other numbers are values (mean squared error). Tensors of the
    batch go to the device of the model first.
    """
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if first is not None:  # loaders leave tensors on the CPU, often pinned
        batch = map_tensors(batch, lambda _, tensor: tensor.to(first.device, non_blocking=True))
    if isinstance(batch, Mapping):
        return _own_loss(model(**batch))
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or not isinstance(batch[-1], Tensor):
        found = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type_name(batch)
        raise OptionError(f"Without a loss, a batch has to be (inputs, target) or a dictionary; got {found}. {_NEXT}")
    *inputs, target = batch
    output = model(*inputs)
    if not isinstance(output, Tensor):
        raise OptionError(f"Without a loss, the model has to give a tensor, got {type_name(output)}. {_NEXT}")
    if not target.is_floating_point():
        return _of_classes(output, target)
    if output.shape != target.shape:  # mse_loss would broadcast one against the other
        raise OptionError(f"The model gives {tuple(output.shape)}, the target is {tuple(target.shape)}. {_NEXT}")
    return F.mse_loss(output, target)


def _of_classes(output: Tensor, target: Tensor) -> Tensor:
    if output.shape[:-1] == target.shape:  # (B, C) or (B, T, C): the classes are last
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)  # (B, C, H, W), as torch has it


def _own_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise OptionError(f"The batch is a dictionary, and the model gave no loss with {type_name(output)}. {_NEXT}")
    return loss
