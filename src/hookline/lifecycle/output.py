"""Take the metrics of hooks from a firing to the sinks: those of steps through a buffer, others at once.

`FiringEngine` and `HookManager` hand metrics over, `record` adds single ones; the fan-out of the sinks writes them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import LifecycleError, MetricError, OptionError, RankError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.hook_metrics import PLAIN, copy_metric, to_host
from hookline.records.readers import FanOut, own_rank
from hookline.records.sink import Record, StepSeries
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.firing import Firing
    from hookline.lifecycle.rank_sync import RankSync

__all__ = ["RECORDER", "MetricOutput", "make_fan_out", "record"]


_LAST: Final = HookPoint.POST_STEP
"""The point of a record about the end of a run."""


class _Recorder:
    # Of the process, not of a thread: on CUDA, gradient hooks run in a thread of autograd's.
    __slots__ = ("manager",)

    def __init__(self) -> None:
        self.manager: weakref.ref[Any] | None = None


RECORDER: Final = _Recorder()
"""Has the ``manager`` whose ``take_record`` is called by `record`: who sets one puts back the one before."""


def record(name: str, value: Any) -> None:
    """Add a metric to the current record.

    Recipe::

        def hook(module, inputs, output):
            hookline.record("largest", output.detach().abs().amax())

    Inside a hook of a manager it is one more of that hook's metrics, ``"hook/name"``. Elsewhere, in a hook of a module
    say, it is a metric ``name`` of the current step of the manager whose ``advance_step()`` was called last. Tensors
    stay on their device until the step metrics are flushed.
    """
    manager = None if RECORDER.manager is None else RECORDER.manager()
    if manager is None:
        raise LifecycleError(
            f"record({name!r}, ...) has no record to join: no manager is in a step. Call manager.advance_step() at the "
            "start of each step."
        )
    if not isinstance(name, str):
        raise MetricError(f"record() was given the name {name!r}; names of metrics are strings.")
    manager.take_record(name, value)


class MetricOutput:
    """Hand metrics to the log and the sinks; remember what each point returned last."""

    def __init__(self, fan_out: FanOut) -> None:
        self.fan_out = fan_out
        self.steps = StepBuffer()
        self._strategy: str | None = None
        self._rank = own_rank()
        self.counts_steps = False
        """Whether positions are steps, so that records have no epoch."""
        self.position: int | None = None
        """The epoch, or step, of the last firing: buffered metrics belong there if no loop flushes them."""
        self._last: dict[HookPoint, dict[str, Any]] = {}
        self._last_point: HookPoint | None = None
        self.ranks: RankSync | None = None
        """Makes one record of those of all ranks; None in one process."""
        self._flushed_to = -1

    def take(self, firing: Firing, position: int, step: int) -> dict[str, Any]:
        """Buffer the metrics of a firing at a step, or write those of another point; return them."""
        metrics, point = firing.metrics, firing.hooks.point
        if firing.hooks.is_step:
            if metrics:
                self.steps.add(point, firing.step, metrics)  # ranks exchange them when they are flushed
        elif metrics or self.ranks is not None:
            metrics = to_host(metrics)
            if self.ranks is not None:
                metrics = self._of_all_ranks(metrics, firing, self.ranks)
            # A user's own loop that does not count steps may say in the context which one it is.
            self._write(metrics, position, point, step if step >= 0 else firing.ctx.step)
        self._last[point] = metrics
        self._last_point = point
        self.position = position
        return metrics

    @staticmethod
    def _of_all_ranks(metrics: dict[str, Any], firing: Firing, ranks: RankSync) -> dict[str, Any]:
        """Return the metrics of all ranks; an error names the hooks, one of which may have kept a rank from coming."""
        try:
            return ranks.reduce(metrics, f"metrics at {firing.point.name}")
        except RankError as error:
            names = ", ".join(planned.name for planned, *_ in firing.done)
            text = f"{error} The hooks at {firing.point.name}, step {firing.step}: {names}."
            raise RankError(text, ranks=error.ranks) from error

    def flush_steps(self, position: int, step: int) -> dict[str, Any]:
        """Write the buffered metrics of all steps, as lists; return them."""
        flushed: dict[str, Any] = {}
        taken: Mapping[HookPoint, Mapping[str, StepSeries]] = self.steps.take()
        if self.ranks is not None:
            first, self._flushed_to = self._flushed_to + 1, step
            taken = self.ranks.reduce_steps(taken, first)
            if self.ranks.alone:
                self.note(self.ranks.alone, step)
                self.ranks.alone = ""
        for point, metrics in taken.items():
            self._write(metrics, position, point, step)
            flushed |= metrics
        return flushed

    @property
    def has_steps(self) -> bool:
        """True if there is something to flush; with several ranks it is asked of all of them, by the flush itself."""
        return bool(self.steps) or self.ranks is not None

    def flush_rest(self, step: int) -> None:
        """Write what is buffered when no loop says where it belongs: at the position of the last firing."""
        if self.has_steps:
            self.flush_steps(max(step, 0) if self.position is None else self.position, step)

    def emit(
        self, metrics: Mapping[str, Any], position: int, point: HookPoint, step: int, *, reduced: bool = False
    ) -> None:
        """Write metrics that are no hook's at once."""
        if not PLAIN.issuperset(map(type, metrics.values())):
            metrics = {name: copy_metric(value, "emit_metrics()", name) for name, value in metrics.items()}
        metrics = to_host(metrics)
        if self.ranks is not None and not reduced:
            metrics = self.ranks.reduce(metrics, f"metrics of the loop at {point.name}")
        self._write(metrics, position, point, step)
        self.fan_out.warn_pending()

    def note(self, text: str, step: int) -> None:
        """Write at once, without the other ranks, that something ended the run: ``run/error``."""
        self._write({"run/error": text}, max(step, 0) if self.position is None else self.position, _LAST, step)

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
            if self.counts_steps:
                # The position counts where the user's loop does not; 0 is also that before the first step.
                epoch, number = None, number if number is not None else position or None
            self.fan_out.write(Record(metrics, epoch, point, number, self._strategy, self._rank, time.time()))

    def last(self, point: HookPoint | None, firing: Firing | None) -> dict[str, Any]:
        """Return the last metrics of `point`; None: of the point that is firing, else of the one that fired last."""
        if firing is not None and (point is None or point is firing.point):
            return dict(firing.metrics)
        wanted = self._last_point if point is None else point
        return {} if wanted is None else dict(self._last.get(wanted, {}))

    def clear(self) -> None:
        """Drop everything that is not written."""
        self.steps.clear()
        self._last.clear()
        self._last_point = self.position = None


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
