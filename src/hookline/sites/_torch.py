"""Every private name of torch that hookline leans on, in one place.

Checked on torch 2.11 and 2.13; ``tests/sites/test_torch_contract.py`` fails when one of them changes.
Nothing else in the package touches an underscored name of torch, but for the hook dictionaries of
``nn.Module`` that are read here and handed on.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr

__all__ = [
    "CALL_IMPL",
    "HOOK_DICTS",
    "graph_task_id",
    "hook_tensor",
    "hooks_of",
    "kwargs_of_call",
    "made_since",
    "place_first",
    "place_last",
    "queue_end_of_backward",
    "sequence_number",
    "sequence_number_of",
]

CALL_IMPL: Final = "_call_impl"
"""``nn.Module.__call__`` looks this method up on the instance, so an attribute of that name wraps the whole call."""

FULL_BACKWARD_FLAG: Final = "_is_full_backward_hook"
"""torch sets it with the first full backward hook and never takes it back."""

HOOK_DICTS: Final[dict[str, tuple[str, ...]]] = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
    "_state_dict_pre_hooks": (),
    "_state_dict_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
"""The hook dictionaries of a module, each with the dictionaries that hold options for the same ids."""

# Nodes that accumulate into a leaf carry the largest 64-bit number, to run as soon as they are ready.
_LEAF_SEQUENCE: Final = 1 << 62

sequence_number: Final[Callable[[], int]] = _get_sequence_nr
"""The number that the next graph node of this thread will get; later nodes have larger ones."""

graph_task_id: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Which backward pass is running in this thread; -1 for none (0.1 µs)."""


def sequence_number_of(node: Any) -> int:
    """When a graph node was made; autograd runs the ready node with the largest number first."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def made_since(node: Any, number: int) -> bool:
    """Whether the node is younger than that number, and no leaf's accumulator."""
    return number <= node._sequence_nr() < _LEAF_SEQUENCE  # type: ignore[no-any-return]


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when the backward pass that is running now has accumulated everything."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def hook_tensor(tensor: Tensor, hook: Callable[[Any], Any]) -> None:
    """``tensor.register_hook``, which torch leaves untyped."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def hooks_of(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Every hook in the module's own dictionaries: dictionary, id, callable."""
    for attribute in HOOK_DICTS:
        hooks: OrderedDict[int, Any] = getattr(module, attribute)
        for hook_id, hook in list(hooks.items()) if hooks else ():
            # load_state_dict pre-hooks are kept in a wrapper that adds the module
            yield attribute, hook_id, getattr(hook, "hook", hook)


def kwargs_of_call() -> dict[str, Any]:
    """The keyword arguments of the module call whose global pre-hook asks, which torch does not hand it.

    They are a variable of ``nn.Module._call_impl``, which is the caller of that hook; the very dictionary, so
    that changing it changes the call.
    """
    kwargs: dict[str, Any] = sys._getframe(3).f_locals.get("kwargs", {})
    return kwargs


def place_first(hooks: dict[int, Any], hook_id: int) -> None:
    """Put a hook before all others, but after a sharding wrapper's, which has to run outermost."""
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(hook_id, last=False)
    for outer in reversed(_outermost(hooks)):
        hooks.move_to_end(outer, last=False)


def place_last(hooks: dict[int, Any], hook_id: int) -> None:
    """Put a hook after all others, but before a sharding wrapper's."""
    if next(reversed(hooks)) == hook_id:
        return
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(hook_id)
    for outer in _outermost(hooks):
        hooks.move_to_end(outer)


def _outermost(hooks: OrderedDict[int, Any]) -> list[int]:
    """Ids of FSDP2's own hooks: before its pre-forward and after its post-forward parameters are shards."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return [hook_id for hook_id, hook in hooks.items() if type(getattr(hook, "__self__", None)).__name__ == "FSDPState"]
