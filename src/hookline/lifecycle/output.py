"""Take the metrics of hooks to the sinks: those of steps through a buffer, others at once.

A manager hands each firing over to its `MetricOutput`, `record` adds single metrics; `FanOut` writes them. Metrics are
checked and copied when a hook returns them, and brought to the host before they are written.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.errors import LifecycleError, MetricError, OptionError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.ranks import OneProcess
from hookline.messages import type_name
from hookline.observe.host_values import on_host
from hookline.records.readers import FanOut, own_rank
from hookline.records.sink import Record, StepSeries
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.context import RunDataContext
    from hookline.lifecycle.managed_hooks import FiringReceipt
    from hookline.lifecycle.plan import Plan, PlannedHook

__all__ = ["RECORDER", "Firing", "MetricOutput", "add_metrics", "make_fan_out", "record", "to_host"]

PLAIN: Final = frozenset({float, int, bool, str, type(None)})
"""Types that every sink can write as they are."""
_NAMES: Final = frozenset({str})


class _Recorder:
    # Of the process, not of a thread: on CUDA, gradient hooks run in a thread of autograd's.
    __slots__ = ("output",)

    def __init__(self) -> None:
        self.output: weakref.ref[MetricOutput] | None = None


RECORDER: Final = _Recorder()
"""Has the ``output`` that `record` adds to: who sets one puts back the one before."""


def record(name: str, value: Any) -> None:
    """Add a metric to the current record.

    Recipe::

        def hook(module, inputs, output):
            hookline.record("largest", output.detach().abs().amax())

    Inside a hook of a manager it is one more of that hook's metrics, ``"hook/name"``. Elsewhere, in a hook of a module
    say, it is a metric ``name`` of the current step of the manager whose ``advance_step()`` was called last. Tensors
    stay on their device until the step metrics are flushed.
    """
    output = None if RECORDER.output is None else RECORDER.output()
    if output is None:
        raise LifecycleError(f"record({name!r}, ...) has no record to join: call manager.advance_step() at each step.")
    if not isinstance(name, str):
        raise MetricError(f"record() was given the name {name!r}; names of metrics are strings.")
    output.record(name, value)


@dataclass(slots=True, eq=False)
class Firing:
    """A point that is being fired."""

    point: HookPoint
    ctx: RunDataContext
    step: int | None
    """The step of the run; None before the first."""
    position: int
    """Where its metrics belong: the epoch; in the step loop the step."""
    ranks: OneProcess
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the hooks so far have returned, by ``"hook/metric"``."""
    current: PlannedHook | None = None
    """The hook that runs now."""
    receipts: list[FiringReceipt] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)

    @property
    def place(self) -> str:
        """The point and the step, in words."""
        return f"{self.point.name}, step {self.step or 0}"


