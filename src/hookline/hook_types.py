"""Name the shapes of hooks and options: type aliases that signatures in several folders share.

``sites``, ``observe``, ``debug`` and ``factories`` import `Hook`, `Grads`, `Target` and `Scope`, under TYPE_CHECKING
alone. Users import aliases as ``hookline.hook_types``. Those of module and function hooks are for users alone, and are
listed behind ``hook_types:`` in tests/test_public_names.py and in docs/sources.md.

Nothing here may import torch at run time, as ``import hookline`` must not; so aliases that need it are texts. What each
kind of hook is called with is decided in sites/kinds.py (`SiteType.args`): change the alias with it. What a target may
be is decided in sites/targets.py, whose head says what a new form of target needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from torch import Tensor, nn

Grads: TypeAlias = "tuple[Tensor | None, ...]"
"""Gradients in the order of the tensors they belong to; None where none arrived."""

Hook: TypeAlias = Callable[..., Any]
"""Any hook; what it is called with depends on its kind (see ``hookline.Kind``)."""

ModulePreHook: TypeAlias = "Callable[[nn.Module, tuple[Any, ...]], Any]"
"""``(module, inputs)`` for ``forward_pre``, ``(module, grad_outputs)`` for ``backward_pre``."""

ModulePostHook: TypeAlias = "Callable[[nn.Module, tuple[Any, ...], Any], Any]"
"""``(module, inputs, output)`` for ``forward``, ``(module, grad_inputs, grad_outputs)`` for ``backward``."""

# The first argument is a hookline.sites.FunctionSite, which is above this file in the order of imports.
FunctionPreHook: TypeAlias = "Callable[[Any, tuple[Tensor | None, ...]], Any]"
"""``(fn, inputs)`` for ``forward_pre``, ``(fn, grad_outputs)`` for ``backward_pre``."""

FunctionPostHook: TypeAlias = "Callable[[Any, tuple[Tensor | None, ...], tuple[Tensor | None, ...]], Any]"
"""``(fn, inputs, outputs)`` for ``forward``, ``(fn, grad_inputs, grad_outputs)`` for ``backward``."""

Predicate: TypeAlias = "Callable[[str, nn.Module], bool]"
"""Tells for a dotted name and its module whether to take it."""

Target: TypeAlias = (
    "str | re.Pattern[str] | type[nn.Module] | tuple[Any, ...] | Sequence[Any] | Predicate | nn.Module | Tensor | None"
)
"""What ``attach`` and ``find`` select by (``hookline.sites.targets``); a parameter with ``on="param_grad"`` alone."""

Scope: TypeAlias = Literal["process", "context"]
"""Whose calls fire a hook: all of the process, or those of this thread or asyncio task (``attach(scope=)``)."""
