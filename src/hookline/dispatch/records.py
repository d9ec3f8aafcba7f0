"""Where the metrics of hooks go: of single steps into a buffer, of other moments to the sinks at once.

Takes what a `Firing` has collected, remembers what came last, hands each sink a dictionary of its own.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.dispatch.metrics import on_host, settled
from hookline.errors import HooklineWarning, OptionError
from hookline.lifecycle.point import HookPoint
from hookline.sinks.record import StepSeries
from hookline.sinks.sink import MetricSink
from hookline.sites.receipt import outside
from hookline.sites.signature import a_or_an

if TYPE_CHECKING:
    from hookline.dispatch.firing import Firing

__all__ = ["Records", "StepLog"]

logger = logging.getLogger(__name__)


class Records:
    """Where metrics are, and where they go."""

    def __init__(self, sinks: Iterable[Any] | None, step_log: str | Path | None) -> None:
        if callable(getattr(sinks, "emit", None)):
            raise OptionError(f"sinks= takes a list of sinks; put {a_or_an(sinks)} into one.")
        self.outlets = Outlets([*(sinks or ()), *([StepLog(step_log)] if step_log else ())])
        self.steps = StepBuffer()
        self.axis: int | None = None
        """The epoch, or step, of the last firing: where buffered metrics belong that nobody has flushed."""
        self._last: dict[HookPoint, dict[str, Any]] = {}
        self._last_point: HookPoint | None = None

    def take(self, firing: Firing, axis: int) -> dict[str, Any]:
        """The metrics of a firing: kept until the next flush, or handed out at once."""
        metrics = firing.metrics
        if metrics and firing.point.is_step:
            self.steps.add(firing.point, firing.step, metrics)
        elif metrics:
            metrics = on_host(metrics)
            self.outlets.emit(metrics, axis, firing.point)
        self._last[firing.point] = metrics
        self._last_point = firing.point
        self.axis = axis
        return metrics

    def flush_steps(self, epoch: int) -> dict[str, Any]:
        """The metrics of all steps since the last time go out, as lists."""
        flushed: dict[str, Any] = {}
        for point, metrics in self.steps.take().items():
            self.outlets.emit(metrics, epoch, point)
            flushed |= metrics
        return flushed

    def emit(self, metrics: Mapping[str, Any], step: int, point: HookPoint) -> None:
        """Metrics that are no hook's go out at once."""
        fit = {name: settled(value, "emit_metrics()", name) for name, value in metrics.items()}
        self.outlets.emit(on_host(fit), step, point)
        self.outlets.tell()

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


class Outlets:
    """Sinks, each by itself."""

    def __init__(self, sinks: Iterable[Any]) -> None:
        self.sinks = list(sinks)
        for sink in self.sinks:
            if not callable(getattr(sink, "emit", None)) or isinstance(sink, type):
                raise OptionError(
                    f"sinks= takes objects with emit(metrics, epoch, hook_point), such as MemorySink(); got "
                    f"{a_or_an(sink)}."
                )
        self.errors: Counter[str] = Counter()
        """How often each sink has failed, by its class, and its place among those of one class."""
        self._names = _names(self.sinks)
        self._untold: list[str] = []

    def emit(self, metrics: Mapping[str, Any], epoch: int, point: Any) -> None:
        """Hand the metrics to every sink, in a dictionary of its own, unless there are none."""
        if metrics and self.sinks:
            self._each("take metrics", lambda sink: sink.emit(dict(metrics), epoch, point))

    def set_run_context(self, context: Mapping[str, Any]) -> None:
        """Tell every sink that wants to know."""
        self._each("begin another run", lambda sink: _call(sink, "set_run_context", **context))

    def flush(self) -> None:
        """Have every sink write what it holds back."""
        self._each("flush", lambda sink: _call(sink, "flush"))

    def _each(self, what: str, act: Callable[[Any], None]) -> None:
        for name, sink in zip(self._names, self.sinks, strict=True):
            try:
                act(sink)
            except Exception as error:
                self._note(name, what, error)

    def _note(self, name: str, what: str, error: Exception) -> None:
        self.errors[name] += 1
        if self.errors[name] == 1:
            logger.exception("%s could not %s; the run goes on", name, what)
            self._untold.append(
                f"{name} could not {what} ({type(error).__name__}: {error}); the run and the other sinks go on. "
                "Further failures are counted in manager.sink_errors."
            )

    def tell(self) -> None:
        """Warn of what failed for the first time; when all sinks have had their turn, as a warning may raise."""
        while self._untold:
            warnings.warn(self._untold.pop(0), HooklineWarning, stacklevel=outside())


def _names(sinks: Iterable[Any]) -> list[str]:
    count: Counter[str] = Counter()
    names = []
    for sink in sinks:
        name = type(sink).__name__
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name} {count[name]}")
    return names


def _call(sink: Any, method: str, **arguments: Any) -> None:
    if hasattr(sink, method):
        getattr(sink, method)(**arguments)


class StepLog(MetricSink):
    """Appends ``{"epoch": …, "hook_point": …, "steps": {metric: […]}, metric: […]}`` to a file, a line per flush."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Write a line, if these are metrics of steps."""
        if not isinstance(hook_point, HookPoint) or not hook_point.is_step or not metrics:
            return
        steps = {name: getattr(series, "steps", None) for name, series in metrics.items()}
        record = {"epoch": epoch, "hook_point": hook_point.name, "steps": steps, **metrics}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
