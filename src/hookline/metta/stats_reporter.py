"""Report what the trackers have counted at the end of an epoch, and reset them.

`Trainer` calls it, or your own loop. It reads the trackers of a `ComponentContext` and gives one dictionary of metrics
to sinks and to the caller.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from hookline.metta.builders import TRACKERS
from hookline.metta.component_tracker import ComponentTracker
from hookline.metta.weight_stats import compute_dead_neuron_stats

if TYPE_CHECKING:
    from torch import nn

    from hookline.metta.components import ComponentContext

__all__ = ["StatsReporter"]

logger = logging.getLogger(__name__)


class _Sink(Protocol):
    def emit(self, metrics: Any, epoch: int, hook_point: Any) -> None: ...


class StatsReporter:
    """Collect the metrics of every tracker at the end of an epoch.

    Recipe::

        reporter = hookline.metta.StatsReporter(trainer.context, policy=policy, sinks=[hookline.sinks.MemorySink()])
        for epoch in range(10):
            train_one_epoch()
            metrics = reporter.on_epoch_end(epoch)

    Args:
        context: Where the trackers are.
        policy: A model whose dead neurons (`compute_dead_neuron_stats`) are to be reported as well.
        sinks: Where the metrics go; anything with ``emit(metrics, epoch, hook_point)``.
    """

    def __init__(
        self, context: ComponentContext, *, policy: nn.Module | None = None, sinks: Iterable[_Sink] = ()
    ) -> None:
        self.context = context
        self.policy = policy
        self.sinks = list(sinks)
        self._epoch = -1
        self._logged: set[tuple[str, str]] = set()
        """Which tracker's failure, and in what, has been logged."""

    def on_epoch_end(self, epoch: int | None = None) -> dict[str, float]:
        """Collect, emit and reset; return the metrics.

        The order is: dead neurons, ReLU, Fisher, tanh, sigmoid, gradient flow, ReLU gradient flow, then whatever else
        in the context has ``to_metrics()`` and ``reset()``. Something else under the key of a tracker is passed over.

        Trackers are reset when every sink has had its turn. A tracker that raises is logged, once, and the others go
        on; one that could not be collected is not reset. A sink that raises is logged, and the others get theirs.

        Of a component that passes came through and that has given its tracker nothing, one warning says why.

        Args:
            epoch: Its number; one more than the last if left out.
        """
        self._epoch = self._epoch + 1 if epoch is None else epoch
        metrics: dict[str, float] = {}
        if self.policy is not None:
            metrics |= self._collect("policy", functools.partial(compute_dead_neuron_stats, self.policy)) or {}
        collected = []
        for key, tracker in list(self._trackers()):
            if isinstance(tracker, ComponentTracker):
                tracker.warn_if_silent()
            found = self._collect(key, tracker.to_metrics)
            if found is not None:
                metrics |= found
                collected.append((key, tracker))
        for sink in self.sinks:
            self._emit(sink, metrics)
        for key, tracker in collected:
            self._reset(key, tracker)
        return metrics

    def _trackers(self) -> Iterator[tuple[str, Any]]:
        states = self.context.model_metrics
        for key, kind in TRACKERS.items():
            if isinstance(states.get(key), kind):
                yield key, states[key]
        for key, state in states.items():
            if key not in TRACKERS and callable(getattr(state, "to_metrics", None)) and hasattr(state, "reset"):
                yield key, state

    def _collect(self, key: str, ask: Callable[[], dict[str, float]]) -> dict[str, float] | None:
        try:
            return dict(ask())
        except Exception:
            self._log_once(key, "could not be read")
            return None

    def _reset(self, key: str, tracker: Any) -> None:
        try:
            tracker.reset()
        except Exception:
            self._log_once(key, "could not be reset")

    def _log_once(self, key: str, what: str) -> None:
        # What fails at the end of one epoch fails at the end of all of them.
        if (key, what) not in self._logged:
            self._logged.add((key, what))
            logger.exception("%r %s at the end of epoch %d; the others go on", key, what, self._epoch)

    def _emit(self, sink: _Sink, metrics: dict[str, float]) -> None:
        """Emit ``metrics`` to one sink; log what it raises."""
        try:
            sink.emit(dict(metrics), self._epoch, _POST_EPOCH)
        except Exception:
            logger.exception("%s could not take the metrics of epoch %d", type(sink).__name__, self._epoch)


_POST_EPOCH = "POST_EPOCH"
