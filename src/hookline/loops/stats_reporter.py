"""The end of an epoch: what the trackers have counted goes out, and they start anew.

Takes trackers from a `ComponentContext`, hands one dictionary of metrics to sinks and to whoever asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from hookline.hooks.builders import TRACKERS
from hookline.observe.trackers.weights import compute_dead_neuron_stats

if TYPE_CHECKING:
    from torch import nn

    from hookline.hooks.components import ComponentContext

__all__ = ["StatsReporter"]

logger = logging.getLogger(__name__)


class _Sink(Protocol):
    def emit(self, metrics: Any, epoch: int, hook_point: Any) -> None: ...


class StatsReporter:
    """Collects the metrics of every tracker at the end of an epoch.

    Recipe::

        reporter = hookline.StatsReporter(trainer.context, policy=policy, sinks=[hookline.MemorySink()])
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

    def on_epoch_end(self, epoch: int | None = None) -> dict[str, float]:
        """Collect, reset and hand on; the metrics.

        The order is: dead neurons, ReLU, Fisher, tanh, sigmoid, gradient flow, ReLU gradient flow, then whatever else
        in the context has ``to_metrics()`` and ``reset()``. Something else under the key of a tracker is passed over.
        If a tracker raises, none is reset; a sink that raises is logged, and the others get theirs.

        Args:
            epoch: Its number; one more than the last if left out.
        """
        self._epoch = self._epoch + 1 if epoch is None else epoch
        metrics = {} if self.policy is None else compute_dead_neuron_stats(self.policy)
        trackers = list(self._trackers())
        for tracker in trackers:
            metrics |= tracker.to_metrics()
        for tracker in trackers:
            tracker.reset()
        for sink in self.sinks:
            self._hand_to(sink, metrics)
        return metrics

    def _trackers(self) -> Iterator[Any]:
        states = self.context.model_metrics
        for key, kind in TRACKERS.items():
            if isinstance(states.get(key), kind):
                yield states[key]
        for key, state in states.items():
            if key not in TRACKERS and callable(getattr(state, "to_metrics", None)) and hasattr(state, "reset"):
                yield state

    def _hand_to(self, sink: _Sink, metrics: dict[str, float]) -> None:
        try:
            sink.emit(dict(metrics), self._epoch, _POST_EPOCH)
        except Exception:
            logger.exception("%s could not take the metrics of epoch %d", type(sink).__name__, self._epoch)


_POST_EPOCH = "POST_EPOCH"
