"""Train a policy with the hooks that builders make, report their trackers at the end of each epoch, and reset them.

The user calls `TrainTool`, which stores builders by component name, attaches the hooks when there
is a policy, and removes them at the end. It makes a `Trainer` and gives its ``context`` to the builders.
`StatsReporter` reads the trackers of that context, and gives one dictionary of metrics to sinks and to the caller.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.errors import HooklineWarning, OptionError
from hookline.messages import caller_stacklevel, type_name
from hookline.metta.builders import TRACKERS, ComponentContext, PolicyAutoBuilder, TrackerFeeder
from hookline.metta.trackers import as_number, check_activation
from hookline.observe.host_values import fetch
from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules, unwrap
from hookline.training.experiment import Experiment
from hookline.training.loops import epoch_loop

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from hookline.lifecycle.manager import HookManager
    from hookline.metta.builders import BackwardHookBuilder, HookBuilder
    from hookline.training.loops import LoopResult


def compute_dead_neuron_stats(policy: nn.Module, threshold: float = 1e-6) -> dict[str, float]:
    """Return the share of neurons of linear layers whose weights are all but zero.

    Recipe::

        hookline.metta.compute_dead_neuron_stats(model)["weights/dead_neurons/fraction"]

    A neuron is a row of an ``nn.Linear``; it is dead if the mean of its absolute weights is below the threshold. NaN
    and infinite weights count as zero.

    Args:
        policy: Any model; names are without the prefixes of wrappers.
        threshold: Above which a row is alive.

    Returns:
        ``weights/dead_neurons/{layer}`` (the fraction by layer, "/" for each dot of its name, ``root`` if the model is
        the layer) and ``…/total_neurons``, ``…/dead_neurons``, ``…/fraction``, ``…/active_fraction``; nothing if there
        is no linear layer.
    """
    _check_threshold("threshold", threshold)

    def is_dead(layer: nn.Linear) -> Tensor:
        weight: Tensor = _torch.local_tensor(layer.weight)
        return weight.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().mean(1) < threshold  # (units,)

    return _neuron_shares(policy, is_dead, "weights/dead_neurons", "weights/dead_neurons", "dead_neurons")


def compute_saturated_activation_stats(
    policy: nn.Module, activation: str, derivative_threshold: float = 1e-3
) -> dict[str, float]:
    """Return the share of neurons of linear layers that would be saturated if their input were zero.

    Recipe::

        hookline.metta.compute_saturated_activation_stats(model, "tanh")["activations/tanh/saturation/fraction"]

    A neuron is saturated if the derivative of the activation at its bias is below the threshold; without a bias, it is
    taken at zero.

    Args:
        policy: Any model; names are without the prefixes of wrappers.
        activation: ``"tanh"`` or ``"sigmoid"``.
        derivative_threshold: Below which a neuron is saturated.

    Returns:
        ``activations/{activation}/saturated_fraction/{layer}``, and under ``activations/{activation}/saturation`` the
        ``total_neurons``, ``saturated_neurons``, ``fraction`` and ``active_fraction``; nothing if there is no linear
        layer. `SaturatedActivationState` uses the same names for what it has counted: keep them apart.
    """
    check_activation(activation)
    _check_threshold("derivative_threshold", derivative_threshold)
    prefix = f"activations/{activation}"

    def is_saturated(layer: nn.Linear) -> Tensor:
        bias: Any = torch.zeros(layer.out_features) if layer.bias is None else _torch.local_tensor(layer.bias)
        x = bias.float()
        slope = 1 - x.tanh().square() if activation == "tanh" else x.sigmoid() * (1 - x.sigmoid())
        return cast("Tensor", slope < derivative_threshold)

    return _neuron_shares(
        policy, is_saturated, f"{prefix}/saturated_fraction", f"{prefix}/saturation", "saturated_neurons"
    )


@torch.no_grad()
def _neuron_shares(
    policy: nn.Module, marks: Callable[[nn.Linear], Tensor], by_layer: str, altogether: str, noun: str
) -> dict[str, float]:
    """Return the share of marked neurons in each linear layer and over all, by names that begin with these."""
    marked = {
        name.replace(".", "/") or "root": marks(layer)
        for name, layer in clean_modules(policy)
        if isinstance(layer, nn.Linear) and not is_lazy(layer.weight) and layer.weight.numel()
    }
    if not marked:
        return {}
    counts = {name: count for name, (count,) in zip(marked, fetch(m.sum() for m in marked.values()), strict=True)}
    metrics = {f"{by_layer}/{name}": count / marked[name].numel() for name, count in counts.items()}
    hits, total = sum(counts.values()), sum(mark.numel() for mark in marked.values())
    metrics |= {f"{altogether}/total_neurons": float(total), f"{altogether}/{noun}": float(hits)}
    return metrics | {f"{altogether}/fraction": hits / total, f"{altogether}/active_fraction": 1.0 - hits / total}


def _check_threshold(name: str, value: float) -> None:
    if not as_number(value) > 0:
        raise OptionError(f"{name}= must be a number above 0, got {value!r}.")


# -- the trainer ------------------------------------------------------------------------------------------------------

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

    def on_epoch_end(self, epoch: int | None = None) -> dict[str, float]:
        """Collect, emit and reset; return the metrics.

        The order is: dead neurons, ReLU, Fisher, tanh, sigmoid, gradient flow, ReLU gradient flow, then whatever else
        in the context has ``to_metrics()`` and ``reset()``. Something else under the key of a tracker is passed over.

        Trackers are reset when every sink has had its turn. A sink that raises is logged, and the others get theirs.

        Args:
            epoch: Its number; one more than the last if left out.
        """
        self._epoch = self._epoch + 1 if epoch is None else epoch
        trackers = list(self._trackers())
        metrics = {} if self.policy is None else compute_dead_neuron_stats(self.policy)
        for tracker in trackers:
            metrics |= tracker.to_metrics()
        for sink in self.sinks:
            try:
                sink.emit(dict(metrics), self._epoch, "POST_EPOCH")
            except Exception:
                logger.exception("%s could not take the metrics of epoch %d", type(sink).__name__, self._epoch)
        for tracker in trackers:
            tracker.reset()
        return metrics

    def _trackers(self) -> Iterator[Any]:
        states = self.context.model_metrics
        yield from (states[key] for key, kind in TRACKERS.items() if isinstance(states.get(key), kind))
        others = (state for key, state in states.items() if key not in TRACKERS)
        yield from (state for state in others if hasattr(state, "to_metrics") and hasattr(state, "reset"))


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
        data: Batches: a list of them, or a `DataLoader`.
        loss: ``loss(policy, batch)``; if left out, the usual one for such a batch.
        optimizer: One for the policy's parameters; AdamW if left out.
        sinks: Where the metrics of trackers go, epoch by epoch.
        others: As for `Experiment`.
    """

    def __init__(
        self,
        policy: nn.Module,
        data: Iterable[Any],
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        *,
        optimizer: Optimizer | None = None,
        sinks: Iterable[_Sink] = (),
        **others: Any,
    ) -> None:
        optimizer = torch.optim.AdamW(policy.parameters()) if optimizer is None else optimizer
        super().__init__(policy, optimizer, data, loss, **others)
        self.context = ComponentContext()
        """What builders of hooks are given; the trackers are in ``context.model_metrics``."""
        self.reporter = StatsReporter(self.context, policy=policy, sinks=sinks)
        self.metrics: list[dict[str, float]] = []
        """What trackers had counted at the end of each epoch."""
        self.result: LoopResult | None = None
        """What the training came to."""

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


