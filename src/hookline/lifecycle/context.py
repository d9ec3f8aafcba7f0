"""Show a hook the state of the run: one frozen object per firing.

The loops (or users) make a `RunDataContext` when a hook is due; ``compute`` and ``intervene`` read it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from hookline.lifecycle.profiler import OFF, CheckpointProfiler

if TYPE_CHECKING:
    from torch import nn

    from hookline.when import HookPoint

__all__ = ["Number", "RunDataContext"]

Number = float | Tensor | Callable[[], Any] | None
"""How a figure may be given: as it is, still on the device, or as something that finds it out."""


class _WhenRead:
    """Take a value, or a function that finds it out, which is called when the field is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.read = f"_{name}_read"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # which is how a dataclass asks for the default
        known = instance.__dict__
        if self.read not in known:
            value = known.get(self.name)
            known[self.read] = self.found(value() if callable(value) and not isinstance(value, Tensor) else value)
        return known[self.read]

    def __set__(self, instance: Any, value: Any) -> None:
        # Only ever called by the __init__ of a dataclass that is derived: the class is frozen.
        instance.__dict__[self.name] = value

    def found(self, value: Any) -> Any:
        return value


class _ReadAsFloat(_WhenRead):
    """Take a number, a tensor of one element or a function as well, and read as a float.

    The device is waited for when the field is first read, and never if it is not: a loop may put the loss tensor of
    every step in, without a step waiting for it.
    """

    def found(self, value: Any) -> Any:
        # item(), since float() of a tensor that needs a gradient is warned of.
        return None if value is None else float(value.item() if isinstance(value, Tensor) else value)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class RunDataContext:
    """The state of the run at one point, for reading.

    Recipe::

        ctx = hookline.RunDataContext(hookline.HookPoint.POST_EPOCH, epoch, model=model, loss=loss)
        manager.fire(hookline.HookPoint.POST_EPOCH, ctx)

    Fields that do not apply are None. ``loss``, ``train_acc``, ``val_acc`` and ``lr`` may be tensors or functions;
    reading them gives a float, and that is when the device is waited for, once. ``raw("loss")`` is what was given.
    """

    hook_point: HookPoint
    """Which moment this is."""
    epoch: int
    """The epoch, counted from 0."""
    step: int | None = None
    """The step of the run, counted from 0."""
    model: nn.Module | None = None
    """The model, for looking at."""
    config: Any = None
    """The configuration of the experiment."""
    loader: Any = None
    """The loader of the training data. To go through the data, an intervention has loaders of its own."""
    batch_idx: int | None = None
    """The batch within the epoch."""
    batch_data: Any = None
    """The batch."""
    loss: float | None = _ReadAsFloat()  # type: ignore[assignment]
    """Of the step, or the mean over the epoch."""
    train_acc: float | None = _ReadAsFloat()  # type: ignore[assignment]
    """Accuracy on the training data."""
    val_acc: float | None = _ReadAsFloat()  # type: ignore[assignment]
    """Accuracy on the validation data."""
    lr: float | None = _ReadAsFloat()  # type: ignore[assignment]
    """The learning rate."""
    accumulated_grads: Mapping[str, Tensor] | None = None
    """Mean gradients of the epoch, by parameter; if a hook that is due has ``needs_grads``."""
    prev_step_grads: Mapping[str, Tensor] | None = None
    """Gradients of the step before, by parameter; if a hook that is due has ``needs_prev_step_grads``."""
    target_grad: Mapping[str, Tensor] | None = _WhenRead()  # type: ignore[assignment]
    """A gradient to compare with, if the experiment has one."""
    profiler: CheckpointProfiler = OFF
    """For timing parts of a hook: ``with ctx.profiler.section("svd"):``."""
    eval_metrics: Mapping[str, Any] | None = None
    """All that the experiment's evaluation found, if it was made just now."""

    # By hand: figures may be given as more than they read as, and the one of a frozen dataclass takes 3 µs.
    def __init__(
        self,
        hook_point: HookPoint,
        epoch: int,
        step: int | None = None,
        model: nn.Module | None = None,
        config: Any = None,
        loader: Any = None,
        batch_idx: int | None = None,
        batch_data: Any = None,
        loss: Number = None,
        train_acc: Number = None,
        val_acc: Number = None,
        lr: Number = None,
        accumulated_grads: Mapping[str, Tensor] | None = None,
        prev_step_grads: Mapping[str, Tensor] | None = None,
        target_grad: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor] | None] | None = None,
        profiler: CheckpointProfiler | None = None,
        eval_metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.__dict__.update(
            hook_point=hook_point, epoch=epoch, step=step, model=model, config=config, loader=loader,
            batch_idx=batch_idx, batch_data=batch_data, loss=loss, train_acc=train_acc, val_acc=val_acc, lr=lr,
            accumulated_grads=accumulated_grads, prev_step_grads=prev_step_grads, target_grad=target_grad,
            eval_metrics=eval_metrics,
        )  # fmt: skip
        if profiler is not None:
            self.__dict__["profiler"] = profiler

    def with_profiler(self, profiler: CheckpointProfiler) -> Self:
        """Return the same context with a profiler, if it has none; nothing is read from the device."""
        if self.profiler is not OFF:
            return self
        other = copy.copy(self)
        vars(other)["profiler"] = profiler
        return other

    def raw(self, name: str) -> Any:
        """Return what was given for a field, without waiting for the device."""
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return vars(self).get(name)

    def __repr__(self) -> str:
        given = [field.name for field in dataclasses.fields(self)[2:] if vars(self).get(field.name) is not None]
        point = getattr(self.hook_point, "name", self.hook_point)
        return f"RunDataContext({point}, epoch {self.epoch}; has {', '.join(given) or 'nothing else'})"
