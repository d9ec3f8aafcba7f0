"""Keep an alias and a copy of every tensor, tell which have changed, and put each back.

`Snapshot` has a `SavedTensors` for the tensors of model and optimizer, one for the rest, and one for the gradients. The
alias has the memory and the layout that a tensor had, the copy its bytes: to restore, the alias is put back into the
tensor and the copy into the memory. A tensor that is put back stays the same object. Every question goes to all
tensors at once, without a line of Python for each: a model has hundreds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from operator import attrgetter, is_, ne
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.errors import GuardError
from hookline.guard.walk import check_saveable
from hookline.sites import _torch

__all__ = [
    "WRITTEN_WITH_GRAPH",
    "Buffer",
    "CopyMemory",
    "SavedTensors",
    "TensorLook",
    "Where",
    "repair_accumulators",
    "restore_internals",
]

Where: TypeAlias = Literal["auto", "device", "host"]

WRITTEN_WITH_GRAPH: Final = "written with a graph"
"""Why a tensor cannot be put back: it is a view, or was computed, and has another graph now."""
_OTHER_MEMORY: Final = "its memory was shrunk, and shown to NumPy, so it has other memory now"
_ALIGNED: Final = 64
"""Bytes; kernels that copy 16 or 32 at once want their addresses to be a multiple of that."""
_WIDE: Final = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Integers, since a multi-tensor copy of half-precision floats on CUDA makes other NaNs of some. Those of four bytes
are the fastest: on an H200 1.14 ms for 1.96 GB, as float32; of eight bytes 1.40, of two 1.44, of sixteen 1.90."""
_LARGE: Final = 32 * 2**20
"""Bytes, from which on a piece on a device is copied by itself and first: 1.08 ms instead of 1.14, 10 µs a launch."""
_SHARE: Final = 0.9
"""The share of a device's free memory that copies may take; the rest is for what the run is going to do."""

_layout: Final = attrgetter("shape", "dtype", "device")
_requires_grad: Final = attrgetter("requires_grad")
_is_leaf: Final = attrgetter("is_leaf")
_version: Final = attrgetter("_version")
_nbytes: Final = torch.UntypedStorage.nbytes
_begin: Final = torch.UntypedStorage.data_ptr

# -- memory --------------------------------------------------------------------------------------------------------


class Buffer(NamedTuple):
    """Memory for the copies of one group of tensors on one device."""

    memory: Tensor
    layout: list[Any]
    """The type and the shapes that it was last divided by: a run asks for the same ones every time."""
    pieces: list[Tensor]


class CopyMemory:
    """Memory for copies: one buffer for each group of tensors and device, used again as long as it is large enough."""

    def __init__(self, where: Where = "auto") -> None:
        self.where = where
        self.buffers: dict[Any, Buffer] = {}
        """By the device of what is copied, and the group."""

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device that has something to copy, the device of the copies."""
        return {device: buffer.memory.device for (device, _), buffer in self.buffers.items()}

    def on_host(self) -> dict[Any, Buffer]:
        """Return the buffers for copies of what is on the host."""
        return {key: buffer for key, buffer in self.buffers.items() if key[0].type == "cpu"}

    def pieces_like(self, pieces: Sequence[Tensor], group: object) -> list[Tensor]:
        """Return memory for copies of ``pieces``, of one device and type, as tensors of the same shapes."""
        device, dtype, shapes = pieces[0].device, pieces[0].dtype, [piece.shape for piece in pieces]
        key, layout = (device, group), [dtype, *shapes]
        buffer = self.buffers.pop(key, None)
        if buffer is None or buffer.layout != layout:
            sizes = [piece.nbytes for piece in pieces]
            padding = [-size % _ALIGNED for size in sizes]
            nbytes = sum(sizes) + sum(padding)
            memory = None if buffer is None or buffer.memory.numel() < nbytes else buffer.memory
            buffer = None  # free it before a larger one is made
            memory = self._allocate(device, nbytes) if memory is None else memory
            lengths = [n // dtype.itemsize for pair in zip(sizes, padding, strict=True) for n in pair]
            parts = memory[:nbytes].view(dtype).split_with_sizes(lengths)[::2]
            made = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            buffer = Buffer(memory, layout, made)
        self.buffers[key] = buffer
        return buffer.pieces

    def _allocate(self, device: torch.device, nbytes: int) -> Tensor:
        on_cpu = device.type == "cpu"
        if not on_cpu and (self.where == "device" or (self.where == "auto" and _fits(device, nbytes))):
            try:
                return _empty(nbytes, device)
            except torch.OutOfMemoryError:
                if self.where == "device":
                    raise GuardError(_no_room(nbytes, device, "where='host' or 'auto'")) from None
        try:
            return _empty(nbytes, torch.device("cpu"), pinned=not on_cpu)
        except (RuntimeError, MemoryError) as error:
            text = _no_room(nbytes, device, "a narrower scope, scope='grads' or 'reads'")
            raise GuardError(f"{text} The host said: {error}") from error


def _empty(nbytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def _fits(device: torch.device, nbytes: int) -> bool:
    """Return whether the device has room, counting what torch holds there and does not use."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return nbytes <= _SHARE * (free + unused)


