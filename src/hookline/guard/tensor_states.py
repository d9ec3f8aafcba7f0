"""Tensors as they were: where their memory is, what is in it, their flags and counters.

Takes the tensors that a `Structure` has met from a snapshot; `Tensors` keeps them, tells which have changed, and puts
each back without making it another object. What it worked out about them is used again as long as they are the same.
Everything that is asked of all tensors is asked in one go, without a line of Python for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor

from hookline.errors import GuardError
from hookline.guard.tensor_copies import Copies, Pool, Where
from hookline.sites import _torch

__all__ = ["Tensors", "can_be_saved"]

_address: Final = Tensor.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes
_begin: Final = torch.UntypedStorage.data_ptr
_layout: Final = attrgetter("shape", "dtype")
_flags: Final = attrgetter("requires_grad", "is_leaf")
_version: Final = attrgetter("_version")
_COMPUTED: Final = (True, False)
"""The flags of a tensor that has a graph."""


class Tensors:
    """Some tensors, and what they were when `take` was called last."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._pools: dict[str, Pool] = {}
        self._copies: dict[str, tuple[tuple[int, ...], Copies]] = {}
        self._current: Copies | None = None
        self._is_back = False
        self._seen: tuple[list[int], list[int]] | None = None
        """Which have moved and which have other flags, as `look` has found them."""
        self.stuck: list[int] = []
        """The places of tensors that have a graph they did not have, and could not be rid of it."""
        self.replaced: list[int] = []
        """The places of those that the latest `restore` had to give other memory."""
        self.moved: list[Tensor] = []
        """Those whose memory the latest `restore` has found elsewhere."""
        self.learn([], [])

    def learn(self, tensors: list[Tensor], names: Sequence[str]) -> None:
        """From now on it is about these."""
        self._current, self.tensors = None, []
        self._copies.clear()
        for tensor, name in zip(tensors, names, strict=True):
            _check(tensor, name)
        # What has the memory is the tensor itself, or a part of it; sparse ones have none of the usual kind.
        self._live: list[Tensor] = [_torch.own_part(tensor) for tensor in tensors]
        self._dense = [index for index, live in enumerate(self._live) if live.layout is torch.strided]
        self._strided = [self._live[index] for index in self._dense]
        # Complex numbers may be read with the other sign of their imaginary part.
        conj = (Tensor.is_conj,) if any(map(Tensor.is_complex, self._strided)) else ()
        self._questions: tuple[Callable[[Tensor], Any], ...] = (_address, _layout, Tensor.stride, *conj)
        self._layouts = self._layouts_now()
        self._storages = [live.untyped_storage() for live in self._strided]
        self._memory = self._memory_now()
        with torch.no_grad():
            self._aliases = [live.detach() for live in self._strided]
        self._counted = [index for index, tensor in enumerate(tensors) if not tensor.is_inference()]
        self._counters = [tensors[index] for index in self._counted]
        self.tensors = tensors
        self._note(())

    @property
    def has_graphs(self) -> bool:
        """Whether one was computed from others, and so keeps all that alive."""
        return _COMPUTED in self._flags

    @property
    def nbytes(self) -> int:
        """How much was copied."""
        return self._current.nbytes if self._current is not None else 0

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device, where the copies of what is there are."""
        return {device: at for pool in self._pools.values() for device, at in pool.devices.items()}

    # -- saving --------------------------------------------------------------------------------------------------

    def begin(self, which: str) -> None:
        """Start copying what was copied last time, while it is found out whether that is still all (GPUs go on)."""
        known = self._copies.get(which)
        self._current = known[1] if known is not None and self._is_in_place() else None
        if self._current is not None:
            self._current.out()

    def knows(self, tensors: list[Tensor]) -> bool:
        """Whether these are the tensors of last time, with their memory where it was."""
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        return same and not self._moved()

    def take(self, which: str, chosen: tuple[int, ...]) -> None:
        """Note how they are, and copy the numbers of those at the places ``chosen``, if ``begin`` has not."""
        key, copies = self._copies.get(which, (None, None))
        if copies is None or key != chosen:
            pool = self._pools.setdefault(which, Pool(self._where))
            wanted = set(chosen)
            copies = Copies([self._live[index] for index in self._dense if index in wanted], pool)
            self._copies[which] = chosen, copies
            self._current = None
        if self._current is None:
            copies.out()
        self._current = copies
        self._note(chosen)

    def _note(self, chosen: tuple[int, ...]) -> None:
        self._chosen = chosen
        odd = [index for index in chosen if self._live[index].layout is not torch.strided]
        with torch.no_grad():
            self._odd = [(self._live[index], self._live[index].clone()) for index in odd]
        self._flags = list(map(_flags, self.tensors))
        pairs = zip(self.tensors, self._flags, strict=True)
        self._graphs = {index: tensor.grad_fn for index, (tensor, flags) in enumerate(pairs) if flags == _COMPUTED}
        """Of those that were computed, by what: to write one in place gives it another graph."""
        self._versions = list(map(_version, self._counters))

    # -- afterwards ----------------------------------------------------------------------------------------------

    def _is_in_place(self) -> bool:
        """Whether the memory is where it was, and as long: a storage that was shrunk twice may begin there again."""
        return list(map(_address, self._strided)) == self._layouts[0] and self._memory_now() == self._memory

    def _memory_now(self) -> tuple[list[int], list[int]]:
        """How long the storages are that the tensors had, and where they begin."""
        return list(map(_nbytes, self._storages)), list(map(_begin, self._storages))

    def _layouts_now(self) -> list[list[Any]]:
        """Where the memory of each is, and how it is read."""
        return [list(map(ask, self._strided)) for ask in self._questions]

    def _moved(self) -> list[int]:
        """Which of those with memory have it elsewhere, or read it otherwise."""
        now, memory = self._layouts_now(), self._memory_now()
        if now == self._layouts and memory == self._memory:
            return []
        each = zip(zip(*now, *memory, strict=True), zip(*self._layouts, *self._memory, strict=True), strict=True)
        return [number for number, (a, b) in enumerate(each) if a != b]

    def look(self) -> tuple[list[int], list[int]]:
        """The places of tensors that were written, as far as their counters and addresses tell, and of other flags.

        A `restore` that comes at once goes by what was seen here: asking 600 tensors takes half a millisecond.
        """
        moved, flags = self._seen = self._moved(), self._flags_changed()
        return self._written(moved), flags

    def _written(self, moved: list[int]) -> list[int]:
        now = list(map(_version, self._counters))
        found = {self._dense[number] for number in moved}
        if now != self._versions:
            pairs = zip(self._counted, now, self._versions, strict=True)
            found.update(index for index, a, b in pairs if a != b)
        return sorted(found)

    def differing(self) -> list[int]:
        """The places of tensors whose copied numbers are not the same any more, whoever wrote them."""
        if self._current is None:
            return []
        wanted = set(self._chosen)
        copied = [index for index in self._dense if index in wanted]
        if self._memory_now() != self._memory:
            return copied  # some reach beyond their memory, and nothing of them can be read
        return [copied[number] for number in sorted(self._current.differing())]

    def _flags_changed(self) -> list[int]:
        """The places of tensors that require gradients and did not, or the other way round."""
        now = list(map(_flags, self.tensors))
        if now == self._flags:
            return []
        return [index for index, (a, b) in enumerate(zip(now, self._flags, strict=True)) if a != b]

    def begin_restore(self) -> None:
        """Start copying back, if all memory is where it was."""
        self._is_back = self._current is not None and self._is_in_place()
        if self._is_back and self._current is not None:
            self._current.back()

    def restore(self, *, looked: bool = False) -> None:
        """Put back memory, numbers and flags; counters come last, by `restore_versions`.

        ``looked``: nothing has happened since `look`.
        """
        seen, self._seen = self._seen, None
        moved, flags = seen if looked and seen is not None else (self._moved(), None)
        self.replaced = []
        for number in moved:
            self._restore_memory(number)
        self.moved = [self._strided[number] for number in moved]
        if moved:
            self._layouts, self._memory = self._layouts_now(), self._memory_now()  # what was resized is elsewhere
        if not self._is_back and self._current is not None:
            self._current.back()
        self._is_back = False
        with torch.no_grad():
            for live, numbers in self._odd:
                live.copy_(numbers)
        others = self._flags_changed() if flags is None or moved else flags  # moving may have changed some
        self.stuck = [index for index in others if not self._restore_flags(index)]
        self.stuck += [index for index, node in self._graphs.items() if self.tensors[index].grad_fn is not node]

    def _restore_memory(self, number: int) -> None:
        storage, nbytes = self._storages[number], self._memory[0][number]
        if storage.nbytes() != nbytes:
            try:
                storage.resize_(nbytes)
            except RuntimeError:  # after .numpy() torch does not resize it any more
                if storage.nbytes() < nbytes:
                    self._replace_storage(storage, nbytes)
        self._strided[number].data = self._aliases[number]

    def _replace_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Have all that lie in a storage lie in another; what nobody here knows of stays in the old one."""
        fresh = torch.empty(nbytes, dtype=torch.uint8, device=storage.device).untyped_storage()
        for number, held in enumerate(self._storages):
            if held._cdata == storage._cdata:
                self._storages[number] = fresh
                alias = self._aliases[number]
                alias.set_(fresh, alias.storage_offset(), alias.shape, alias.stride())
                self._strided[number].data = alias
                self.replaced.append(self._dense[number])
        for _, copies in self._copies.values():
            copies.move(storage, fresh)

    def _restore_flags(self, index: int) -> bool:
        """Whether it could be done."""
        tensor, (requires_grad, was_leaf) = self.tensors[index], self._flags[index]
        if was_leaf and not tensor.is_leaf and not _detach(tensor):
            return False
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        return True

    def move_versions_on(self) -> None:
        """To autograd, everything copied was written once more: it holds numbers of another time than its counter."""
        copied = set(self._chosen)
        tensors = [self.tensors[index] for index in self._counted if index in copied]
        _torch.set_versions(tuple(tensors), tuple(tensor._version + 1 for tensor in tensors))

    def restore_versions(self) -> None:
        """To autograd, nothing was written: a backward pass whose forward is over finds what it left.

        Only where the numbers were put back; a counter that was set back otherwise would hide that they are others.
        """
        now = list(map(_version, self._counters))
        if now == self._versions:
            return
        copied = set(self._chosen)
        each = zip(self._counted, self._counters, now, self._versions, strict=True)
        pairs = [(tensor, before) for index, tensor, a, before in each if a != before and index in copied]
        if pairs:
            tensors, versions = zip(*pairs, strict=True)
            _torch.set_versions(tensors, versions)


def _detach(tensor: Tensor) -> bool:
    """Have a tensor that was written with a graph have none; whether it could be done.

    A view cannot be detached in place: it gets the insides of another view of the same base, and is the same object.
    torch refuses that as long as a graph refers to it.
    """
    base = tensor._base
    if base is None:
        tensor.detach_()
        return True
    base.detach_()
    with torch.enable_grad():  # a view that was made without may not be written with
        fresh = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    try:
        torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _check(tensor: Tensor, name: str) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise GuardError(f"{name} has no numbers yet, so there is nothing to save. Next: run the model once.")
    if tensor.device.type == "meta":
        raise GuardError(f"{name} is on the meta device, where nothing can be saved. Next: to_empty() gives it memory.")
    if not _torch.has_numbers(tensor):
        raise GuardError(f"{name} stands for other tensors (a trace, a transform), and cannot be saved there.")
    if hasattr(type(_torch.own_part(tensor)), "__tensor_flatten__"):
        kind = type(tensor).__name__
        raise GuardError(
            f"{name} is a {kind}, which wraps other tensors that would not be saved. Next: guard it unwrapped."
        )


def can_be_saved(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers of its own that can be copied."""
    try:
        _check(tensor, "")
    except GuardError:
        return False
    return True
