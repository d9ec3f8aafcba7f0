"""Store builders of hooks by component name, attach the hooks when there is a policy, and remove them at the end.

The user and the command line call it. It attaches hooks through a `PolicyAutoBuilder`, and trains with a `Trainer`.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hookline.errors import HooklineWarning, OptionError
from hookline.lifecycle.manager import HookManager
from hookline.messages import caller_stacklevel, type_name
from hookline.metta.components import PolicyAutoBuilder
from hookline.metta.feeders import TrackerFeeder
from hookline.metta.trackers import ComponentTracker
from hookline.metta.trainer import Trainer
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from hookline.metta.builders import BackwardHookBuilder, HookBuilder

__all__ = ["TrainTool"]

_ROWS: Final = 256
"""Random ones, where there is neither a policy nor data."""
logger = logging.getLogger(__name__)


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
        policy: The model, or what makes it. Of one that is no `PolicyAutoBuilder`, all modules are components, by
            their dotted names. If left out: a small actor and critic, ``actor_mlp`` and ``critic_head``, and random
            data, to try hooks on.
        data: Batches, or a `Dataset`.
        loss: ``loss(policy, batch)``; if left out, the usual one for such a batch.
        epochs: How many.
        sinks: Where the metrics of trackers and hooks go.
        optimizer: One for the policy's parameters, or what makes one of them; AdamW if left out.
        hooks: Hooks over time, as `HookManager` takes them: names, classes, objects.
        progress: Show how far the training is, as `epoch_loop` does.
        options: As for `Experiment`: ``scheduler=``, ``evaluate=``, ``accumulate=``, …
    """

    def __init__(
        self,
        policy: nn.Module | Callable[[], nn.Module] | None = None,
        data: Any = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        epochs: int = 1,
        sinks: Iterable[Any] = (),
        *,
        optimizer: Any = None,
        hooks: Iterable[Any] = (),
        progress: bool = False,
        **options: Any,
    ) -> None:
        self.policy, self.data, self.loss, self.epochs = policy, data, loss, epochs
        self.sinks, self.hooks, self.optimizer, self.options = list(sinks), list(hooks), optimizer, options
        self.progress = progress
        self._manager: HookManager | None = None
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

    def __repr__(self) -> str:
        names = [name for name, _ in (*self._training_hooks, *self._training_backward_hooks)]
        on = len(self._active_policy_hooks) + len(self._active_policy_backward_hooks)
        where = f" on {', '.join(dict.fromkeys(names))}" if names else ""
        state = f"{on} on, they come off when the run ends" if on else "off until .invoke() or .attached()"
        return f"<TrainTool, hooks: {len(names)}{where}; {state}>"

    def invoke(self) -> Trainer:
        """Make the policy and its trainer, attach the hooks and train; remove the hooks however it ends.

        Returns:
            The trainer: its ``policy``, its ``context`` with the trackers, its ``metrics`` and ``result``.
        """
        policy = self._load_or_create_policy()
        trainer = self._initialize_trainer(policy)
        try:
            with self.attached(policy=policy, trainer=trainer):
                trainer.train(self.epochs, self._the_manager(), progress=self.progress)
        finally:
            self._flush()
        return trainer

    def _load_or_create_policy(self) -> nn.Module:
        policy: Any = self.policy
        if policy is None:
            actor, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 1), nn.Tanh())
            return PolicyAutoBuilder(OrderedDict(actor_mlp=actor, critic_head=critic))
        if not isinstance(policy, nn.Module):
            policy = policy() if callable(policy) else policy
            if not isinstance(policy, nn.Module):
                raise OptionError(f"policy= is an nn.Module, or a function that makes one; got {type_name(policy)}.")
        return policy if isinstance(unwrap(policy), PolicyAutoBuilder) else PolicyAutoBuilder.of(policy)

    def _initialize_trainer(self, policy: nn.Module) -> Trainer:
        data = self.data
        if data is None:
            if self.policy is not None:
                raise OptionError(
                    "There is no data to train this policy on. Give TrainTool data=, batches or a Dataset."
                )
            x = torch.randn(_ROWS, 4, generator=torch.Generator().manual_seed(0))
            data = TensorDataset(x, x.sum(1, keepdim=True).sign())
        return Trainer(policy, data, self.loss, optimizer=self.optimizer, sinks=self.sinks, **self.options)

    def _the_manager(self) -> HookManager | None:
        """Return the manager, the same for each run: a hook belongs to one manager, which resets it for each run."""
        if self._manager is None and self.hooks:
            names = [hook for hook in self.hooks if isinstance(hook, str)]
            others = [hook for hook in self.hooks if not isinstance(hook, str)]
            self._manager = HookManager(names, others, self.sinks, loop_type="epoch")
        return self._manager

    def _flush(self) -> None:
        for sink in self.sinks:
            try:
                getattr(sink, "flush", lambda: None)()
            except Exception:
                logger.exception("%s could not be flushed", type(sink).__name__)

    @contextmanager
    def attached(self, *, policy: nn.Module, trainer: Any) -> Iterator[None]:
        """Attach the hooks for as long as the block lasts, however it ends."""
        self._register_policy_hooks(policy=policy, trainer=trainer)
        try:
            yield
        finally:
            self._clear_policy_hooks()
        for tracker in trainer.context.model_metrics.values():
            if isinstance(tracker, ComponentTracker):  # a reporter may have asked it already
                tracker.warn_if_silent()

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
