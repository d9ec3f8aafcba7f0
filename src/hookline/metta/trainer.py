"""Train a policy, report its trackers at the end of each epoch, and reset them.

`TrainTool` makes a `Trainer` and gives its ``context`` to the builders of hooks. `StatsReporter` reads the trackers of
that context, and gives one dictionary of metrics to sinks and to the caller; your own loop may call it too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hookline.metta.builders import TRACKERS
from hookline.metta.components import ComponentContext
from hookline.metta.trackers import ComponentTracker
from hookline.metta.weights import compute_dead_neuron_stats
from hookline.sites.optimizers import unwrap_optimizer
from hookline.tables import Table, number_text
from hookline.training.experiment import Experiment
from hookline.training.loops import epoch_loop

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.lifecycle.manager import HookManager
    from hookline.training.loops import LoopResult

__all__ = ["StatsReporter", "Trainer"]

_BATCH_SIZE: Final = 32
_LEARNING_RATE: Final = 1e-3
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
        self.context, self.policy, self.sinks = context, policy, list(sinks)
        self._epoch = -1
        self._logged: set[str] = set()

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
            metrics |= self._try("'policy' could not be read", compute_dead_neuron_stats, self.policy) or {}
        collected = {}
        for key, tracker in list(self._trackers()):
            if isinstance(tracker, ComponentTracker):
                tracker.warn_if_silent()
            found = self._try(f"{key!r} could not be read", tracker.to_metrics)
            if found is not None:
                metrics |= found
                collected[key] = tracker
        for sink in self.sinks:
            try:
                sink.emit(dict(metrics), self._epoch, "POST_EPOCH")
            except Exception:
                logger.exception("%s could not take the metrics of epoch %d", type(sink).__name__, self._epoch)
        for key, tracker in collected.items():
            self._try(f"{key!r} could not be reset", tracker.reset)
        return metrics

    def _trackers(self) -> Iterator[tuple[str, Any]]:
        states = self.context.model_metrics
        for key, kind in TRACKERS.items():
            if isinstance(states.get(key), kind):
                yield key, states[key]
        for key, state in states.items():
            if key not in TRACKERS and callable(getattr(state, "to_metrics", None)) and hasattr(state, "reset"):
                yield key, state

    def _try(self, failure: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call ``call``; log what it raises, once: what fails at the end of one epoch fails at the end of all."""
        try:
            return call(*args)
        except Exception:
            if failure not in self._logged:
                self._logged.add(failure)
                logger.exception("%s at the end of epoch %d; the others go on", failure, self._epoch)
            return None


class Trainer(Experiment):
    """Train an experiment with component trackers.

    Recipe::

        trainer = hookline.metta.Trainer(policy, data, loss, sinks=[hookline.sinks.MemorySink()])
        hook = hookline.metta.attach_relu_activation_hooks()("actor_mlp", trainer.context)
        with policy.register_component_hook_rule(component_name="actor_mlp", hook=hook):
            trainer.train(epochs=3)
        trainer.metrics  # of each epoch

    Args:
        policy: The model.
        data: Batches, or a `Dataset`, which is shuffled and cut into batches of 32.
        loss: ``loss(policy, batch)``; if left out, the usual one for such a batch.
        optimizer: One for the policy's parameters, or what makes one of them; AdamW if left out.
        sinks: Where the metrics of trackers go, epoch by epoch.
        on_epoch_end: Called after the trackers have been reported.
        others: As for `Experiment`.
    """

    def __init__(
        self,
        policy: nn.Module,
        data: Iterable[Any] | Dataset[Any],
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        *,
        optimizer: Optimizer | Callable[[Iterable[Tensor]], Optimizer] | None = None,
        sinks: Iterable[Any] = (),
        on_epoch_end: Callable[[int, Mapping[str, Any]], None] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(policy, _optimizer(policy, optimizer), _loader(data), loss, **others)
        self.context = ComponentContext()
        """What builders of hooks are given; the trackers are in ``context.model_metrics``."""
        self.reporter = StatsReporter(self.context, policy=policy, sinks=sinks)
        self.metrics: list[dict[str, float]] = []
        """What trackers had counted at the end of each epoch."""
        self._extra_on_epoch_end = on_epoch_end
        self.result: LoopResult | None = None
        """What the training came to."""

    def __repr__(self) -> str:
        trained = f"; epochs trained: {len(self.metrics)}, see .metrics and .result" if self.metrics else ""
        return f"{super().__repr__()[:-1]}{trained}>"

    def _repr_html_(self) -> str:
        names = dict.fromkeys(name for metrics in self.metrics for name in metrics)
        rows = [(name, *(number_text(metrics.get(name, "")) for metrics in self.metrics)) for name in names]
        header = ("metric", *(f"epoch {epoch}" for epoch in range(len(self.metrics))))
        return Table(header, rows, numbers=range(1, len(header)), title=repr(self)[1:-1]).html()

    @property
    def policy(self) -> nn.Module:
        """Return the model."""
        return self.model

    def train(self, epochs: int = 1, manager: HookManager | None = None, **options: Any) -> LoopResult:
        """Train for ``epochs`` epochs; ``options`` are those of `epoch_loop`, ``progress=True`` among them."""
        self.result = epoch_loop(self, epochs=epochs, manager=manager, **options)
        return self.result

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Report and reset the trackers."""
        self.metrics.append(self.reporter.on_epoch_end(epoch))
        if self._extra_on_epoch_end is not None:
            self._extra_on_epoch_end(epoch, metrics)


def _loader(data: Any) -> Any:
    if not isinstance(data, Dataset):
        return data
    return DataLoader(data, batch_size=_BATCH_SIZE, shuffle=not isinstance(data, torch.utils.data.IterableDataset))


def _optimizer(policy: nn.Module, given: Any) -> Any:
    if isinstance(unwrap_optimizer(given), torch.optim.Optimizer):
        return given
    return torch.optim.AdamW(policy.parameters(), lr=_LEARNING_RATE) if given is None else given(policy.parameters())