class TrainTool:
    """Keep the builders of a run's hooks, and the hooks while it runs.

    Recipe::

        tool = hookline.metta.TrainTool(policy=policy, data=loader, epochs=3, sinks=[hookline.sinks.MemorySink()])
        tool.add_training_hook("actor_mlp", hookline.metta.attach_relu_activation_hooks())
        tool.add_training_backward_hook("actor_mlp", hookline.metta.attach_fisher_information_hooks())
        trainer = tool.invoke()
        trainer.metrics  # what the trackers counted, epoch by epoch

        with tool.attached(policy=policy, trainer=trainer):  # or in a loop of your own
            train(policy)  # trainer.context is a ComponentContext

    Nothing is attached before there is a policy; forward hooks are attached first, then backward hooks, each in the
    order they were added. A name that the policy does not have is passed over with a warning. If a builder raises,
    nothing stays attached.

    Args:
        policy: The model; needed for ``invoke``. Of one that is no `PolicyAutoBuilder`, all modules are components, by
            their dotted names.
        data: Batches: a list of them, or a `DataLoader`; needed for ``invoke``.
        loss: ``loss(policy, batch)``; if left out, the usual one for such a batch.
        epochs: How many.
        sinks: Where the metrics of trackers go.
        options: As for `Trainer`: ``optimizer=``, ``scheduler=``, ``evaluate=``, ``accumulate=``, …
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        data: Any = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        epochs: int = 1,
        sinks: Iterable[_Sink] = (),
        **options: Any,
    ) -> None:
        self.policy, self.data, self.loss, self.epochs = policy, data, loss, epochs
        self.sinks, self.options = list(sinks), options
        self._training_hooks: list[tuple[str, HookBuilder]] = []
        self._training_backward_hooks: list[tuple[str, BackwardHookBuilder]] = []
        self._active_policy_hooks: list[RemovableHandle] = []
        self._active_policy_backward_hooks: list[RemovableHandle] = []
        self._feeders: list[TrackerFeeder] = []

    def add_training_hook(self, component_name: str, hook_builder: HookBuilder) -> None:
        """Store the builder of a component's forward hook."""
        self._training_hooks.append((component_name, hook_builder))

    def add_training_backward_hook(self, component_name: str, hook_builder: BackwardHookBuilder) -> None:
        """Store the builder of a component's backward hook."""
        self._training_backward_hooks.append((component_name, hook_builder))

    def invoke(self) -> Trainer:
        """Make the trainer, attach the hooks and train; remove the hooks however it ends.

        Returns:
            The trainer: its ``policy``, its ``context`` with the trackers, its ``metrics`` and ``result``.
        """
        if not isinstance(self.policy, nn.Module) or self.data is None:
            raise OptionError("There is nothing to train: give TrainTool policy=, an nn.Module, and data=, batches.")
        is_policy = isinstance(unwrap(self.policy), PolicyAutoBuilder)
        policy = self.policy if is_policy else PolicyAutoBuilder.of(self.policy)
        trainer = Trainer(policy, self.data, self.loss, sinks=self.sinks, **self.options)
        try:
            with self.attached(policy=policy, trainer=trainer):
                trainer.train(self.epochs)
        finally:
            for sink in self.sinks:
                try:
                    getattr(sink, "flush", lambda: None)()
                except Exception:
                    logger.exception("%s could not be flushed", type(sink).__name__)
        return trainer

    @contextmanager
    def attached(self, *, policy: nn.Module, trainer: Any) -> Iterator[None]:
        """Attach the hooks for as long as the block lasts, however it ends."""
        self._register_policy_hooks(policy=policy, trainer=trainer)
        try:
            yield
            for feeder in self._feeders:
                if not feeder.has_fed:
                    _warn(
                        f"Component {feeder.component!r} gave {type(feeder.tracker).__name__} nothing to count: no "
                        "training pass came through it with a gradient or a tensor that its extractor= finds."
                    )
        finally:
            self._clear_policy_hooks()

    def _register_policy_hooks(self, *, policy: nn.Module, trainer: Any) -> None:
        """Make and attach all hooks that were added; remove those of an earlier policy first."""
        self._clear_policy_hooks()
        inner = unwrap(policy)  # DDP and torch.compile may be around it
        if not isinstance(inner, PolicyAutoBuilder):
            if self._training_hooks or self._training_backward_hooks:
                _warn(
                    f"None of the hooks is attached: {type_name(inner)} has no components; hand over "
                    "PolicyAutoBuilder.of(policy)."
                )
            return
        forward, backward = inner.register_component_hook_rule, inner.register_component_backward_hook_rule
        try:
            for specs, register, handles in (
                (self._training_hooks, forward, self._active_policy_hooks),
                (self._training_backward_hooks, backward, self._active_policy_backward_hooks),
            ):
                for name, builder in specs:
                    hook = self._build(name, builder, inner, trainer.context)
                    if hook is not None:
                        handles.append(register(component_name=name, hook=hook))
        except BaseException:
            self._clear_policy_hooks()
            raise

    def _build(self, name: str, builder: Callable[..., Any], policy: PolicyAutoBuilder, context: Any) -> Any:
        """Return the hook of a component; None, and a warning, if the policy does not have the component."""
        if name not in policy.components:
            _warn(
                f"Component {name!r} not found in policy, so its hook is not attached; there are: "
                f"{', '.join(map(repr, policy.components)) or 'none'}."
            )
            return None
        hook = builder(name, context)
        if isinstance(hook, TrackerFeeder):
            self._feeders.append(hook)
        return hook

    def _clear_policy_hooks(self) -> None:
        """Remove every hook; log one that cannot be removed, and go on with the others."""
        for handles in (self._active_policy_hooks, self._active_policy_backward_hooks):
            while handles:
                handle = handles.pop(0)
                try:
                    handle.remove()
                except Exception:
                    logger.warning("A hook could not be removed: %r", handle, exc_info=True)
        while self._feeders:
            self._feeders.pop().release()


def _warn(text: str) -> None:
    warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
