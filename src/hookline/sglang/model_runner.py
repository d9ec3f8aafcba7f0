"""Attach the hooks that the settings of a server ask for to its model, and keep their handles.

Servers call `ModelRunner`, which calls `register_hooks`. The line it logs is SGLang's, word for word. Imports
nothing of ``hookline[serve]``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hookline.sglang.server_args import ABOUT_HOOKS, ServerArgs
from hookline.sites.handle import HandleSet
from hookline.specs.apply_specs import close_hooks, hooks_of, register_hooks
from hookline.specs.hook_spec import HookSpec

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


class ModelRunner:
    """Hold a model, and attach hooks to it from data.

    Recipe::

        runner = hookline.sglang.ModelRunner(model, hookline.sglang.ServerArgs.from_file("server.json"))
        runner.initialize()
        runner.model(x)
        print(runner.hook_handles.report())
        runner.close()  # or runner.hook_handles.remove(), which leaves hooks as they are

    Args:
        model: The model; names of modules are relative to it.
        server_args: A `ServerArgs`, a dictionary with its keys, or any object with ``enable_hooks`` and ``hooks``, or
            with ``forward_hooks``. None attaches nothing.
    """

    def __init__(self, model: nn.Module, server_args: Any = None) -> None:
        self.model = model
        self.server_args = ServerArgs.from_dict(server_args) if isinstance(server_args, Mapping) else server_args
        self.hook_handles = HandleSet()
        """The handles of what it has attached, in that order; ``remove()`` takes everything off."""
        self._is_initialized = False

    def initialize(self, *, strict: bool = False, allow: Iterable[str] | None = None) -> None:
        """Attach what the settings ask for, once: called again it does nothing, also after hooks were removed.

        If it raises, nothing is attached, and it may be tried again.

        Args:
            strict: As for `register_hooks`.
            allow: What paths of factories may begin with, see `resolve_callable`; None allows all.
        """
        if self._is_initialized:
            return
        args = self.server_args
        if not isinstance(args, ServerArgs):  # any object that has these settings
            args = ServerArgs(**{name: getattr(args, name) for name in ABOUT_HOOKS if hasattr(args, name)})
        if args.enable_hooks and not args.hooks:
            logger.warning("enable_hooks=True but no 'hooks' specified in server_args")
        specs = args.hook_specs()
        if specs:
            self.register_hooks(specs, strict=strict, allow=allow)
        self._is_initialized = True

    def register_hooks(
        self,
        hook_specs: Iterable[HookSpec | Mapping[str, Any]],
        *,
        strict: bool = False,
        allow: Iterable[str] | None = None,
    ) -> HandleSet:
        """Attach the hooks that `hook_specs` describe, all or none, whether the settings enable hooks or not.

        Returns:
            Their handles alone; they are among ``hook_handles`` as well. See `register_hooks` of hookline.
        """
        handles = register_hooks(self.model, hook_specs, strict=strict, allow=allow)
        for handle in handles:
            self.hook_handles.add(handle)
        return handles

    def close(self) -> None:
        """Take all hooks off and call ``close()`` of those that have one. May be repeated."""
        self.hook_handles.remove()
        close_hooks(hooks_of(self.hook_handles))

    def __repr__(self) -> str:
        return f"<ModelRunner of {type(self.model).__name__}, {len(self.hook_handles)} hooks>"