def _no_room(nbytes: int, device: torch.device, remedy: str) -> str:
    return (
        f"The guard needs {nbytes / 2**20:,.0f} MiB to save what is on {device}, and there is no room for it. "
        f"Nothing was touched. Next: {remedy}."
    )


class MemoryCopies:
    """A copy of the memory of some tensors: of every storage one piece, however many tensors share it."""

    def __init__(self, aliases: dict[int, Tensor], memory: CopyMemory, group: str) -> None:
        members: dict[tuple[torch.device, int], list[int]] = defaultdict(list)
        for index, alias in aliases.items():
            if alias.numel():
                members[alias.device, alias.untyped_storage().data_ptr()].append(index)
        lists: dict[tuple[Any, ...], _PieceList] = {}
        for indices in members.values():
            piece = _piece_of([aliases[index] for index in indices])
            large = piece.nbytes >= _LARGE and piece.device.type != "cpu"
            found = lists.setdefault((not large, piece.device, piece.dtype), _PieceList(large, [], [], []))
            found.pieces.append(piece)
            found.members.append(indices)
        self._lists = [lists[key] for key in sorted(lists, key=str)]  # large ones first
        for number, found in enumerate(self._lists):
            found.copies.extend(memory.pieces_like(found.pieces, (group, number)))
        self.nbytes = sum(piece.nbytes for found in self._lists for piece in found.pieces)

    def save(self) -> None:
        """Copy from the tensors, without waiting: later work on the device comes after the copy."""
        for found in self._lists:
            _copy(found.copies, found.pieces, each=found.is_large)

    def restore(self) -> None:
        """Copy into the memory that the tensors had; autograd does not notice."""
        for found in self._lists:
            _copy(found.pieces, found.copies, each=found.is_large)

    def move(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Use the storage ``new`` for what lay in ``old``."""
        for found in self._lists:
            for piece in found.pieces:
                _move(piece, old, new)

    def differing(self) -> set[int]:
        """Return the indices of the tensors in whose memory a byte is not as it was; reads everything."""
        return {
            index
            for found in self._lists
            for piece, copy, indices in zip(found.pieces, found.copies, found.members, strict=True)
            if not torch.equal(_bytes_of(piece), _bytes_of(copy.to(piece.device)))
            for index in indices
        }


class _PieceList(NamedTuple):
    """Pieces of memory on one device, of one type, and their copies."""

    is_large: bool
    pieces: list[Tensor]
    copies: list[Tensor]
    members: list[list[int]]
    """The indices of the tensors that lie in each."""


def _copy(targets: list[Tensor], sources: list[Tensor], *, each: bool) -> None:
    """Copy all of a list at once, or ``each`` by itself."""
    if not each:
        _torch.copy_all(targets, sources, non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def _move(tensor: Tensor, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
    if tensor.untyped_storage()._cdata == old._cdata:
        tensor.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())


def _piece_of(aliases: list[Tensor]) -> Tensor:
    """Return a view of all that the ``aliases``, which begin in one storage, use; copying it keeps every bit."""
    first = aliases[0]
    if first.device.type == "cpu" and len(aliases) == 1 and _is_whole(first):
        return first
    # Views of one NumPy array have storages of their own that begin at the same byte: the longest has them all.
    storage = max((alias.untyped_storage() for alias in aliases), key=_nbytes)
    begins, ends = zip(*map(_span, aliases), strict=True)
    begin, end = min(begins), max(ends)
    width, dtype = next((width, dtype) for width, dtype in _WIDE if math.gcd(begin, end) % width == 0)
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, begin // width, ((end - begin) // width,))  # type: ignore[call-overload,no-any-return]


def _is_whole(alias: Tensor) -> bool:
    """Return whether a tensor is all of its storage, and can be written as it is."""
    is_plain = alias.is_contiguous() and not alias.is_inference() and not alias.is_conj()
    return is_plain and alias.nbytes == alias.untyped_storage().nbytes()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor uses, and the one after the last."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first * tensor.itemsize), int((last + 1) * tensor.itemsize)


# -- tensors -------------------------------------------------------------------------------------------------------


class TensorLook(NamedTuple):
    """What was found other when some tensors were looked at, by their indices."""

    written: set[int]
    """As far as counters and addresses tell."""
    flags: set[int]
    """Those that require gradients and did not, or have a graph and had none, or the other way round."""
    suspects: set[int]
    """Those of which more than the numbers may be other: memory, flags, insides, references, attributes, hooks."""


class _Flags(NamedTuple):
    """Whether tensors require gradients, and whether they are leaves; one that requires none is a leaf."""

    requires: list[bool]
    leaves: list[bool]
    """Of those that require gradients: to ask all would take as long again."""

    def by_tensor(self) -> list[tuple[bool, bool]]:
        """Return both flags of each tensor."""
        leaves = iter(self.leaves)
        return [(requires, next(leaves) if requires else True) for requires in self.requires]


class SavedTensors:
    """Some tensors, as they were when `take` was last called."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        kinds: Sequence[str],
        name: Callable[[int], str],
        memory: CopyMemory,
        group: str,
    ) -> None:
        """Look after ``tensors`` of these ``kinds``; refuse one that cannot be saved, by its ``name``.

        The copies are in the part of ``memory`` for this ``group``.
        """
        for index, tensor in enumerate(tensors):
            check_saveable(tensor, lambda index=index: name(index))  # type: ignore[misc]
        self.tensors, self.kinds, self.name = list(tensors), list(kinds), name
        self._memory, self._group = memory, group
        # What has the memory is the tensor itself, or a part of it; sparse ones have none of the usual kind.
        self._live: list[Tensor] = [_torch.own_part(tensor) for tensor in tensors]
        self._dense = [index for index, live in enumerate(self._live) if live.layout is torch.strided]
        self._strided = [self._live[index] for index in self._dense]
        self._without_memory = set(range(len(tensors))).difference(self._dense)
        self._aliases = [live.data for live in self._strided]
        self._storages = [alias.untyped_storage() for alias in self._aliases]
        self._counted = [index for index, tensor in enumerate(tensors) if not tensor.is_inference()]
        self._counters = [self.tensors[index] for index in self._counted]
        self.identities = list(map(_torch.identity_of, tensors))
        # Others are asked little later. To ask a plain tensor for its attributes would make a dictionary; torch refuses
        # to swap one that anything refers to, and swapping gives it other memory.
        self._with_attributes = [index for index, tensor in enumerate(tensors) if type(tensor) is not Tensor]
        self._holders = [self.tensors[index] for index in self._with_attributes]
        # Complex numbers may be read with the other sign of their imaginary part.
        conj = (Tensor.is_conj,) if any(map(Tensor.is_complex, self._strided)) else ()
        self._layout_queries: tuple[Callable[[Tensor], Any], ...] = (_layout, Tensor.stride, *conj)
        self._not_of_optimizer = [index for index, kind in enumerate(kinds) if kind != "state"]
        self._copies: dict[frozenset[str], MemoryCopies] = {}
        self.current: MemoryCopies | None = None
        self.copied: frozenset[str] = frozenset()
        """The kinds of the tensors that were copied."""
        self._is_copied_back = False
        self._note_memory()

    # -- saving --------------------------------------------------------------------------------------------------

    def begin(self, copied: frozenset[str]) -> bool:
        """Copy the tensors of these kinds at once, if they were copied before and lie where they lay."""
        self.current = self._copies.get(copied)
        if self.current is None or (self.current.nbytes and not self._has_same_storages()):
            return False
        self.current.save()
        return True

    def is_in_place(self) -> bool:
        """Return whether every tensor has the memory and layout that it had."""
        return not self._moved()

    def take(self, copied: frozenset[str], *, begun: bool = False) -> None:
        """Note the states, and copy the numbers of the tensors of these kinds, unless `begin` has."""
        if not begun:
            pairs = zip(self._dense, self._aliases, strict=True)
            aliases = {index: alias for index, alias in pairs if self.kinds[index] in copied}
            self.current = self._copies.get(copied) or MemoryCopies(aliases, self._memory, self._group)
            self._copies[copied] = self.current
            self.current.save()
        self.copied = copied
        self._note()

    def _note_memory(self) -> None:
        self._sizes, self._begins = list(map(_nbytes, self._storages)), list(map(_begin, self._storages))
        self._addresses, self._layouts = list(map(Tensor.data_ptr, self._strided)), self._layouts_now()
        # Asked in one call, which takes a tenth of the time; it may say no where nothing is other.
        self._layout_check = None if len(self._layout_queries) > 2 else _torch.layout_check(self._strided)

    def _layouts_now(self) -> list[tuple[Any, ...]]:
        return list(zip(*(map(query, self._strided) for query in self._layout_queries), strict=True))

    def _note(self) -> None:
        self._asked = list(map(_torch.identity_of, self._holders))
        for index, identity in zip(self._with_attributes, self._asked, strict=True):
            self.identities[index] = identity
        self._flags = self._flags_now()
        self._versions = list(map(_version, self._counters))
        flags = enumerate(self._flags.by_tensor() if self.has_graphs else ())
        self._graphs = {index: self.tensors[index].grad_fn for index, (_, is_leaf) in flags if not is_leaf}
        """The node that computed a tensor: a write in place gives it another one."""
        self._sparse = {i: self._live[i].clone() for i in self._without_memory if self.kinds[i] in self.copied}
        self._classes = list(map(type, self._holders))
        self._attributes = list(map(vars, self._holders))
        self._hooks = self._hooks_now()
        self._hook_items = [[tuple(held.items()) if held else () for held in each] for each in self._hooks]
        """What is in each dictionary of hooks."""
        self._uses = list(map(_torch.use_count, self._holders))
        each = zip(self._with_attributes, self._uses, strict=True)
        self.used = {index for index, count in each if count > 1} if self._uses.count(1) < len(self._uses) else set()
        """The indices of those that something refers to: graphs, views."""
        found = {index: _live_node(self.tensors[index]) for index in self.used}
        self.nodes = {index: node for index, node in found.items() if node is not None}
        """The nodes that graphs of before refer to; none where no graph is alive."""

    def _flags_now(self) -> _Flags:
        requires = list(map(_requires_grad, self.tensors))
        return _Flags(requires, list(map(_is_leaf, compress(self.tensors, requires))))

    def _hooks_now(self) -> list[list[Any]]:
        """Return the dictionaries of each kind of hooks; None for a tensor that never had one of the kind."""
        return [list(map(attrgetter(name), self._holders)) for name in _torch.TENSOR_HOOKS]

    def leaves(self) -> list[int]:
        """Return the indices of tensors that can have a gradient: those not computed, but for the optimizer's."""
        if not self._graphs:
            return self._not_of_optimizer
        return [index for index in self._not_of_optimizer if index not in self._graphs]

    def forget(self) -> None:
        """Let go of graphs."""
        self._graphs, self.nodes, self._sparse = {}, {}, {}

    @property
    def has_graphs(self) -> bool:
        """Whether a tensor was computed from others, and so keeps a graph alive."""
        return False in self._flags.leaves

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return self.current.nbytes if self.current is not None else 0

    # -- looking -------------------------------------------------------------------------------------------------

    def _has_same_storages(self) -> bool:
        """Return whether all storages are as long as they were, and begin there.

        One that was shrunk twice may begin at the same address again. Where nothing is copied, the addresses of the
        tensors tell nearly as much.
        """
        is_long = list(map(_nbytes, self._storages)) == self._sizes
        return is_long and (not self.nbytes or list(map(_begin, self._storages)) == self._begins)

    def _moved(self) -> list[int]:
        """Return the numbers, in ``_strided``, of tensors that have other memory or another layout."""
        same = self._has_same_storages()
        addresses = list(map(Tensor.data_ptr, self._strided))
        is_checked = self._layout_check is not None and self._layout_check()
        if same and addresses == self._addresses and (is_checked or self._layouts_now() == self._layouts):
            return []
        now = zip(
            addresses, self._layouts_now(), map(_nbytes, self._storages), map(_begin, self._storages), strict=True
        )
        before = zip(self._addresses, self._layouts, self._sizes, self._begins, strict=True)
        return _different(list(now), list(before))

    def look(self, *, bytewise: bool = False) -> TensorLook:
        """Return what is other now; ``bytewise``: also numbers that were written behind autograd's back."""
        moved = {self._dense[number] for number in self._moved()}
        now = self._flags_now()
        flags = set() if now == self._flags else set(_different(now.by_tensor(), self._flags.by_tensor()))
        written = moved | {self._counted[n] for n in _different(list(map(_version, self._counters)), self._versions)}
        if bytewise and self.current is not None:
            is_whole = self._has_same_storages()  # or some reach beyond their memory, and nothing of them can be read
            written |= (
                self.current.differing() if is_whole else {i for i in self._dense if self.kinds[i] in self.copied}
            )
        suspects = moved | flags | set(self.nodes) | set(self._sparse)
        suspects.update(i for i, node in self._graphs.items() if self.tensors[i].grad_fn is not node)
        suspects.update(self._with_other_attributes())
        return TensorLook(written, flags, suspects)

    def _with_other_attributes(self) -> Iterable[int]:
        """Return the indices of tensors with another class, other insides or attributes, and perhaps other hooks."""
        if any(map(any, self._hooks)) or any(map(any, self._hooks_now())):
            return self._with_attributes
        numbers = _different(list(map(type, self._holders)), self._classes)
        numbers += _different(list(map(_torch.identity_of, self._holders)), self._asked)
        numbers += _different(list(map(_torch.use_count, self._holders)), self._uses)
        if not all(map(is_, map(vars, self._holders), self._attributes)):
            numbers += [n for n, holder in enumerate(self._holders) if vars(holder) is not self._attributes[n]]
        return [self._with_attributes[number] for number in numbers]

    # -- restoring -----------------------------------------------------------------------------------------------

    def begin_restore(self) -> None:
        """Start copying back, if all memory is where it was: a GPU copies while the rest is done."""
        if self.nbytes and self._has_same_storages():
            self._is_copied_back = True
            self._copies[self.copied].restore()

    def restore_memory(self, suspects: Collection[int]) -> dict[str, str]:
        """Put back memory, layout and numbers; return the names of tensors that had to be given other memory."""
        replaced: dict[str, str] = {}
        moved = self._moved() if suspects else []
        for number in moved:
            storage, nbytes = self._storages[number], self._sizes[number]
            if storage.nbytes() != nbytes:
                try:
                    storage.resize_(nbytes)
                except RuntimeError:  # after .numpy() torch does not resize it any more
                    if storage.nbytes() < nbytes:
                        replaced |= dict.fromkeys(self._replace_storage(storage, nbytes), _OTHER_MEMORY)
            self._strided[number].data = self._aliases[number]
        if moved:
            self._note_memory()  # what was resized is elsewhere
        if not self._is_copied_back and self.current is not None:
            self.current.restore()
        self._is_copied_back = False
        for index, numbers in self._sparse.items():
            self._live[index].copy_(numbers)
        return replaced

    def _replace_storage(self, storage: torch.UntypedStorage, nbytes: int) -> list[str]:
        """Move all tensors of a storage into a new one of ``nbytes``, and return their names; others stay there."""
        fresh = torch.empty(nbytes, dtype=torch.uint8, device=storage.device).untyped_storage()
        numbers = [number for number, held in enumerate(self._storages) if held._cdata == storage._cdata]
        for copies in self._copies.values():
            copies.move(storage, fresh)
        for number in numbers:
            self._storages[number] = fresh
            _move(self._aliases[number], storage, fresh)
            self._strided[number].data = self._aliases[number]
        return [self.name(self._dense[number]) for number in numbers]

    def restore_flags(self, suspects: Collection[int]) -> dict[str, str]:
        """Put back flags and hooks; return the names of tensors that have a graph and cannot be detached."""
        numbers = {index: number for number, index in enumerate(self._with_attributes)} if suspects else {}
        flags = self._flags.by_tensor() if suspects else []
        stuck = {}
        for index in suspects:
            if not self._restore_flags(index, *flags[index]):
                stuck[self.name(index)] = WRITTEN_WITH_GRAPH
            if index in numbers:
                self._restore_hooks(numbers[index])
        return stuck

    def _restore_flags(self, index: int, requires_grad: bool, was_leaf: bool) -> bool:
        tensor = self.tensors[index]
        if not was_leaf:
            return tensor.grad_fn is self._graphs[index]
        # A view that was detached before, and is written with a graph again, calls itself a leaf.
        is_view = tensor._base is not None
        if not tensor.is_leaf or (is_view and tensor.requires_grad and not requires_grad):
            if not _detach(tensor):
                return False
            self.identities[index] = _torch.identity_of(tensor)  # a view has got others
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        return True

    def _restore_hooks(self, number: int) -> None:
        """Put hooks back; set each dictionary anew, since the internals may be others, which do not know it yet."""
        tensor = self._holders[number]
        for name, dictionaries, items in zip(_torch.TENSOR_HOOKS, self._hooks, self._hook_items, strict=True):
            held, own = getattr(tensor, name), dictionaries[number]
            if held:
                held.clear()
            if own is not None:
                own.clear()
                own.update(items[number])
                setattr(tensor, name, own)

    def restore_attributes(self, suspects: Collection[int]) -> None:
        """Give tensors their class and their dictionary of attributes again."""
        each = zip(self._with_attributes, self._holders, self._classes, self._attributes, strict=True)
        for index, holder, cls, attributes in each if suspects else ():
            if index in suspects:
                if type(holder) is not cls:
                    holder.__class__ = cls
                if vars(holder) is not attributes:
                    holder.__dict__ = attributes

    def restore_versions(self) -> None:
        """Set autograd's counters back, so that a backward pass whose forward is over finds what it left.

        Only where the numbers were put back; a counter that was set back otherwise would hide that they are others.
        """
        others = _different(list(map(_version, self._counters)), self._versions)
        numbers = [number for number in others if self.kinds[self._counted[number]] in self.copied]
        tensors, versions = [self._counters[n] for n in numbers], [self._versions[n] for n in numbers]
        _torch.set_versions(tuple(tensors), tuple(versions))

    def advance_versions(self) -> None:
        """Count one more write of everything copied: it holds numbers of another time than its counter says."""
        tensors = [self.tensors[index] for index in self._counted if self.kinds[index] in self.copied]
        _torch.set_versions(tuple(tensors), tuple(tensor._version + 1 for tensor in tensors))


