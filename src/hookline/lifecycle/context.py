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
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, overload

import torch
from torch import Tensor

from hookline.tables import ShownAsTable, Table

if TYPE_CHECKING:
    from torch import nn

    from hookline.when import HookPoint

_NOTHING: Final = nullcontext()

_T = TypeVar("_T")


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


class _WhenRead(Generic[_T]):
    """Take a value, or a function that finds it out, which is called when the field is first read.

    A figure is read as a float, by `_as_float`. The device is waited for when the field is first read, and never if it
    is not: a loop may put the loss tensor of every step in, without a step waiting for it.
    """

    def __init__(self, convert: Callable[[Any], _T]) -> None:
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.read = name, f"_{name}_read"

    @overload
    def __get__(self, instance: None, owner: type) -> None: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _T | None: ...
    def __get__(self, instance: Any, owner: type) -> _T | None:
        if instance is None:
            return None  # which is how a dataclass asks for the default
        known = vars(instance)
        if self.read not in known:
            value = known[self.name]
            value = value() if callable(value) and not isinstance(value, Tensor) else value
            known[self.read] = None if value is None else self._convert(value)
        found: _T | None = known[self.read]
        return found

    def __set__(self, instance: object, value: _T | Tensor | Callable[[], Any] | None) -> None:
        vars(instance)[self.name] = value  # the class is frozen: only its __init__ comes here


def _as_float(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)  # float() of what needs a gradient warns


@dataclass(frozen=True, eq=False, repr=False)
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
    loss: _WhenRead[float] = _WhenRead(_as_float)
    """Of the step, or the mean over the epoch."""
    train_acc: _WhenRead[float] = _WhenRead(_as_float)
    """Accuracy on the training data."""
    val_acc: _WhenRead[float] = _WhenRead(_as_float)
    """Accuracy on the validation data."""
    lr: _WhenRead[float] = _WhenRead(_as_float)
    """The learning rate."""
    accumulated_grads: Mapping[str, Tensor] | None = None
    """Mean gradients of the epoch, by parameter; if a hook that is due has ``needs_grads``."""
    prev_step_grads: Mapping[str, Tensor] | None = None
    """Gradients of the step before, by parameter; if a hook that is due has ``needs_prev_step_grads``."""
    target_grad: _WhenRead[Mapping[str, Tensor]] = _WhenRead(lambda gradient: gradient)
    """A gradient to compare with, if the experiment has one."""
    profiler: CheckpointProfiler = OFF
    """For timing parts of a hook: ``with ctx.profiler.section("svd"):``."""
    eval_metrics: Mapping[str, Any] | None = None
    """All that the experiment's evaluation found, if it was made just now."""

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
