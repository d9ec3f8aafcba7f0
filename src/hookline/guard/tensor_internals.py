"""Restore what a tensor is inside: its C++ object, hooks, and the node by which autograd adds up its gradient.

`Snapshot` calls this; it calls `hookline.sites._torch`. ``torch.utils.swap_tensors`` gives a Python object the
internals of another and forbids backward passes into both; assigning ``.data`` of another shape leaves a node behind
that expects gradients of that shape for as long as a graph keeps it. Neither shows in numbers or addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.sites import _torch

__all__ = ["TensorHooks", "TensorInternals"]

_hooks: Final = attrgetter(*_torch.TENSOR_HOOKS)
"""Returns the dictionaries of all kinds of hooks on a tensor; None for a kind that it never had."""
_NO_HOOKS: Final[Any] = (None,) * len(_torch.TENSOR_HOOKS)


class TensorInternals:
    """The internals of some tensors, as they are when this is made.

    ``names`` are those of the ``tensors``; ``model`` may be data-parallel, which hooks their nodes.
    """

    def __init__(self, tensors: list[Tensor], names: list[str], model: nn.Module) -> None:
        self._tensors = tensors
        self._names = names
        self.refresh()
        self._classes = list(map(type, tensors))
        # To ask a plain tensor for its dictionary makes one; and isinstance takes 2 µs with a Parameter.
        pairs = zip(tensors, self._classes, strict=True)
        self._attributes = [None if cls is Tensor else vars(tensor) for tensor, cls in pairs]
        self._with_attributes = [
            tensor for tensor, cls in zip(tensors, self._classes, strict=True) if cls is not Tensor
        ]
        self._own = [attributes for attributes in self._attributes if attributes is not None]
        used = enumerate(self._uses if self._uses.count(1) < len(tensors) else ())
        found = {number: _live_node(tensors[number]) for number, count in used if count > 1}
        self._nodes = {number: node for number, node in found.items() if node is not None}
        """The nodes that graphs of before refer to, 5 µs each; none where no graph is alive."""
        # A data-parallel model has hooked its nodes, so there are some.
        self._is_parallel = bool(self._nodes) and _is_parallel(model)

    def refresh(self) -> None:
        """Note the internals as they are now, after a restore that had to replace some."""
        self._before = list(map(_torch.identity_of, self._tensors))
        self._uses = list(map(_torch.use_count, self._tensors))

    def changed(self) -> list[int]:
        """Return the numbers of the tensors that have other internals, attributes or another class now.

        ``swap_tensors`` exchanges class and attributes first, so that they are other ones where it then refuses.
        """
        now = list(map(_torch.identity_of, self._tensors))
        if now == self._before and all(map(is_, map(vars, self._with_attributes), self._own)):
            return []
        each = zip(now, self._before, self._tensors, self._attributes, self._classes, strict=True)
        return [
            number
            for number, (a, b, tensor, own, cls) in enumerate(each)
            if a != b or type(tensor) is not cls or (own is not None and vars(tensor) is not own)
        ]

    def restore(self, changed: Iterable[int]) -> dict[str, str]:
        """Give each its own internals again; return the names of those that cannot have them, and why."""
        lost: dict[str, str] = {}
        holders = {_torch.identity_of(tensor): tensor for tensor in self._tensors}
        holders |= {self._before[number]: node.variable for number, node in self._nodes.items()}
        changed = list(changed)
        for number in changed:
            tensor, own = self._tensors[number], self._before[number]
            now = _torch.identity_of(tensor)
            if now == own:
                continue
            holder = holders.get(own)
            if holder is not None and _try_swap(tensor, holder):
                holders[now], holders[own] = holder, tensor
                continue
            # Hooks of autograd sit in the internals. New ones have none; numbers and flags are put back into them.
            _torch.swap_insides(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if self._uses[number] > 1:
                lost[self._names[number]] = "swap_tensors() gave its insides, which something refers to, away"
        for number in changed:
            tensor, attributes = self._tensors[number], self._attributes[number]
            if type(tensor) is not self._classes[number]:
                tensor.__class__ = self._classes[number]
            if attributes is not None and vars(tensor) is not attributes:
                tensor.__dict__ = attributes
        return lost

    def repair_accumulators(self, swapped: Iterable[int], moved: Iterable[Tensor]) -> dict[str, str]:
        """Give old and new graphs the right nodes; return the names of parameters for which that fails, and why.

        Only those can be wrong that were ``swapped`` or ``moved``, that have more references, or that had a node.
        """
        for node in self._nodes.values():
            _torch.allow_accumulator(node)
        uses = list(map(_torch.use_count, self._tensors))
        suspects = {id(self._tensors[number]) for number in swapped} | {id(tensor) for tensor in moved}
        pairs = enumerate(zip(self._tensors, uses, self._uses, strict=True))
        for number, (tensor, count, before) in pairs if suspects or uses != self._uses or self._nodes else ():
            is_suspect = count > before or number in self._nodes or id(tensor) in suspects
            if is_suspect and count > 1 and _can_accumulate(tensor):
                _repair_accumulator(tensor)
        return {} if not self._is_parallel else self._with_unhooked_node()

    def _with_unhooked_node(self) -> dict[str, str]:
        """Return the names of parameters that have another node than the one a data-parallel model has hooked."""
        pairs = [(self._names[number], self._tensors[number], node) for number, node in self._nodes.items()]
        names = [name for name, tensor, node in pairs if _torch.accumulator_of(tensor) is not node]
        return dict.fromkeys(names, "DistributedDataParallel would not see its gradients any more")


def _is_parallel(model: nn.Module) -> bool:
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _try_swap(tensor: Tensor, holder: Tensor) -> bool:
    """Exchange the internals of two objects; return False if torch refuses."""
    try:
        _torch.swap_insides(tensor, holder)
    except RuntimeError:
        return False
    return True


def _can_accumulate(tensor: Tensor) -> bool:
    plain = type(tensor) is nn.Parameter and tensor.layout is torch.strided
    return plain and tensor.is_leaf and tensor.is_floating_point() and not tensor.is_inference()


def _live_node(tensor: Tensor) -> Any:
    """Return the node that adds up the gradients of a tensor, if something keeps it alive."""
    if not _can_accumulate(tensor) or not tensor.requires_grad:
        return None
    before = _torch.use_count(tensor)
    node = _torch.accumulator_of(tensor)
    return node if _torch.use_count(tensor) == before else None  # one that was made just now is one more


def _repair_accumulator(leaf: Tensor) -> None:
    if not leaf.requires_grad:
        _torch.forget_accumulator(leaf)  # made while it did; not needed until it does again
        return
    node = _torch.accumulator_of(leaf)
    _torch.allow_accumulator(node)
    if not _torch.is_right_accumulator(node, leaf):
        _torch.forget_accumulator(leaf)


class TensorHooks:
    """The hooks of torch on some tensors, as they are when this is made."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._held = list(map(_hooks, tensors))
        self._has_some = self._held.count(_NO_HOOKS) < len(tensors)
        self._items = (
            [[() if one is None else tuple(one.items()) for one in held] for held in self._held]
            if self._has_some
            else []
        )
        """What is in each dictionary, if there are any."""

    def restore(self, *, renew: bool) -> None:
        """Put the hooks back; ``renew``: internals may be others, which do not know their dictionary yet."""
        if not self._has_some and list(map(_hooks, self._tensors)).count(_NO_HOOKS) == len(self._tensors):
            return
        nothing = [()] * len(_NO_HOOKS)
        for number, tensor in enumerate(self._tensors):
            _restore_hooks(tensor, self._held[number], self._items[number] if self._items else nothing, renew=renew)


def _restore_hooks(tensor: Tensor, before: Iterable[Any], items: Iterable[Any], *, renew: bool) -> None:
    for name, own, had in zip(_torch.TENSOR_HOOKS, before, items, strict=True):
        held = getattr(tensor, name)
        if own is None:
            if held:
                held.clear()
        elif renew or held is not own or tuple(held.items()) != had:
            own.clear()
            own.update(had)
            if renew or held is not own:
                setattr(tensor, name, own)
