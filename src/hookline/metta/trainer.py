"""Train a policy and report its trackers at the end of each epoch.

`TrainTool` makes a `Trainer` and gives its ``context`` to the builders of hooks; `StatsReporter` reports it. Without a
policy or data, an example is made here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hookline.errors import OptionError
from hookline.metta.components import ComponentContext, PolicyAutoBuilder
from hookline.metta.stats_reporter import StatsReporter
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer
from hookline.sites.wrappers import clean_modules
from hookline.tables import Table, number_text
from hookline.training.experiment import Experiment
from hookline.training.loops import epoch_loop

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.lifecycle.manager import HookManager
    from hookline.training.loops import LoopResult

__all__ = ["Trainer", "example_data", "example_policy"]

_BATCH_SIZE: Final = 32
_LEARNING_RATE: Final = 1e-3
_ROWS: Final = 256
_NEXT: Final = "Give TrainTool data=, batches or a Dataset."


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
        epochs = range(len(self.metrics))
        rows = [(name, *(number_text(metrics.get(name, "")) for metrics in self.metrics)) for name in names]
        header = ("metric", *(f"epoch {epoch}" for epoch in epochs))
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


def _loader(data: Any) -> Iterable[Any]:
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=_BATCH_SIZE, shuffle=not isinstance(data, torch.utils.data.IterableDataset))
    loader: Iterable[Any] = data
    return loader


def _optimizer(policy: nn.Module, given: Any) -> Optimizer:
    if isinstance(unwrap_optimizer(given), torch.optim.Optimizer):
        wrapped: Optimizer = given
        return wrapped
    return torch.optim.AdamW(policy.parameters(), lr=_LEARNING_RATE) if given is None else given(policy.parameters())


# -- for a TrainTool that was given neither policy nor data: something to try hooks on --------------------------


def example_policy() -> PolicyAutoBuilder:
    """Return an actor and its critic, by the names of Metta's example."""
    actor = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
    critic = nn.Sequential(nn.Linear(16, 1), nn.Tanh())
    return PolicyAutoBuilder(OrderedDict(actor_mlp=actor, critic_head=critic))


def example_data(policy: nn.Module) -> TensorDataset:
    """Return random rows as wide as the first layer of ``policy``, with the sign of their sum as the target."""
    first = next((module for _, module in clean_modules(policy) if isinstance(module, nn.Linear)), None)
    if first is None:
        raise OptionError(f"There is no data= to train on, and none can be made up without a Linear layer. {_NEXT}")
    x = torch.randn(_ROWS, first.in_features, generator=torch.Generator().manual_seed(0)).to(first.weight)
    target = x.detach().sum(1).sign()
    output = _output(policy, x)
    return TensorDataset(x.cpu(), target.reshape(-1, *[1] * (output.dim() - 1)).expand_as(output).cpu())


def _output(policy: nn.Module, x: Tensor) -> Tensor:
    modes = [(module, module.training) for module in policy.modules()]
    try:
        with torch.no_grad():
            output = policy.eval()(x)
    except Exception as error:
        raise OptionError(
            f"There is no data= to train on, and the policy does not take random rows. {_NEXT}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != len(x):
        raise OptionError(f"There is no data= to train on, and the policy does not give a row for each row. {_NEXT}")
    return output
