"""Note the memory, numbers, flags and counters of tensors, tell which have changed, and put each back.

`SnapshotPart` and `Snapshot` call this; it calls `MemoryCopies`. A tensor that is put back stays the same object. What
was worked out about the tensors is used again as long as they are the same. Every question goes to all tensors at
once, without a line of Python for each: a model has hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter, is_, ne
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hookline.guard.saveable import check_saveable
from hookline.guard.tensor_copies import BufferPool, MemoryCopies, Where
from hookline.sites import _torch

__all__ = ["TensorStates"]

_address: Final = Tensor.data_ptr
_nbytes: Final = torch.UntypedStorage.nbytes
_begin: Final = torch.UntypedStorage.data_ptr
_layout: Final = attrgetter("shape", "dtype")
_requires_grad: Final = attrgetter("requires_grad")
_is_leaf: Final = attrgetter("is_leaf")
_version: Final = attrgetter("_version")
_COMPUTED: Final = (True, False)
"""The flags of a tensor that has a graph."""


class _Flags(NamedTuple):
    """Whether tensors require gradients, and whether they are leaves; one that requires none is a leaf."""

    requires: list[bool]
    leaves: list[bool]
    """Of those that require gradients: to ask all would take as long as all else that is asked of them."""

    def by_tensor(self) -> list[tuple[bool, bool]]:
        """Return both flags of each tensor."""
        leaves = iter(self.leaves)
        return [(requires, next(leaves) if requires else True) for requires in self.requires]


class TensorStates:
    """Some tensors, and their states when `take` was last called."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._pools: dict[str, BufferPool] = {}
        self._copies: dict[str, tuple[tuple[int, ...], MemoryCopies]] = {}
        self._current: MemoryCopies | None = None
        self._is_copied_back = False
        self._is_in_place = False
        """Whether the memory was found where it was, and nothing but the guard has run since."""
        self._is_displaced = False
        """Whether the memory that is copied was found elsewhere when a save began."""
        self._is_unwritten = False
        """Whether a `restore` that came at once after `look` had nothing to put back but numbers."""
        self._looked: tuple[list[int], list[int], bool] | None = None
        """The tensors that have moved, those that have other flags, and whether no counter has moved, as `look` has
        found them."""
        self.stuck: list[int] = []
        """The indices of tensors that have a graph they did not have, and could not be detached."""
        self.replaced: list[int] = []
        """The indices of those that the latest `restore` had to give other memory."""
        self.moved: list[Tensor] = []
        """Those whose memory the latest `restore` has found elsewhere."""
        self.has_new_internals = False
        """Whether the latest `restore` had to detach a view, which gives it other internals."""
        self.assign([], [])

    def assign(self, tensors: list[Tensor], names: Sequence[str]) -> None:
        """Keep the states of these ``tensors`` from now on; refuse one that cannot be saved, by its name."""
        self._current, self.tensors = None, []
        self._copies.clear()
        for tensor, name in zip(tensors, names, strict=True):
            check_saveable(tensor, name)
        # What has the memory is the tensor itself, or a part of it; sparse ones have none of the usual kind.
        self._live: list[Tensor] = [_torch.own_part(tensor) for tensor in tensors]
        self._dense = [index for index, live in enumerate(self._live) if live.layout is torch.strided]
        self._strided = [self._live[index] for index in self._dense]
        self._sparse_indices = set(range(len(tensors))).difference(self._dense)
        self._is_plain = self._dense == list(range(len(tensors))) and all(map(is_, self._live, tensors))
        """Whether each tensor has its memory itself, so that one check of them all tells their flags, too."""
        # Complex numbers may be read with the other sign of their imaginary part.
        conj = (Tensor.is_conj,) if any(map(Tensor.is_complex, self._strided)) else ()
        self._layout_queries: tuple[Callable[[Tensor], Any], ...] = (_address, _layout, Tensor.stride, *conj)
        self.tensors = tensors
        self._note_layouts()
        self._note_memory()
        self._counted = [index for index, tensor in enumerate(tensors) if not tensor.is_inference()]
        self._counters = [tensors[index] for index in self._counted]
        self._note(())

    def _note_memory(self) -> None:
        self._storages = [live.untyped_storage() for live in self._strided]
        self._sizes, self._begins = self._sizes_now(), self._begins_now()
        self._aliases = [live.detach() for live in self._strided]

    @property
    def has_graphs(self) -> bool:
        """Whether a tensor was computed from others, and so keeps a graph alive."""
        return False in self._flags.leaves

    @property
    def is_as_seen(self) -> bool:
        """Whether the latest `look` has found nothing other: no address, layout, counter or flag."""
        return not self.tensors or self._looked == ([], [], True)

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return self._current.nbytes if self._current is not None else 0

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device that holds a tensor, the device of its copies."""
        return {device: at for pool in self._pools.values() for device, at in pool.devices.items()}

    # -- saving --------------------------------------------------------------------------------------------------

    def begin(self, which: str) -> None:
        """Start copying the tensors of last time, before it is known whether they are still all (GPUs go on).

        It is enough that their storages are as they were: whether tensors still lie in them, `is_about` finds out.
        """
        known = self._copies.get(which)
        self._current, self._is_in_place, self._is_displaced = None, False, False
        if known is None:
            return
        self._is_displaced = not self._find_in_place(known[1])
        if not self._is_displaced:
            self._current = known[1]
            self._current.save()

    def is_about(self, tensors: list[Tensor]) -> bool:
        """Return whether these are the tensors of last time, with their memory where it was; after `begin`."""
        if tensors is not self.tensors and not _are_same(tensors, self.tensors):
            return False
        if self._is_displaced or self._moved():
            return False
        if tensors and not self._is_checked:
            self._note_layouts()  # a flag or a mode is another one: the next check is to be quick again
        return True

    def _find_in_place(self, copies: MemoryCopies) -> bool:
        """Return whether nothing keeps from copying: the memory is where it was and as long, or there is none to copy.

        A storage shrunk twice may begin at the same address again.
        """
        if not copies.nbytes:
            return True
        self._is_in_place = self._sizes_now() == self._sizes and self._begins_now() == self._begins
        return self._is_in_place

    def take(self, which: str, chosen: tuple[int, ...]) -> None:
        """Note the states, and copy the numbers of the tensors at the indices ``chosen``, unless `begin` has."""
        self._is_in_place = False
        key, copies = self._copies.get(which, (None, None))
        if copies is None or key != chosen:
            pool = self._pools.setdefault(which, BufferPool(self._where))
            wanted = set(chosen)
            self._note_memory()  # only saves with copies ask where storages begin
            copies = MemoryCopies([self._live[index] for index in self._dense if index in wanted], pool)
            self._copies[which] = chosen, copies
            self._current = None
        if self._current is None:
            copies.save()
        self._current = copies
        self._note(chosen)

    def _note(self, chosen: tuple[int, ...]) -> None:
        self._chosen, self._looked, self._sparse = chosen, None, []
        if self._sparse_indices:
            sparse = [self._live[index] for index in chosen if index in self._sparse_indices]
            with torch.no_grad():
                self._sparse = [(live, live.clone()) for live in sparse]
        self._flags = self._flags_now()
        flags = enumerate(self._flags.by_tensor() if self.has_graphs else ())
        self._graphs = {index: self.tensors[index].grad_fn for index, each in flags if each == _COMPUTED}
        """The node that computed a tensor: a write in place gives it another one."""
        self._versions = list(map(_version, self._counters))

    # -- afterwards ----------------------------------------------------------------------------------------------

    def _sizes_now(self) -> list[int]:
        """Return the lengths of the storages that the tensors had."""
        return list(map(_nbytes, self._storages))

    def _begins_now(self) -> list[int]:
        """Return the addresses of these storages."""
        return list(map(_begin, self._storages))

    def _layouts_now(self) -> list[list[Any]]:
        """Return the address and layout of every tensor with memory."""
        return [list(map(query, self._strided)) for query in self._layout_queries]

    def _note_layouts(self) -> None:
        self._layouts = self._layouts_now()
        self._requires = list(map(_requires_grad, self.tensors))
        self._requiring = list(compress(self.tensors, self._requires))
        # Asked in one call, which takes a fifth of the time; it may say no where nothing is other.
        self._layout_check = None if len(self._layouts) > 3 else _torch.layout_check(self._strided)
        self._is_checked = self._layout_check is not None
        """Whether the latest check has found all layouts, and all that requires gradients, as they were noted."""

    def _has_same_layouts(self) -> bool:
        self._is_checked = self._layout_check is not None and self._layout_check()
        if not self._is_checked:
            return self._layouts_now() == self._layouts
        return list(map(_address, self._strided)) == self._layouts[0]

    def _flags_now(self) -> _Flags:
        """Return the flags; what requires gradients, the check of the layouts has told where it found nothing other."""
        requires, requiring = self._requires, self._requiring
        if not (self._is_checked and self._is_plain):
            requires = list(map(_requires_grad, self.tensors))
            requiring = list(compress(self.tensors, requires))
        return _Flags(requires, list(map(_is_leaf, requiring)))

    def _moved(self) -> list[int]:
        """Return the indices, in ``_strided``, of tensors that have other memory or another layout.

        Where nothing is copied, nobody asks where storages begin: the tensors' own addresses tell nearly as much.
        """
        is_in_place, self._is_in_place, self._is_checked = self._is_in_place, False, False
        if not self._strided:
            return []
        sizes = self._sizes if is_in_place else self._sizes_now()
        begins = self._begins if is_in_place or not self.nbytes else self._begins_now()
        if sizes == self._sizes and begins == self._begins and self._has_same_layouts():
            return []
        self._is_checked = False
        before = list(zip(*self._layouts, self._sizes, self._begins, strict=True))
        return _different(zip(*self._layouts_now(), sizes, begins, strict=True), before)

    def look(self) -> tuple[list[int], list[int]]:
        """Return the indices of tensors written, as far as counters and addresses tell, and of those with other flags.

        A `restore` that comes at once uses what was seen here: asking 600 tensors takes half a millisecond.
        """
        if not self.tensors:
            self._looked = [], [], True
            return [], []
        moved, flags = self._moved(), self._with_other_flags()
        written = {self._dense[number] for number in moved}
        written.update(self._counted[number] for number in _different(map(_version, self._counters), self._versions))
        self._looked = moved, flags, not written
        return sorted(written), flags

    def differing(self) -> list[int]:
        """Return the indices of tensors whose copied numbers are not the same any more, whoever wrote them."""
        if self._current is None:
            return []
        wanted = set(self._chosen)
        copied = [index for index in self._dense if index in wanted]
        if (self._sizes_now(), self._begins_now()) != (self._sizes, self._begins):
            return copied  # some reach beyond their memory, and nothing of them can be read
        return [copied[number] for number in sorted(self._current.differing())]

    def _with_other_flags(self) -> list[int]:
        """Return the indices of tensors that require gradients and did not, or the other way round."""
        now = self._flags_now()
        return [] if now == self._flags else _different(now.by_tensor(), self._flags.by_tensor())

    def begin_restore(self) -> None:
        """Start copying back, if all memory is where it was; a tensor that has other memory now is put back into it."""
        self._is_copied_back = self._is_in_place = False
        if self.nbytes and self._current is not None and self._find_in_place(self._current):
            self._is_copied_back = True
            self._current.restore()

    def restore(self, *, looked: bool = False) -> None:
        """Put back memory, numbers and flags; counters come last, by `restore_versions`.

        ``looked``: nothing has happened since `look`.
        """
        seen, self._looked = self._looked, None
        moved, flags, unwritten = seen if looked and seen is not None else (self._moved(), None, False)
        self._is_unwritten = unwritten and not moved and not flags and not self._sparse
        self.replaced, self.has_new_internals = [], False
        for number in moved:
            self._restore_memory(number)
        self.moved = [self._strided[number] for number in moved]
        if moved:
            self._note_layouts()  # what was resized is elsewhere
            self._sizes, self._begins = self._sizes_now(), self._begins_now()
        if not self._is_copied_back and self._current is not None:
            self._current.restore()
        self._is_copied_back = False
        with torch.no_grad():
            for live, numbers in self._sparse:
                live.copy_(numbers)
        others = self._with_other_flags() if flags is None or moved else flags  # moving may have changed some
        before = self._flags.by_tensor() if others else []
        self.stuck = [index for index in others if not self._restore_flags(index, *before[index])]
        self.stuck += [index for index, node in self._graphs.items() if self.tensors[index].grad_fn is not node]

    def _restore_memory(self, number: int) -> None:
        storage, nbytes = self._storages[number], self._sizes[number]
        if storage.nbytes() != nbytes:
            try:
                storage.resize_(nbytes)
            except RuntimeError:  # after .numpy() torch does not resize it any more
                if storage.nbytes() < nbytes:
                    self._replace_storage(storage, nbytes)
        self._strided[number].data = self._aliases[number]

    def _replace_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Move all tensors of a storage into a new one of ``nbytes``; tensors not known here stay in the old one."""
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

    def _restore_flags(self, index: int, requires_grad: bool, was_leaf: bool) -> bool:
        """Put the flags of a tensor back; return False if it cannot be detached."""
        tensor = self.tensors[index]
        # A view that was detached before, and is written with a graph again, calls itself a leaf.
        is_view = tensor._base is not None
        if was_leaf and (not tensor.is_leaf or (is_view and tensor.requires_grad and not requires_grad)):
            self.has_new_internals |= is_view
            if not _detach(tensor):
                return False
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        return True

    def advance_versions(self) -> None:
        """Count one more write of everything copied: it holds numbers of another time than its counter says."""
        copied = set(self._chosen)
        tensors = [self.tensors[index] for index in self._counted if index in copied]
        _torch.set_versions(tuple(tensors), tuple(tensor._version + 1 for tensor in tensors))

    def restore_versions(self) -> None:
        """Set autograd's counters back, so that a backward pass whose forward is over finds what it left.

        Only where the numbers were put back; a counter that was set back otherwise would hide that they are others.
        """
        if self._is_unwritten:
            return
        copied = set(self._chosen)
        numbers = _different(map(_version, self._counters), self._versions)
        pairs = [(self._counters[n], self._versions[n]) for n in numbers if self._counted[n] in copied]
        if pairs:
            tensors, versions = zip(*pairs, strict=True)
            _torch.set_versions(tensors, versions)


def _are_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _different(now: Iterable[Any], before: list[Any]) -> list[int]:
    """Return the positions at which two sequences of the same length differ."""
    values = list(now)
    if values == before:
        return []
    return [number for number, is_other in enumerate(map(ne, values, before)) if is_other]


def _detach(tensor: Tensor) -> bool:
    """Detach a tensor that was written with a graph; return False if that is not possible.

    A view cannot be detached in place: it gets the internals of another view of the same base, and is the same object.
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
