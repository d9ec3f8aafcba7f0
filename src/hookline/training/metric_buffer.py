"""Where the metrics of hooks go: of single steps into a buffer, of other moments to the sinks at once.

Takes what a `Firing` has collected, remembers what came last, hands a `Record` of it to the fan-out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.errors import OptionError
from hookline.lifecycle.points import HookPoint
from hookline.sinks.fan_out import FanOut
from hookline.sinks.line_file import LineFile, size_of
from hookline.sinks.record import Record, StepSeries, own_rank
from hookline.sinks.sink import MetricSink
from hookline.sinks.strict_json import Clean, dumps
from hookline.training.hook_metrics import PLAIN, on_host, settled

if TYPE_CHECKING:
    from hookline.training.firing import Firing

__all__ = ["Records", "StepLog", "fan_out_of"]


class Records:
    """Where metrics are, and where they go."""

    def __init__(self, out: FanOut) -> None:
        self.out = out
        """The log and the sinks."""
        self.steps = StepBuffer()
        self.strategy: str | None = None
        """Which run this is."""
        self._rank = own_rank()
        self.axis: int | None = None
        """The epoch, or step, of the last firing: where buffered metrics belong that nobody has flushed."""
        self._last: dict[HookPoint, dict[str, Any]] = {}
        self._last_point: HookPoint | None = None

    def take(self, firing: Firing, axis: int, step: int) -> dict[str, Any]:
        """The metrics of a firing: kept until the next flush, or handed out at once."""
        metrics = firing.metrics
        if metrics and firing.point.is_step:
            self.steps.add(firing.point, firing.step, metrics)
        elif metrics:
            metrics = on_host(metrics)
            if not self.out.is_empty:
                # A loop of one's own that does not count steps may say in the context which one it is.
                told = step if step >= 0 or firing.ctx.step is None else firing.ctx.step
                self._hand_out(metrics, axis, firing.point, told)
        self._last[firing.point] = metrics
        self._last_point = firing.point
        self.axis = axis
        return metrics

    def flush_steps(self, epoch: int, step: int) -> dict[str, Any]:
        """The metrics of all steps since the last time go out, as lists."""
        flushed: dict[str, Any] = {}
        for point, metrics in self.steps.take().items():
            self._hand_out(metrics, epoch, point, step)
            flushed |= metrics
        return flushed

    def emit(self, metrics: Mapping[str, Any], axis: int, point: HookPoint, step: int) -> None:
        """Metrics that are no hook's go out at once."""
        if not PLAIN.issuperset(map(type, metrics.values())):
            metrics = {name: settled(value, "emit_metrics()", name) for name, value in metrics.items()}
        self._hand_out(on_host(metrics), axis, point, step)
        self.out.tell()

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Another run begins, perhaps; the sinks are told."""
        if "strategy" in context:
            self.strategy = None if context["strategy"] is None else str(context["strategy"])
        self.out.set_run_context(context)
        self.out.tell()

    def _hand_out(self, metrics: Mapping[str, Any], axis: int, point: HookPoint, step: int) -> None:
        if metrics and not self.out.is_empty:
            self.out.write(
                Record(metrics, axis, point, step if step >= 0 else None, self.strategy, self._rank, time.time())
            )

    def last(self, point: HookPoint | None, firing: Firing | None) -> dict[str, Any]:
        """What was returned last at a point; None is the one that is firing, else the one that fired last."""
        if firing is not None and (point is None or point is firing.point):
            return dict(firing.metrics)
        wanted = self._last_point if point is None else point
        return {} if wanted is None else dict(self._last.get(wanted, {}))

    def clear(self) -> None:
        """Forget everything that has not gone out."""
        self.steps.clear()
        self._last.clear()
        self._last_point = self.axis = None


class StepBuffer:
    """Values by point and metric, with their steps, tensors still on their device."""

    def __init__(self) -> None:
        self._series: dict[HookPoint, dict[str, StepSeries]] = {}

    def add(self, point: HookPoint, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of one step."""
        series = self._series.setdefault(point, {})
        for name, value in metrics.items():
            kept = series.get(name)
            if kept is None:
                kept = series[name] = StepSeries()
            kept.append(value)
            kept.steps.append(step)

    def take(self) -> dict[HookPoint, dict[str, StepSeries]]:
        """Everything, on the host; nothing is left."""
        found = self.read()
        self.clear()
        return found

    def read(self) -> dict[HookPoint, dict[str, StepSeries]]:
        """Everything, on the host; PRE_STEP before POST_STEP."""
        # One transfer for all points: the values go over as one dictionary of lists.
        lists = {f"{point.name} {name}": list(s) for point, found in self._series.items() for name, s in found.items()}
        host = on_host(lists)
        return {
            point: {name: StepSeries(host[f"{point.name} {name}"], s.steps) for name, s in self._series[point].items()}
            for point in HookPoint
            if point in self._series
        }

    def clear(self) -> None:
        """Forget everything."""
        self._series.clear()

    def __bool__(self) -> bool:
        return bool(self._series)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {
            point.name: {name: {"steps": list(series.steps), "values": list(series)} for name, series in found.items()}
            for point, found in self.read().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._series = {
            HookPoint.of(point): {name: StepSeries(kept["values"], kept["steps"]) for name, kept in found.items()}
            for point, found in state.items()
        }


def fan_out_of(sinks: Iterable[Any] | FanOut | None, log: Any, step_log: str | Path | None) -> FanOut:
    """What a manager was given, as one."""
    if isinstance(sinks, FanOut):
        if log is not None:
            raise OptionError("log= was given beside a FanOut, which has one or has none; say FanOut(sinks, log=...).")
        out = sinks
    else:
        out = FanOut(() if sinks is None else sinks, log)
    if step_log:
        out.add(StepLog(step_log))
    return out


class StepLog(MetricSink):
    """Appends ``{"epoch": …, "hook_point": …, "steps": {metric: […]}, metric: […]}`` to a file, a line per flush."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: LineFile | None = None

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Write a line, if these are metrics of steps."""
        if not isinstance(hook_point, HookPoint) or not hook_point.is_step or not metrics:
            return
        steps = {name: getattr(series, "steps", None) for name, series in metrics.items()}
        record = {"epoch": epoch, "hook_point": hook_point.name, "steps": steps, **metrics}
        if self._file is None:
            self._file = LineFile(self.path)
        self._file.write(dumps(Clean().mapping(record)) + b"\n")

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """How much is written."""
        return {"bytes": size_of(self.path) if self._file is None else self._file.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off what was written later."""
        if state:
            self._file = self._file or LineFile(self.path)
            self._file.cut(int(state["bytes"]))
