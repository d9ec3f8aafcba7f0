"""The private functions and habits of torch that hookline leans on, in one place.

Checked on torch 2.11 and 2.13; ``tests/sites/test_torch_contract.py`` fails when one of them changes. Used where
they are needed, and not wrapped here, are four old attributes: ``Tensor._base`` and ``_version``, ``Module._modules``
and the hook dictionaries of ``Module``.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.utils.hooks import RemovableHandle

__all__ = [
    "CALL_IMPL",
    "FULL_BACKWARD_FLAG",
    "HOOK_DICTS",
    "Edges",
    "add_port",
    "boundary",
    "caller",
    "drop_hook",
    "graph_task_id",
    "hook_tensor",
    "hooks_of",
    "in_run",
    "in_transform",
    "kwargs_of_call",
    "made_since",
    "parameter_hooks_of",
    "place_first",
    "place_last",
    "queue_end_of_backward",
    "queue_id",
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
    """Whether a graph node is younger than that number; none, or a leaf's accumulator, is not."""
    return node is not None and number <= node._sequence_nr() < _LEAF_SEQUENCE


Edges: TypeAlias = dict[Any, dict[int, int]]
"""Graph edges to watch for: the node they lead to, which of its outputs, and a number of the caller's."""


def boundary(roots: list[Any], edges: Edges, since: int) -> list[tuple[Any, list[tuple[int, int]]]]:
    """The nodes younger than ``since``, found by walking from ``roots`` (used up), that have one of ``edges``.

    With each come the slots of its gradient that go there and the caller's numbers. Nodes that accumulate
    into a leaf carry the largest number there is and lead nowhere, so they are passed over.
    """
    found: list[tuple[Any, list[tuple[int, int]]]] = []
    todo = roots
    seen = {None, *edges, *roots}
    while todo:
        node = todo.pop()
        hits: list[tuple[int, int]] = []
        for slot, (target, output) in enumerate(node.next_functions):
            if target in seen:
                if target in edges and output in edges[target]:
                    hits.append((slot, edges[target][output]))
            elif since <= target._sequence_nr() < _LEAF_SEQUENCE:
                seen.add(target)
                todo.append(target)
        if hits:
            found.append((node, hits))
    return found


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when the backward pass that is running now has accumulated everything."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def add_port(module: nn.Module, attribute: str, port: Any, *, first: bool) -> int:
    """Register a forward hook that takes keyword arguments, at either end of its queue; its id.

    What ``register_forward_hook`` does, without the handle, which costs more than all the rest together.
    """
    hooks: OrderedDict[int, Any] = getattr(module, attribute)
    hook_id = RemovableHandle.next_id
    RemovableHandle.next_id += 1
    hooks[hook_id] = port
    getattr(module, HOOK_DICTS[attribute][0])[hook_id] = True
    if len(hooks) > 1:
        (place_first if first else place_last)(hooks, hook_id)
    return hook_id


def drop_hook(module: nn.Module, attribute: str, hook_id: int) -> None:
    """Take one hook off, with its options."""
    for name in (attribute, *HOOK_DICTS[attribute]):
        getattr(module, name).pop(hook_id, None)


def hook_tensor(tensor: Tensor, hook: Callable[[Any], Any]) -> None:
    """What ``tensor.register_hook`` does for a tensor that some node made, without the handle (7 → 5 µs)."""
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    hooks[RemovableHandle.next_id] = hook
    RemovableHandle.next_id += 1


def hooks_of(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Every hook in the module's own dictionaries: dictionary, id, callable."""
    for attribute in HOOK_DICTS:
        hooks: OrderedDict[int, Any] = getattr(module, attribute)
        wrapped = attribute == "_load_state_dict_pre_hooks"  # torch keeps these in a wrapper that adds the module
        for hook_id, hook in list(hooks.items()) if hooks else ():
            yield attribute, hook_id, getattr(hook, "hook", hook) if wrapped else hook


def caller() -> nn.Module | None:
    """The module whose ``_call_impl`` is being called, for what stands in for that method on the instance."""
    module = sys._getframe(2).f_locals.get("self")
    return module if isinstance(module, nn.Module) else None


def queue_id(depth: int) -> int:
    """Tells the queues of hooks of one module call from those of others: torch runs each call in a frame of its own.

    ``depth`` is how many calls above this one torch's own frame is.
    """
    return id(sys._getframe(depth + 1))


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or forward-mode AD is at work, which custom functions do not bear."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def in_run() -> bool:
    """Whether a forward or backward is under way in this thread; walks the stack, so not for hot paths."""
    if graph_task_id() != -1:
        return True
    code = nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def kwargs_of_call() -> dict[str, Any]:
    """The keyword arguments of the module call whose global pre-hook asks, which torch does not hand it.

    They are a variable of ``nn.Module._call_impl``, which is the caller of that hook; the very dictionary, so
    that changing it changes the call.
    """
    kwargs: dict[str, Any] = sys._getframe(3).f_locals.get("kwargs", {})
    return kwargs


def parameter_hooks_of(module: nn.Module) -> Iterator[Any]:
    """Every post-accumulate hook on the module's own parameters."""
    for parameter in module._parameters.values():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        yield from list(hooks.values()) if hooks else ()


def place_first(hooks: dict[int, Any], hook_id: int) -> None:
    """Put a hook before all others, but after FSDP2's pre-forward, before which parameters are shards."""
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(hook_id, last=False)
    for outer in _fsdp_hooks(hooks, "_pre_forward"):
        hooks.move_to_end(outer, last=False)


def place_last(hooks: dict[int, Any], hook_id: int) -> None:
    """Put a hook after all others, but before FSDP2's post-forward, after which parameters are shards."""
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(hook_id)
    for outer in _fsdp_hooks(hooks, "_post_forward"):
        hooks.move_to_end(outer)


def _fsdp_hooks(hooks: OrderedDict[int, Any], method: str) -> list[int]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return [
        hook_id
        for hook_id, hook in hooks.items()
        if type(getattr(hook, "__self__", None)).__name__ == "FSDPState" and hook.__name__ == method
    ]
