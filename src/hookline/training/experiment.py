"""Define what an experiment supplies to the loops: model, data, a training step, evaluation, the state of the run.

Users make or derive one; the loops check it by `check_experiment`, and `Run` reads its `StepResult`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hookline.errors import OptionError
from hookline.guard.loaders import generators_of_loader
from hookline.guard.rng import GENERATOR_TYPES
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.messages import type_name
from hookline.records.log import FanOut
from hookline.records.sink import MetricSink
from hookline.tree import children, map_tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer

Per = Literal["epoch", "step"]

_PARTS: Final = (
    "model", "optimizer", "loader", "scheduler", "scheduler_per", "scaler", "accumulate", "clip_norm", "config",
)  # fmt: skip
_METHODS: Final = (
    "loss_fn", "evaluate", "train_step", "should_stop", "on_epoch_end", "target_gradient", "get_loader",
    "shuffled_loader",
)  # fmt: skip
_PLAIN: Final = (
    bool, int, float, complex, str, bytes, bytearray, range, Path, type(None), torch.dtype, torch.device,
    torch.Size, Tensor, np.ndarray, np.generic, Enum,
)  # fmt: skip
_OF_MANAGERS: Final = (HookManager, TrainingHook, MetricSink, FanOut)
"""What a manager saves and puts back."""
_DEEPEST: Final = 20
"""Containers inside each other that are looked into; more are likely a circle."""


class Experiment:
    """Supply model, data, loss and evaluation of a training run, without its loop.

    Recipe::

        experiment = hookline.Experiment(model, optimizer, loader, loss_fn)
        hookline.epoch_loop(experiment, epochs=10, manager=hookline.HookManager(hooks=[MyHook()]))


        class Parity(hookline.Experiment):  # or as methods
            def loss_fn(self, model, batch): ...
            def evaluate(self, model):
                return {"val_acc": ...}

    What the run changes is an attribute of the experiment, and so part of its ``state``: a second optimizer, an average
    of the weights, a counter. Interventions leave it as it was, and a resumed run goes on with it.

    For ``hookline run FILE:Class`` a subclass is made with ``Class(config, strategy)``, ``config`` being a
    ``config_class``, and hands what it has made to ``super().__init__``; it is then moved to the device by ``to``.

    Args:
        model: What is trained.
        optimizer: What trains it.
        loader: Batches; anything that can be iterated again and again.
        loss_fn: ``loss_fn(model, batch)`` gives the loss. If left out: the usual one for such a batch.
        scheduler: Of the learning rate; stepped by the loop. One that watches a plateau is given the training loss.
        scheduler_per: Whether the scheduler counts ``"epoch"`` or ``"step"``. If left out: as the loop does, but for
            `OneCycleLR` and `CyclicLR`, which count steps.
        scaler: A `GradScaler`. Gradients are unscaled before anyone sees them.
        accumulate: How many batches make one step.
        clip_norm: The largest norm that all gradients together may have.
        evaluate, train_step, should_stop, on_epoch_end, target_gradient, get_loader, shuffled_loader: The method of
            that name, as a function.
        config: Whatever hooks are to find as ``ctx.config``; the loops read ``config.snapshot_every``.
    """

    name: ClassVar[str] = ""
    """What the command line and folders call it; if left out, the name of its class."""
    loop: ClassVar[Per] = "epoch"
    """Which loop ``hookline run`` takes: the one that counts epochs, or steps."""
    config_class: ClassVar[type | None] = None
    """A dataclass whose fields are options of ``hookline run``: ``epochs`` (or ``steps``), ``snapshot_every``, …"""
    strategies: ClassVar[tuple[str, ...]] = ()
    """The ways it can be run, the usual one first: ``--strategy NAME`` or ``all``."""
    hook_sets: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Hooks by the name of a group: ``--with-hooks NAME``."""
    hook_config: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Arguments that fit it better than the hooks' own, by hook; a run file and ``--hook-config`` win over them."""
    live_metrics: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """What ``--live`` shows: ``{group: {label: metric}}``."""

    shares_data: bool = False
    """Whether it gives each rank its part of the data itself; if not, ``hookline run`` does so under torchrun."""

    # A subclass that calls no super().__init__() has these.
    model: nn.Module
    optimizer: Optimizer | None = None
    loader: Iterable[Any] | None = None
    scheduler: Any = None
    scheduler_per: Per | None = None
    scaler: Any = None
    accumulate: int = 1
    clip_norm: float | None = None
    config: Any = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loader: Iterable[Any] | None = None,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        *,
        scheduler: Any = None,
        scheduler_per: Per | None = None,
        scaler: Any = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        evaluate: Callable[[nn.Module], Mapping[str, Any] | None] | None = None,
        train_step: Callable[[Any], Any] | None = None,
        should_stop: Callable[[int, Mapping[str, Any]], bool] | None = None,
        on_epoch_end: Callable[[int, Mapping[str, Any]], None] | None = None,
        target_gradient: Callable[[nn.Module, int], dict[str, Tensor] | None] | None = None,
        get_loader: Callable[[int], Iterable[Any] | None] | None = None,
        shuffled_loader: Callable[..., Iterable[Any]] | None = None,
        config: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"An experiment trains an nn.Module, got {type_name(model)}.")
        if isinstance(loss_fn, torch.nn.modules.loss._Loss):
            raise OptionError(
                f"loss_fn= is called with the model and a batch, and {type(loss_fn).__name__} takes output and target: "
                "hand over lambda model, batch: criterion(model(batch[0]), batch[1])."
            )
        parts = (model, optimizer, loader, scheduler, scheduler_per, scaler, accumulate, clip_norm, config)
        for name, part in zip(_PARTS, parts, strict=True):
            setattr(self, name, part)
        given = (
            loss_fn, evaluate, train_step, should_stop, on_epoch_end, target_gradient, get_loader, shuffled_loader,
        )  # fmt: skip
        for name, function in zip(_METHODS, given, strict=True):
            if function is not None:
                setattr(self, name, function)  # in front of the method of that name

    @property
    def state(self) -> Mapping[str, Any]:
        """What belongs to the run besides model, optimizer, scheduler, scaler and loader; override to add or leave out.

        Recipe: ``return {**super().state, "queue": vars(self.queue)}`` in a property ``state`` of your own.

        These are the attributes that have ``state_dict()`` and ``load_state_dict()`` (modules, optimizers, …),
        generators, and plain values: numbers, texts, tensors, arrays, and lists, tuples, sets, deques, dictionaries and
        dataclasses of all these. They are copied for each intervention and saved in each checkpoint: keep data in a
        `Dataset`, and leave out a frozen teacher. In a resumed run they have the values that were saved.
        """
        found = {name: value for name, value in vars(self).items() if name not in _PARTS and value is not self.loader}
        # Of another loader the generators: to ask one that can tell its state would start it.
        loaders = {name: value for name, value in found.items() if isinstance(value, DataLoader)}
        found |= {name: generators_of_loader(loader) for name, loader in loaders.items()}
        return {name: value for name, value in found.items() if _is_state(value)}

    def has_own(self, method: str) -> bool:
        """Return whether a method is the experiment's own, and not that of this class."""
        found = getattr(self, method)
        return found is not None and getattr(found, "__func__", None) is not getattr(Experiment, method)

    def to(self, device: torch.device | str) -> None:
        """Move the model, before training has begun; its parameters stay the objects that the optimizer has."""
        self.model.to(device)

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, to call ``backward`` on."""
        return usual_loss(model, batch)

    def train_step(self, batch: Any) -> Any:
        """Make one step: gradients of the batch, then the optimizer.

        Leave the gradients in ``.grad`` (zero them before the backward, not after the step): hooks read them there.
        With ``accumulate=`` over 1 the batch is a tuple of batches. Interventions train by it as well; what it changes
        on the experiment (counters, lists, other optimizers and modules) is put back when they are over.

        Returns:
            The loss; or a dictionary with ``loss`` and whatever else is to be reported; or False if nothing was
            trained, and the scheduler is to wait.
        """
        optimizer, scaler = self.optimizer, self.scaler
        if optimizer is None:
            raise OptionError("The experiment has no optimizer to make a step with: give it one, or a train_step().")
        optimizer.zero_grad(set_to_none=True)
        loss = backward(self.model, batch, self.loss_fn, (lambda loss: loss) if scaler is None else scaler.scale)
        if scaler is not None:
            # Also where nothing is clipped: a fused optimizer would divide by the scale inside its kernel, and hooks
            # would see gradients 65,536 times too large.
            scaler.unscale_(optimizer)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if scaler is None:
            optimizer.step()
            return StepResult(loss)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return StepResult(loss, trained=scaler.get_scale() >= before)  # it is lowered when a step was passed over

    def get_loader(self, epoch: int) -> Iterable[Any] | None:
        """Return the batches of an epoch (in the step loop: of a pass over the data); ``loader`` every time."""
        return self.loader

    shuffled_loader: Callable[..., Iterable[Any]] | None = None
    """``shuffled_loader(generator)`` gives the batches in another order, where the loader can only be iterated."""

    def evaluate(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Return metrics of the model; hooks see ``train_acc`` and ``val_acc`` among them by these names.

        The model is in evaluation mode by then, no gradients are recorded, trackers are paused, and random numbers
        that are drawn here are not missing in training.
        """
        return None

    def should_stop(self, position: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether that was the last epoch (in the step loop: step), by ``loss`` and the newest evaluation."""
        return False

    def target_gradient(self, model: nn.Module, step: int) -> dict[str, Tensor] | None:
        """Return the gradient that hooks compare with, by parameter; called when they read ``ctx.target_grad``."""
        return None

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Do something after an epoch and its hooks."""


def check_experiment(experiment: Any) -> None:
    """Raise unless that is an experiment that can be trained."""
    if not isinstance(experiment, Experiment) or not isinstance(getattr(experiment, "model", None), nn.Module):
        raise OptionError(f"A loop takes an Experiment, which has a model; got {type_name(experiment)}.")
    own_step, loader, clip = experiment.has_own("train_step"), experiment.loader, experiment.clip_norm
    if not own_step and experiment.optimizer is None:
        raise OptionError("The experiment has no optimizer: give it one, or its own train_step().")
    if loader is None and not (own_step or experiment.has_own("get_loader") or experiment.has_own("loss_fn")):
        raise OptionError("The experiment has no loader to take batches from: give it one, or a train_step().")
    if loader is not None and not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise OptionError(f"loader= is something to iterate over, again and again; got {type_name(loader)}.")
    whole_number("accumulate", experiment.accumulate, 1)
    if clip is not None and not clip > 0:  # a negative one turns gradients around
        raise OptionError(f"clip_norm= is the largest norm, over 0, or None for any; got {clip!r}.")
    if experiment.scheduler_per not in (None, "epoch", "step"):
        raise OptionError(f"scheduler_per= is 'epoch' or 'step', got {experiment.scheduler_per!r}.")


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`; the model itself if it is none.

    Recipe: ``bare_model(experiment.model).named_parameters()`` has the names that one process has.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def whole_number(name: str, value: Any, least: int) -> int:
    """Return an option that counts something as an int; refuse one below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise OptionError(f"{name}= must be a whole number of at least {least}, got {value!r}.")
    return number


# -- a training step ------------------------------------------------------------------------------------------------


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


_NEXT: Final = "Give the experiment a loss_fn(model, batch)."


def usual_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the usual loss for such a batch.

    A dictionary goes to the model as keywords, and the output has the loss. Of anything else the last item is the
    target: whole numbers are classes (cross entropy), other numbers are values (mean squared error). Tensors of the
    batch go to the model's GPU first.
    """
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if first is not None and first.device.type != "cpu":  # loaders leave tensors on the CPU, often pinned
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


# -- what belongs to the run ---------------------------------------------------------------------------------------


def _is_state(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _PLAIN) or has_state(value):
        return not isinstance(value, _OF_MANAGERS)
    items = list(enumerate(value)) if isinstance(value, set | frozenset) else items_of(value)
    return items is not None and depth <= _DEEPEST and all(_is_state(item, depth + 1) for _, item in items)


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a container, or of an object that is its attributes, by key or number; None of others."""
    if is_record(value):
        return list(vars(value).items())
    if is_named_tuple(value):
        return list(value._asdict().items())
    is_plain = isinstance(value, dict | list | tuple | deque) and not isinstance(value, torch.Size)
    return children(value) if is_plain else None


def is_named_tuple(value: Any) -> bool:
    """Return whether that is a tuple whose items have names."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def has_state(value: Any) -> bool:
    """Return whether an object can save and load its own state."""
    if isinstance(value, GENERATOR_TYPES):
        return True
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def is_record(value: Any) -> bool:
    """Return whether an object is its attributes, which can be written: a dataclass, or a namespace."""
    if isinstance(value, SimpleNamespace):
        return True
    is_instance = is_dataclass(value) and not isinstance(value, type)
    return is_instance and hasattr(value, "__dict__") and not value.__dataclass_params__.frozen
