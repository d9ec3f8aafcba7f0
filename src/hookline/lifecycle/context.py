"""Show a hook the state of the run: one frozen object per firing, with a profiler for timing its parts.

The loops (or users) make a `RunDataContext` when a hook is due; ``compute`` and ``intervene`` read it.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from hookline.tables import ShownAsTable, Table

if TYPE_CHECKING:
    from torch import nn

    from hookline.when import HookPoint

_NOTHING: Final = nullcontext()

Number = float | Tensor | Callable[[], Any] | None
"""How a figure may be given: as it is, still on the device, or as something that finds it out."""


# -- the profiler ----------------------------------------------------------------------------------------------


class CheckpointProfiler(ShownAsTable):
    """Time sections of code by name; print as a table, the longest first.

    Recipe::

        with profiler.section("svd"):
            ...
        print(profiler)  # or profiler.report()["svd"]["mean_ms"]

    A section is timed until the device has done its work. One that raises is not counted. Sections may lie inside
    one another; each is charged with all that happens inside it.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        """Whether sections are timed."""
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def section(self, name: str) -> AbstractContextManager[None]:
        """Time a block."""
        return self._timed(name) if self.enabled else _NOTHING

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        _synchronize()
        start = time.perf_counter()
        yield
        _synchronize()
        self._counts[name] += 1
        self._seconds[name] += time.perf_counter() - start

    def report(self) -> dict[str, dict[str, float]]:
        """Return ``count``, ``total_ms`` and ``mean_ms`` of every section, the longest first."""
        longest = sorted(((1e3 * seconds, name) for name, seconds in self._seconds.items()), reverse=True)
        counts = self._counts
        return {n: {"count": counts[n], "total_ms": total, "mean_ms": total / counts[n]} for total, n in longest}

    def reset(self) -> None:
        """Start anew."""
        self._counts.clear()
        self._seconds.clear()

    def _table(self) -> Table:
        rows = [
            (name, f"{t['count']}", f"{t['total_ms']:.2f}", f"{t['mean_ms']:.3f}") for name, t in self.report().items()
        ]
        return Table(("section", "count", "total ms", "mean ms"), rows, numbers=(1, 2, 3), rule=False)


OFF: Final = CheckpointProfiler(enabled=False)
"""Times nothing."""


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


# -- the context -----------------------------------------------------------------------------------------------


class _WhenRead:
    """Take a value, or a function that finds it out, which is called when the field is first read.

    With ``as_float`` a number, a tensor of one element, or a function that finds one out, is read as a float. The
    device is waited for when the field is first read, and never if it is not: a loop may put the loss tensor of every
    step in, without a step waiting for it.
    """

    def __init__(self, *, as_float: bool = False) -> None:
        self._as_float = as_float

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.read = f"_{name}_read"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # which is how a dataclass asks for the default
        known = instance.__dict__
        if self.read not in known:
            value = known.get(self.name)
            value = value() if callable(value) and not isinstance(value, Tensor) else value
            if self._as_float and value is not None:  # item(), as float() of what needs a gradient is warned of
                value = float(value.item() if isinstance(value, Tensor) else value)
            known[self.read] = value
        return known[self.read]

    def __set__(self, instance: Any, value: Any) -> None:
        # Only ever called by the __init__ of a dataclass that is derived: the class is frozen.
        instance.__dict__[self.name] = value


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
    loss: float | None = _WhenRead(as_float=True)  # type: ignore[assignment]
    """Of the step, or the mean over the epoch."""
    train_acc: float | None = _WhenRead(as_float=True)  # type: ignore[assignment]
    """Accuracy on the training data."""
    val_acc: float | None = _WhenRead(as_float=True)  # type: ignore[assignment]
    """Accuracy on the validation data."""
    lr: float | None = _WhenRead(as_float=True)  # type: ignore[assignment]
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
