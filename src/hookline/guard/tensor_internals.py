"""Restore what a tensor is inside: its C++ object, hooks, and the node by which autograd adds up its gradient.

`Snapshot` calls this; it calls `hookline.sites._torch`. ``torch.utils.swap_tensors`` gives a Python object the
internals of another and forbids backward passes into both; assigning ``.data`` of another shape leaves a node behind
that expects gradients of that shape for as long as a graph keeps it. Neither shows in numbers or addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
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

    ``groups`` are lists of tensors, which have numbers through all of them; ``model`` may be data-parallel, which hooks
    their nodes. `note` keeps what was worked out about the tensors, as long as the lists are the same.
    """

    def __init__(self, groups: Sequence[list[Tensor]], model: nn.Module) -> None:
        self._groups, self._model = tuple(groups), model
        self._tensors = list(chain.from_iterable(groups))
        self._classes = list(map(type, self._tensors))
        # A plain tensor is asked only where something else is other: torch refuses to swap one that anything refers to,
        # and swapping gives it other memory. To ask it for its dictionary would make one.
        each = enumerate(zip(self._tensors, self._classes, strict=True))
        self._numbers = [n for n, (one, cls) in each if cls is not Tensor or one.layout is not torch.strided]
        self._asked = [self._tensors[number] for number in self._numbers]
        self._with_attributes = [number for number in self._numbers if self._classes[number] is not Tensor]
        self._holders = [self._tensors[number] for number in self._with_attributes]
        self.refresh()
        self.note()

    def is_about(self, groups: Sequence[list[Tensor]]) -> bool:
        """Return whether these are the lists of tensors of last time."""
        return all(map(is_, groups, self._groups))

    def note(self) -> None:
        """Note the internals as they are now; those of plain tensors are the ones they had."""
        asked = list(map(_torch.identity_of, self._asked))
        if asked != self._asked_before:
            self.refresh()
        for number, tensor in zip(self._with_attributes, self._holders, strict=True):
            self._classes[number] = type(tensor)
        self._attributes = list(map(vars, self._holders))
        self._uses = list(map(_torch.use_count, self._asked))
        self._nodes: dict[int, Any] = {}
        """The nodes that graphs of before refer to, 5 µs each; none where no graph is alive."""
        if self._uses.count(1) < len(self._uses):
            used = [number for number, count in zip(self._numbers, self._uses, strict=True) if count > 1]
            found = {number: _live_node(self._tensors[number]) for number in used}
            self._nodes = {number: node for number, node in found.items() if node is not None}
        # A data-parallel model has hooked its nodes, so there are some.
        self._is_parallel = bool(self._nodes) and _is_parallel(self._model)

    def refresh(self) -> None:
        """Note which internals all tensors have now, after a restore that had to replace some."""
        self._before = list(map(_torch.identity_of, self._tensors))
        self._asked_before = [self._before[number] for number in self._numbers]
        self._uses = list(map(_torch.use_count, self._asked))

    def forget(self) -> None:
        """Let go of the nodes, which keep graphs alive."""
        self._nodes = {}

    def changed(self, *, everything: bool) -> list[int]:
        """Return the numbers of the tensors that have other internals, attributes or another class now.

        ``swap_tensors`` exchanges class and attributes first, so that they are other ones where it then refuses.
        ``everything``: also plain tensors. Not where no tensor has another address, layout, counter or flag.
        """
        is_same = list(map(_torch.identity_of, self._asked)) == self._asked_before
        is_same = is_same and all(map(is_, map(vars, self._holders), self._attributes))
        if is_same and not everything:
            return []
        each = enumerate(zip(map(_torch.identity_of, self._tensors), self._before, strict=True))
        changed = {number for number, (now, before) in each if now != before}
        attributes = zip(self._with_attributes, self._holders, self._attributes, strict=True)
        for number, tensor, own in attributes:
            if type(tensor) is not self._classes[number] or vars(tensor) is not own:
                changed.add(number)
        return sorted(changed)

    def restore(self, changed: Iterable[int]) -> dict[int, str]:
        """Give each its own internals again; return the numbers of those that cannot have them, and why."""
        lost: dict[int, str] = {}
        holders = {_torch.identity_of(tensor): tensor for tensor in self._tensors}
        holders |= {self._before[number]: node.variable for number, node in self._nodes.items()}
        changed = list(changed)
        uses = dict(zip(self._numbers, self._uses, strict=True))
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
            if uses.get(number, 1) > 1:
                lost[number] = "swap_tensors() gave its insides, which something refers to, away"
        own_attributes = dict(zip(self._with_attributes, self._attributes, strict=True))
        for number in changed:
            tensor, attributes = self._tensors[number], own_attributes.get(number)
            if type(tensor) is not self._classes[number]:
                tensor.__class__ = self._classes[number]
            if attributes is not None and vars(tensor) is not attributes:
                tensor.__dict__ = attributes
        return lost

    def repair_accumulators(self, swapped: Collection[int], moved: Collection[Tensor]) -> dict[int, str]:
        """Give old and new graphs the right nodes; return the numbers of parameters for which that fails, and why.

        Only those can be wrong that were ``swapped`` or ``moved``, that have more references, or that had a node.
        """
        for node in self._nodes.values():
            _torch.allow_accumulator(node)
        uses = list(map(_torch.use_count, self._asked))
        if not swapped and not moved and not self._nodes and uses == self._uses:
            return {}
        suspects = {id(self._tensors[number]) for number in swapped} | {id(tensor) for tensor in moved}
        for number, tensor, count, before in zip(self._numbers, self._asked, uses, self._uses, strict=True):
            is_suspect = count > before or number in self._nodes or id(tensor) in suspects
            if is_suspect and count > 1 and _can_accumulate(tensor):
                _repair_accumulator(tensor)
        return {} if not self._is_parallel else self._with_unhooked_node()

    def _with_unhooked_node(self) -> dict[int, str]:
        """Return the numbers of parameters that have another node than the one a data-parallel model has hooked."""
        pairs = [(number, self._tensors[number], node) for number, node in self._nodes.items()]
        unhooked = [number for number, tensor, node in pairs if _torch.accumulator_of(tensor) is not node]
        return dict.fromkeys(unhooked, "DistributedDataParallel would not see its gradients any more")


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