class MetricOutput:
    """Hand metrics to the log and the sinks; remember what each point returned last.

    Args:
        fan_out: The log and the sinks.
        plan: Says whether the run counts steps, so that records have no epoch.
        join: Makes the ranks of the run, when they are first asked for.
    """

    def __init__(self, fan_out: FanOut, plan: Plan, join: Callable[[], OneProcess]) -> None:
        self.fan_out = fan_out
        self.steps = StepBuffer()
        self.step = -1
        """The current step, to which `record` adds."""
        self.firing: Firing | None = None
        """The firing under way."""
        self.position: int | None = None
        """The epoch, or step, of the last firing: buffered metrics belong there if no loop flushes them."""
        self.met = OneProcess()
        """The ranks that were met: one process, as long as nobody asked for `ranks`."""
        self._plan, self._join = plan, join
        self._has_met = False
        self._last: dict[HookPoint | None, dict[str, Any]] = {}
        """What each point returned last; under None, the point that fired last."""
        self._strategy: str | None = None
        self._rank = own_rank()

    @property
    def ranks(self) -> OneProcess:
        """What keeps this rank together with the others; to read it first is to meet them, and to compare the hooks."""
        if not self._has_met:
            self._has_met = True
            self.met = self._join()
        return self.met

    def record(self, name: str, value: Any) -> None:
        """Add a metric to the hook that runs now, or to the current step; `hookline.record` calls this."""
        firing = self.firing
        if firing is not None and firing.current is not None:
            add_metrics(firing.current.name, {name: value}, firing.metrics)
        else:
            metrics = {name: copy_metric(value, "record()", name)}
            self.steps.add(HookPoint.POST_STEP, max(self.step, 0), metrics)

    def take(self, firing: Firing) -> dict[str, Any]:
        """Buffer the metrics of a firing at a step, or write those of another point, of all ranks; return them."""
        point, metrics = firing.point, firing.metrics
        if point.is_step:
            if metrics:
                self.steps.add(point, max(firing.step or 0, 0), metrics)  # ranks exchange them when they are flushed
        elif metrics or not self.met.is_single:
            metrics = to_host(metrics)
            if not self.met.is_single:
                metrics = self.met.reduce(metrics, f"metrics at {point.name}")
            self._write(metrics, firing.position, point, firing.step)
        self._last[point] = self._last[None] = metrics
        self.position = firing.position
        return metrics

    def last(self, point: HookPoint | None) -> dict[str, Any]:
        """Return what a point returned last, or the point that fired last; of one that is firing, what is there yet."""
        if self.firing is not None and point in (None, self.firing.point):
            return dict(self.firing.metrics)
        return dict(self._last.get(point, {}))

    def flush_steps(self, position: int, step: int) -> dict[str, Any]:
        """Write the buffered metrics of all steps, of all ranks, as lists; return them."""
        flushed: dict[str, Any] = {}
        for point, metrics in self.met.reduce_steps(self.steps.take()).items():
            self._write(metrics, position, point, step)
            flushed |= metrics
        if self.met.last_words:
            self._write({"run/error": self.met.last_words}, position, HookPoint.POST_STEP, step)
            self.met.last_words = ""
        return flushed

    @property
    def has_steps(self) -> bool:
        """True if there is something to flush; with several ranks it is asked of all of them, by the flush itself."""
        return bool(self.steps) or not self.met.is_single

    def flush_rest(self, step: int) -> None:
        """Write what is buffered when no loop says where it belongs: at the position of the last firing."""
        if self.has_steps:
            self.flush_steps(max(step, 0) if self.position is None else self.position, step)

    def emit(self, metrics: Mapping[str, Any], position: int, point: HookPoint, step: int, *, reduced: bool) -> None:
        """Write metrics that are no hook's at once."""
        if not PLAIN.issuperset(map(type, metrics.values())):
            metrics = {name: copy_metric(value, "emit_metrics()", name) for name, value in metrics.items()}
        metrics = to_host(metrics)
        if not reduced:
            metrics = self.met.reduce(metrics, f"metrics of the loop at {point.name}")
        self._write(metrics, position, point, step)
        self.fan_out.warn_pending()

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Tell the sinks which run follows."""
        if "strategy" in context:
            self._strategy = None if context["strategy"] is None else str(context["strategy"])
        self.fan_out.set_run_context(context)
        self.fan_out.warn_pending()

    def _write(self, metrics: Mapping[str, Any], position: int, point: HookPoint, step: int | None) -> None:
        if metrics and not self.fan_out.is_empty:
            number = None if step is None or step < 0 else step
            epoch: int | None = position
            if self._plan.loop_type == "step":
                # The position counts where the user's loop does not; 0 is also that before the first step.
                epoch, number = None, number if number is not None else position or None
            self.fan_out.write(Record(metrics, epoch, point, number, self._strategy, self._rank, time.time()))

    def clear(self) -> None:
        """Drop everything that is not written."""
        self.steps.clear()
        self._last.clear()
        self.position, self.step = None, -1


class StepBuffer:
    """Hold values by point and metric, with their steps; tensors stay on their device."""

    def __init__(self) -> None:
        self._series: dict[HookPoint, dict[str, StepSeries]] = {}

    def add(self, point: HookPoint, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one step."""
        series = self._series.setdefault(point, {})
        for name, value in metrics.items():
            kept = series.get(name)
            if kept is None:
                kept = series[name] = StepSeries()
            kept.append(value)
            kept.steps.append(step)

    def take(self) -> dict[HookPoint, dict[str, StepSeries]]:
        """Return everything, on the host, and empty the buffer."""
        found = self._read()
        self.clear()
        return found

    def _read(self) -> dict[HookPoint, dict[str, StepSeries]]:
        """Return everything, on the host; PRE_STEP before POST_STEP."""
        # One transfer for all points: the values go over as one dictionary of lists.
        lists = {f"{point.name} {name}": list(s) for point, found in self._series.items() for name, s in found.items()}
        host = to_host(lists)
        return {
            point: {name: StepSeries(host[f"{point.name} {name}"], s.steps) for name, s in self._series[point].items()}
            for point in HookPoint
            if point in self._series
        }

    def clear(self) -> None:
        """Empty the buffer."""
        self._series.clear()

    def __bool__(self) -> bool:
        return bool(self._series)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {
            point.name: {name: {"steps": list(series.steps), "values": list(series)} for name, series in found.items()}
            for point, found in self._read().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._series = {
            HookPoint.of(point): {name: StepSeries(kept["values"], kept["steps"]) for name, kept in found.items()}
            for point, found in state.items()
        }


def make_fan_out(sinks: Iterable[Any] | FanOut | None, log: Any, step_log: str | Path | None) -> FanOut:
    """Return the fan-out of what a manager was given."""
    if isinstance(sinks, FanOut):
        if log is not None:
            raise OptionError("log= was given beside a FanOut, which has one or has none; say FanOut(sinks, log=...).")
        out = sinks
    else:
        out = FanOut(() if sinks is None else sinks, log)
    out.keep_streams = kept_rng
    if step_log:
        out.add(JSONLSink(step_log, points="step"))
    return out


# -- values -----------------------------------------------------------------------------------------------------


def add_metrics(hook: str, found: Any, into: dict[str, Any], roots: tuple[str, ...] = ()) -> None:
    """Add what `hook` returned to `into`, as ``"hook/metric"`` or, if a name begins with one of `roots`, as it is.

    Raise for a value that no sink can write.
    """
    if found is None:
        return
    if type(found) is not dict and not isinstance(found, Mapping):
        raise MetricError(f"Hook {hook!r} returned {type_name(found)}; metrics are a dictionary by name, or None.")
    if not _NAMES.issuperset(map(type, found)) and (wrong := [name for name in found if not isinstance(name, str)]):
        raise MetricError(f"Hook {hook!r} returned a metric by the name {wrong[0]!r}; names of metrics are strings.")
    # All or nothing: a bad metric leaves none of its neighbours behind.
    into.update({
        name if roots and name.startswith(roots) else f"{hook}/{name}":
            value if type(value) in PLAIN else copy_metric(value, hook, name)
        for name, value in found.items()
    })  # fmt: skip


def copy_metric(value: Any, hook: str, name: str) -> Any:
    """Return `value` as it is now, with copies of tensors, still on their device.

    ``hook`` is the name of the hook, or of the function (``"record()"``), that the error names.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):  # ranks hold it in parts, or have not added it up
            value = value.full_tensor()
        # A copy: it may be a parameter, a buffer, or a view of one, which the run goes on to change.
        return _checked_tensor(value, hook, name).detach().clone()
    if isinstance(value, Mapping):
        return {_sub_key(key, hook, name): copy_metric(item, hook, name) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [copy_metric(item, hook, name) for item in value]
    if isinstance(value, Real | str):
        return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else str(value)
    if isinstance(value, np.ndarray | np.bool_):
        return copy_metric(value.tolist(), hook, name)
    raise _unwritable(hook, name, type_name(value))


def _unwritable(hook: str, name: str, found: str) -> MetricError:
    who = f"{hook} was given" if hook.endswith("()") else f"Hook {hook!r} returned"
    wanted = "numbers, tensors, strings, and lists or dictionaries of these"
    return MetricError(f"{who} {found} as {name!r}, which no sink can write. It takes {wanted}.")


def _checked_tensor(tensor: Tensor, hook: str, name: str) -> Tensor:
    if tensor.is_complex() or tensor.is_meta:
        raise _unwritable(hook, name, "a complex tensor" if tensor.is_complex() else "a tensor of device 'meta'")
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _sub_key(key: Any, hook: str, name: str) -> str | int | float | bool:
    if isinstance(key, str | int | float | bool):
        return key
    raise _unwritable(hook, name, f"a dictionary with {type_name(key)} as a key")


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with numbers in place of tensors: one transfer per device and dtype."""
    if PLAIN.issuperset(map(type, metrics.values())):
        return dict(metrics)
    waiting: list[Tensor] = []
    _without_tensors(dict(metrics), waiting.append)
    values = (tensor.tolist() for tensor in on_host(waiting))
    found: dict[str, Any] = _without_tensors(dict(metrics), lambda tensor: next(values))
    return found


def _without_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return ``value`` with what ``change`` returns in place of each tensor, in order."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _without_tensors(item, change) for key, item in value.items()}
    return [_without_tensors(item, change) for item in value] if isinstance(value, list) else value
