"""Hooks of a run that is yet to come: stored by component name, attached when there is a policy, cleared at the end.

Takes builders from the user, hands the hooks they make to a `PolicyAutoBuilder`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineWarning
from hookline.hooks.components import PolicyAutoBuilder
from hookline.sites.receipt import outside
from hookline.sites.signature import a_or_an
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from hookline.hooks.builders import (
        BackwardHookBuilder,
        ComponentBackwardHookSpec,
        ComponentHookSpec,
        HookBuilder,
    )

__all__ = ["TrainTool"]

logger = logging.getLogger(__name__)


class TrainTool:
    """Keeps the builders of a run's hooks, and the hooks while it runs.

    Recipe::

        tool = hookline.TrainTool()
        tool.add_training_hook("actor_mlp", hookline.attach_relu_activation_hooks())
        tool.add_training_backward_hook("actor_mlp", hookline.attach_fisher_information_hooks())
        with tool.attached(policy=policy, trainer=trainer):  # trainer.context is a ComponentContext
            train(policy)

    Nothing is attached before there is a policy; forward hooks are attached first, then backward hooks, each in the
    order they were added. A name that the policy does not have is passed over with a warning. If a builder raises,
    nothing stays attached.
    """

    def __init__(self) -> None:
        self._training_hooks: list[ComponentHookSpec] = []
        self._training_backward_hooks: list[ComponentBackwardHookSpec] = []
        self._active_policy_hooks: list[RemovableHandle] = []
        self._active_policy_backward_hooks: list[RemovableHandle] = []

    def add_training_hook(self, component_name: str, hook_builder: HookBuilder) -> None:
        """Store what makes a component's forward hook."""
        self._training_hooks.append((component_name, hook_builder))

    def add_training_backward_hook(self, component_name: str, hook_builder: BackwardHookBuilder) -> None:
        """Store what makes a component's backward hook."""
        self._training_backward_hooks.append((component_name, hook_builder))

    @contextmanager
    def attached(self, *, policy: nn.Module, trainer: Any) -> Iterator[None]:
        """Have the hooks on for as long as the block lasts, however it ends."""
        self._register_policy_hooks(policy=policy, trainer=trainer)
        try:
            yield
        finally:
            self._clear_policy_hooks()

    def _register_policy_hooks(self, *, policy: nn.Module, trainer: Any) -> None:
        """Make and attach all hooks that were added; those of an earlier policy come off first."""
        self._clear_policy_hooks()
        inner = unwrap(policy)  # DDP and torch.compile may be around it
        if not isinstance(inner, PolicyAutoBuilder):
            if self._training_hooks or self._training_backward_hooks:
                _warn(
                    f"None of the hooks is attached: {a_or_an(inner)} has no components; hand over "
                    "PolicyAutoBuilder.of(policy)."
                )
            return
        forward, backward = inner.register_component_hook_rule, inner.register_component_backward_hook_rule
        try:
            for handle in _attach(self._training_hooks, inner, trainer.context, forward):
                self._active_policy_hooks.append(handle)
            for handle in _attach(self._training_backward_hooks, inner, trainer.context, backward):
                self._active_policy_backward_hooks.append(handle)
        except BaseException:
            self._clear_policy_hooks()
            raise

    def _clear_policy_hooks(self) -> None:
        """Take every hook off; one that cannot be taken off is logged and does not keep the others on."""
        for handles in (self._active_policy_hooks, self._active_policy_backward_hooks):
            while handles:
                handle = handles.pop(0)
                try:
                    handle.remove()
                except Exception:
                    logger.warning("A hook could not be removed: %r", handle, exc_info=True)


def _attach(
    specs: Sequence[tuple[str, Callable[..., Any]]],
    policy: PolicyAutoBuilder,
    context: Any,
    register: Callable[..., RemovableHandle],
) -> Iterator[RemovableHandle]:
    for name, builder in specs:
        if name not in policy.components:
            _warn(
                f"Component {name!r} not found in policy, so its hook is not attached; there are: "
                f"{', '.join(map(repr, policy.components)) or 'none'}."
            )
            continue
        hook = builder(name, context)
        if hook is not None:
            yield register(component_name=name, hook=hook)


def _warn(text: str) -> None:
    warnings.warn(text, HooklineWarning, stacklevel=outside())
