"""Make one step of the optimizer: the loss of a batch, or of several, their gradients, then the step.

`Experiment.train_step` calls `optimizer_step`; `Run` reads the `StepResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.messages import type_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Grouped", "Mean", "MicroBatches", "StepResult", "Trainable", "as_result", "optimizer_step", "usual_loss"]


class Trainable(Protocol):
    """Declare what a step needs of an experiment."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Optimizer | None: ...
    @property
    def scaler(self) -> Any: ...
    @property
    def clip_norm(self) -> float | None: ...
    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor: ...


class MicroBatches(tuple[Any, ...]):
    """The batches that make one step together (``accumulate=``); the gradient of the step is the mean of theirs."""

    __slots__ = ()


class Grouped:
    """Iterate a loader by as many batches as make a step; the last may be fewer."""

    def __init__(self, loader: Iterable[Any], size: int) -> None:
        self._loader = loader
        self._size = size

    def __iter__(self) -> Iterator[MicroBatches]:
        group: list[Any] = []
        for batch in self._loader:
            if isinstance(batch, MicroBatches):  # of a loader that was grouped already
                yield batch
                continue
            group.append(batch)
            if len(group) == self._size:
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
    raise OptionError(
        "train_step() returns the loss, a dictionary with 'loss' in it, or False for no training; "
        f"got {type_name(given)}."
    )


def optimizer_step(experiment: Trainable, batch: Any) -> StepResult:
    """Zero, forward and backward, unscale, clip, step: the order that gradients in ``.grad`` can be read after."""
    optimizer, scaler = experiment.optimizer, experiment.scaler
    if optimizer is None:
        raise OptionError("The experiment has no optimizer to make a step with: give it one, or a train_step().")
    optimizer.zero_grad(set_to_none=True)
    loss = _backward(experiment, batch)
    if scaler is not None:
        # Also where nothing is clipped: a fused optimizer would divide by the scale inside its kernel, and hooks would
        # see gradients 65,536 times too large.
        scaler.unscale_(optimizer)
    if experiment.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(experiment.model.parameters(), experiment.clip_norm)
    if scaler is None:
        optimizer.step()
        return StepResult(loss)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return StepResult(loss, trained=scaler.get_scale() >= before)  # it is lowered when a step was passed over


def _backward(experiment: Trainable, batch: Any) -> Tensor:
    parts = batch if isinstance(batch, MicroBatches) else (batch,)
    total: Tensor | None = None
    for number, part in enumerate(parts, 1):
        with _alone(experiment.model) if number < len(parts) else nullcontext():
            loss = _checked(experiment.loss_fn(experiment.model, part))
            if len(parts) > 1:
                loss = loss / len(parts)
            (loss if experiment.scaler is None else experiment.scaler.scale(loss)).backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def _alone(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context without averaging over processes: under DDP only the last batch of a step needs it."""
    no_sync: Callable[[], AbstractContextManager[Any]] = getattr(model, "no_sync", nullcontext)
    return no_sync()


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

    def __init__(self) -> None:
        self._total: Any = None
        self._count = 0

    @property
    def state(self) -> tuple[Any, int]:
        """The sum so far, and the number of steps in it."""
        return self._total, self._count

    @state.setter
    def state(self, state: tuple[Any, int]) -> None:
        self._total, self._count = state

    def add(self, number: Any) -> None:
        """Add the number of a step; None does not count."""
        if number is None:
            return
        if isinstance(number, Tensor):
            number = number.detach() if number.requires_grad else number
            if number.dtype is not torch.float32:  # half precision would stop growing after a few hundred steps
                number = number.to(torch.promote_types(number.dtype, torch.float32))
        self._total = number if self._total is None else self._total + number
        self._count += 1

    def take(self) -> Any:
        """Return the mean since the last time, a tensor if one was among the numbers; None of nothing."""
        mean = self._total / self._count if self._count else None
        self._total, self._count = None, 0
        return mean


# -- the loss, for experiments that bring none ---------------------------------------------------------------

_NEXT = "Give the experiment a loss_fn(model, batch)."


def usual_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the usual loss for such a batch.

    A dictionary goes to the model as keywords, and the output has the loss. Of anything else the last item is the
    target: whole numbers are classes (cross entropy), other numbers are values (mean squared error). Tensors of the
    batch go to the device of the model first.
    """
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    batch = batch if first is None else _moved(batch, first.device)
    if isinstance(batch, Mapping):
        return _own_loss(model(**batch))
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or not isinstance(batch[-1], Tensor):
        raise OptionError(
            f"Without a loss, a batch has to be (inputs, target) or a dictionary; got {_a(batch)}. {_NEXT}"
        )
    *inputs, target = batch
    output = model(*inputs)
    if not isinstance(output, Tensor):
        raise OptionError(f"Without a loss, the model has to give a tensor, got {type_name(output)}. {_NEXT}")
    if not target.is_floating_point():
        return _of_classes(output, target)
    if output.shape != target.shape:  # mse_loss would broadcast one against the other
        raise OptionError(f"The model gives {tuple(output.shape)}, the target is {tuple(target.shape)}. {_NEXT}")
    return F.mse_loss(output, target)


def _moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device; loaders leave them on the CPU, often pinned."""
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_moved(value, device) for value in batch)
    return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch


def _of_classes(output: Tensor, target: Tensor) -> Tensor:
    if output.shape[:-1] == target.shape:  # (B, C) or (B, T, C): the classes are last
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)  # (B, C, H, W), as torch has it


def _own_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise OptionError(f"The batch is a dictionary, and the model gave no loss with its {_a(output)}. {_NEXT}")
    return loss


def _a(item: Any) -> str:
    return f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list)) else type_name(item)