def _different(now: list[Any], before: list[Any]) -> list[int]:
    """Return the positions at which two lists of the same length differ."""
    return [] if now == before else [number for number, is_other in enumerate(map(ne, now, before)) if is_other]


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


# -- internals -----------------------------------------------------------------------------------------------------


def restore_internals(tables: Sequence[SavedTensors]) -> dict[str, str]:
    """Give tensors the C++ objects again that ``swap_tensors`` has exchanged.

    Return the names of those whose own are gone though something refers to them, and why.
    """
    lost: dict[str, str] = {}
    holders = {_torch.identity_of(tensor): tensor for table in tables for tensor in table.tensors}
    holders |= {table.identities[index]: node.variable for table in tables for index, node in table.nodes.items()}
    for table in tables:
        for index in _different(list(map(_torch.identity_of, table.tensors)), table.identities):
            tensor, own = table.tensors[index], table.identities[index]
            now, holder = _torch.identity_of(tensor), holders.get(own)
            if now == own:
                continue
            if holder is not None and _try_swap(tensor, holder):
                holders[now], holders[own] = holder, tensor
                continue
            # Hooks of autograd sit in the internals. New ones have none; numbers and flags are put back into them.
            _torch.swap_insides(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            table.identities[index] = _torch.identity_of(tensor)
            if index in table.used:
                lost[table.name(index)] = "swap_tensors() gave its insides, which something refers to, away"
    return lost


def _try_swap(tensor: Tensor, holder: Tensor) -> bool:
    """Exchange the internals of two objects; return False if torch refuses."""
    try:
        _torch.swap_insides(tensor, holder)
    except RuntimeError:
        return False
    return True


def repair_accumulators(table: SavedTensors, suspects: Collection[int], model: nn.Module) -> dict[str, str]:
    """Give old and new graphs the right nodes; return the names of parameters for which that fails, and why.

    ``swap_tensors`` forbids backward passes into both tensors; assigning ``.data`` of another shape leaves a node
    behind that expects gradients of that shape for as long as a graph keeps it. Neither shows in numbers or addresses.
    """
    for node in table.nodes.values():
        _torch.allow_accumulator(node)
    for tensor in (table.tensors[index] for index in suspects):
        if _torch.use_count(tensor) > 1 and _can_accumulate(tensor):
            _repair_accumulator(tensor)
    if not table.nodes or not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return {}
    nodes = table.nodes.items()
    unhooked = [table.name(index) for index, node in nodes if _torch.accumulator_of(table.tensors[index]) is not node]
    return dict.fromkeys(unhooked, "DistributedDataParallel would not see its gradients any more")


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
