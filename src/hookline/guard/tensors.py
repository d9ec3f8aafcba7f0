"""Keep an alias and a copy of every tensor, tell which have changed, and put each back.

`Snapshot` has a `SavedPart` for the tensors of model and optimizer, and one for the rest and the gradients. The
alias has the memory and the layout that a tensor had, the copy its bytes: to restore, the alias is put back into the
tensor and the copy into the memory. A tensor that is put back stays the same object. Every question goes to all
tensors at once, without a line of Python for each: a model has hundreds. Those with another answer than before are
then put back one by one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, itemgetter, ne
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.errors import GuardError
from hookline.guard.walk import RunWalk, StateChange
from hookline.sites import _torch

__all__ = ["WRITTEN_WITH_GRAPH", "CopyMemory", "Look", "SavedPart", "Where", "restore_internals"]

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
"""Bytes, from which on a piece on a device is copied by itself and first: to guard 1.96 GB on an H200 takes 1.02 of two
raw copies, and 1.12 where all are copied together."""
_SHARE: Final = 0.9
"""The share of a device's free memory that copies may take; the rest is for what the run is going to do."""

_nbytes: Final = torch.UntypedStorage.nbytes
_Ask: TypeAlias = Callable[[Any], Any]
_ABOUT_LAYOUT: Final[tuple[_Ask, ...]] = (attrgetter("shape", "dtype", "device"), Tensor.stride, Tensor.is_conj)
_OF_HOLDERS: Final[tuple[_Ask, ...]] = (type, _torch.identity_of, _torch.use_count)
"""What is asked of tensors that may have attributes and hooks, besides where those are."""

# -- memory --------------------------------------------------------------------------------------------------------


class CopyMemory:
    """Memory for copies: for each group of tensors, device and type, used again for tensors of the same shapes."""

    def __init__(self, where: Where = "auto") -> None:
        self.where = where
        self.copies: dict[Any, list[Tensor]] = {}
        """By the device and type of what is copied, and the group; parts of one buffer each."""

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device that has something to copy, the device of the copies."""
        return {key[0]: copies[0].device for key, copies in self.copies.items()}

    def on_host(self) -> dict[Any, list[Tensor]]:
        """Return the copies of what is on the host."""
        return {key: copies for key, copies in self.copies.items() if key[0].type == "cpu"}

    def like(self, pieces: Sequence[Tensor], group: str) -> list[Tensor]:
        """Return memory for copies of ``pieces``, of one device and type, as tensors of the same shapes."""
        device, dtype, shapes = pieces[0].device, pieces[0].dtype, [piece.shape for piece in pieces]
        key = device, dtype, group
        if [copy.shape for copy in self.copies.get(key, ())] != shapes:
            self.copies.pop(key, None)  # free it before other memory is taken
            padded = [(piece.nbytes, -piece.nbytes % _ALIGNED) for piece in pieces]
            lengths = [nbytes // dtype.itemsize for pair in padded for nbytes in pair]
            parts = self._allocate(device, sum(map(sum, padded))).view(dtype).split_with_sizes(lengths)[::2]
            self.copies[key] = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return self.copies[key]

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


class _Pieces(NamedTuple):
    """Pieces of memory on one device, of one type, and their copies."""

    live: list[Tensor]
    copies: list[Tensor]
    members: list[list[int]]
    """The indices of the tensors that lie in each."""


class MemoryCopies:
    """A copy of the memory of some tensors: of every storage one piece, however many tensors share it."""

    def __init__(self, aliases: dict[int, Tensor], memory: CopyMemory, group: str) -> None:
        members: dict[tuple[torch.device, int], list[int]] = defaultdict(list)
        for index, alias in aliases.items():
            if alias.numel():
                members[alias.device, alias.untyped_storage().data_ptr()].append(index)
        found: dict[Any, _Pieces] = {}
        for indices in members.values():
            piece = _piece_of([aliases[index] for index in indices])
            key = not _is_large(piece), piece.device, piece.dtype
            pieces = found.setdefault(key, _Pieces([], [], []))
            pieces.live.append(piece)
            pieces.members.append(indices)
        self._pieces = [found[key] for key in sorted(found, key=itemgetter(0))]
        for pieces in self._pieces:
            pieces.copies.extend(memory.like(pieces.live, group + ", large" * _is_large(pieces.live[0])))
        self.nbytes = sum(piece.nbytes for pieces in self._pieces for piece in pieces.live)

    def save(self) -> None:
        """Copy from the tensors, without waiting: later work on the device comes after the copy."""
        for pieces in self._pieces:
            _copy(pieces.copies, pieces.live, each=_is_large(pieces.live[0]))

    def restore(self) -> None:
        """Copy into the memory that the tensors had; autograd does not notice."""
        for pieces in self._pieces:
            _copy(pieces.live, pieces.copies, each=_is_large(pieces.live[0]))

    def move(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Use the storage ``new`` for what lay in ``old``."""
        for pieces in self._pieces:
            for piece in pieces.live:
                _move(piece, old, new)

    def differing(self) -> set[int]:
        """Return the indices of the tensors in whose memory a byte is not as it was; reads everything."""
        return {
            index
            for pieces in self._pieces
            for piece, copy, indices in zip(*pieces, strict=True)
            if not torch.equal(_bytes_of(piece), _bytes_of(copy.to(piece.device)))
            for index in indices
        }


def _is_large(piece: Tensor) -> bool:
    return piece.nbytes >= _LARGE and piece.device.type != "cpu"


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


class Look(NamedTuple):
    """What was found other when a part of a run was looked at."""

    containers: list[Any]
    """As they were."""
    written: set[int]
    """The indices of tensors that were written, as far as counters and addresses tell."""
    flags: set[int]
    """Those that require gradients and did not, or have a graph and had none, or the other way round."""
    suspects: set[int]
    """Those of which more than the numbers may be other: memory, flags, insides, references, attributes, hooks."""


class _Question(NamedTuple):
    """A question to many tensors, or to their storages, at once."""

    indices: Sequence[int]
    """The tensor that each answer is about."""
    ask: Callable[[], list[Any]]

    @classmethod
    def of(cls, indices: Sequence[int], things: Sequence[Any], about: _Ask) -> _Question:
        """Ask all ``things`` the same."""
        return cls(indices, lambda: list(map(about, things)))


class SavedPart:
    """The containers and tensors of a walk, as they were when `copy` and `note` were last called."""

    def __init__(self, walk: RunWalk, memory: CopyMemory, group: str) -> None:
        """Look after the tensors of ``walk``; the copies are in the part of ``memory`` for this ``group``."""
        self.walk = walk
        self.tensors, self.kinds, self.name = walk.tensors, walk.kinds, walk.name
        tensors = walk.tensors
        self._memory, self._group = memory, group
        # What has the memory is the tensor itself, or a part of it; sparse ones have none of the usual kind.
        self._live: list[Tensor] = [_torch.own_part(tensor) for tensor in tensors]
        self._dense = [index for index, live in enumerate(self._live) if live.layout is torch.strided]
        self._strided = [self._live[index] for index in self._dense]
        self._aliases = [live.data for live in self._strided]
        self._storages = [alias.untyped_storage() for alias in self._aliases]
        self._counted = [index for index, tensor in enumerate(tensors) if not tensor.is_inference()]
        # Others are asked little later. To ask a plain tensor for its attributes would make a dictionary; torch refuses
        # to swap one that anything refers to, and swapping gives it other memory.
        self._with_attributes = [index for index, tensor in enumerate(tensors) if type(tensor) is not Tensor]
        self._holders = [tensors[index] for index in self._with_attributes]
        self.identities = list(map(_torch.identity_of, tensors))
        self._copies: dict[frozenset[str], MemoryCopies] = {}
        self.copied: frozenset[str] = frozenset()
        """The kinds of the tensors that were copied."""
        self._questions = self._make_questions()
        self._answers: dict[str, list[list[Any]]] = {}
        self._note_memory()

    def _make_questions(self) -> dict[str, list[_Question]]:
        holders, counters = self._holders, [self.tensors[index] for index in self._counted]
        return {
            "size": [_Question.of(self._dense, self._storages, _nbytes)],
            "begin": [_Question.of(self._dense, self._storages, torch.UntypedStorage.data_ptr)],
            "address": [_Question.of(self._dense, self._strided, Tensor.data_ptr)],
            "layout": [_Question.of(self._dense, self._strided, about) for about in _ABOUT_LAYOUT],
            "version": [_Question.of(self._counted, counters, attrgetter("_version"))],
            "flag": [_Question.of(range(len(self.tensors)), self.tensors, attrgetter("requires_grad"))],
            "holder": [
                *(_Question.of(self._with_attributes, holders, about) for about in _OF_HOLDERS),
                _Question(self._with_attributes, lambda: list(map(id, map(vars, holders)))),
            ],
        }

    def _note(self, *topics: str) -> None:
        self._answers |= {topic: [question.ask() for question in self._questions[topic]] for topic in topics}

    def _note_memory(self) -> None:
        self._note("size", "begin", "address", "layout")
        # Asked in one call, which takes a tenth of the time; it may say no where nothing is other. It does not know
        # that complex numbers may be read with the other sign of their imaginary part.
        has_complex = any(map(Tensor.is_complex, self._strided))
        self._has_same_layout = (None if has_complex else _torch.layout_check(self._strided)) or bool

    def _moved(self) -> set[int]:
        """Return the indices of tensors that have other memory or another layout."""
        layout = () if self._has_same_layout() else ("layout",)
        begin = ("begin",) if self.nbytes else ()  # where nothing is copied, addresses tell nearly as much
        return self._others("size", "address", *begin, *layout)

    def _others(self, *topics: str) -> set[int]:
        """Return the indices of the tensors about which an answer is another one now."""
        found: set[int] = set()
        for topic in topics:
            for question, before in zip(self._questions[topic], self._answers[topic], strict=True):
                now = question.ask()
                if now != before:
                    others = enumerate(map(ne, now, before))
                    found.update(question.indices[number] for number, is_other in others if is_other)
        return found

    # -- saving --------------------------------------------------------------------------------------------------

    def is_in_place(self) -> bool:
        """Return whether every tensor has the memory and layout that it had."""
        return not self._moved()

    def copy(self, copied: frozenset[str]) -> None:
        """Copy the numbers of the tensors of these kinds."""
        if copied not in self._copies:
            pairs = zip(self._dense, self._aliases, strict=True)
            aliases = {index: alias for index, alias in pairs if self.kinds[index] in copied}
            self._copies[copied] = MemoryCopies(aliases, self._memory, self._group)
        self._copies[copied].save()
        self.copied = copied

    def note(self) -> None:
        """Note all but the numbers."""
        self._note("version", "flag", "holder")
        requiring = [index for index, requires in enumerate(self._answers["flag"][0]) if requires]  # others are leaves
        self._questions["leaf"] = [_Question.of(requiring, [self.tensors[i] for i in requiring], attrgetter("is_leaf"))]
        self._note("leaf")
        for index, identity in zip(self._with_attributes, self._answers["holder"][1], strict=True):
            self.identities[index] = identity
        pairs = zip(requiring, self._answers["leaf"][0], strict=True)
        self._graphs = {index: self.tensors[index].grad_fn for index, is_leaf in pairs if not is_leaf}
        """The node that computed a tensor: a write in place gives it another one."""
        sparse = set(range(len(self.tensors))).difference(self._dense)
        self._sparse = {index: self._live[index].clone() for index in sparse if self.kinds[index] in self.copied}
        self._attributes = list(map(vars, self._holders))
        self._hooks = self._hooks_now()
        self._hook_items = [[tuple(held.items()) if held else () for held in each] for each in self._hooks]
        """What is in each dictionary of hooks."""
        uses = zip(self._with_attributes, self._answers["holder"][2], strict=True)
        self.used = {index for index, count in uses if count > 1}
        """The indices of those that something refers to: graphs, views."""
        found = {index: _live_node(self.tensors[index]) for index in self.used}
        self.nodes = {index: node for index, node in found.items() if node is not None}
        """The nodes that graphs of before refer to; none where no graph is alive."""

    def _hooks_now(self) -> list[list[Any]]:
        """Return the dictionaries of each kind of hooks; None for a tensor that never had one of the kind."""
        return [list(map(attrgetter(name), self._holders)) for name in _torch.TENSOR_HOOKS]

    def leaves(self) -> list[int]:
        """Return the indices of tensors that can have a gradient: those not computed, but for the optimizer's."""
        return [i for i, kind in enumerate(self.kinds) if kind != "state" and i not in self._graphs]

    def forget(self) -> None:
        """Let go of the nodes of graphs that are alive."""
        self.nodes, self._sparse = {}, {}

    @property
    def has_graphs(self) -> bool:
        """Whether a tensor was computed from others, and so keeps a graph alive."""
        return bool(self._graphs)

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return self._copies[self.copied].nbytes if self._copies else 0

    # -- looking -------------------------------------------------------------------------------------------------

    def look(self, *, bytewise: bool = False) -> Look:
        """Return what is other now; ``bytewise``: also tensors that were written behind autograd's back."""
        moved, flags = self._moved(), self._others("flag", "leaf")
        suspects = moved | flags | set(self.nodes) | set(self._sparse)
        suspects.update(i for i, node in self._graphs.items() if self.tensors[i].grad_fn is not node)
        is_hooked = any(map(any, self._hooks)) or any(map(any, self._hooks_now()))
        suspects.update(self._with_attributes if is_hooked else self._others("holder"))
        written = moved | self._others("version") | (self._differing_bytes() if bytewise else set())
        return Look(self.walk.changed(), written, flags, suspects)

    def _differing_bytes(self) -> set[int]:
        """Return the indices of tensors of which a copied byte is another one now; of all, if memory was resized."""
        if self._others("size", "begin"):  # some may reach beyond their memory, and nothing of them can be read
            return {index for index in self._dense if self.kinds[index] in self.copied}
        return self._copies[self.copied].differing()

    def changes(self, look: Look) -> list[StateChange]:
        """Return what was found other, by name."""
        changes = self.walk.changes(look.containers)
        for index in sorted(look.written):
            changes.append(StateChange(self.kinds[index], self.name(index), self.kinds[index] in self.copied))
        return changes + [StateChange("structure", f"{self.name(index)}.requires_grad") for index in sorted(look.flags)]

    # -- restoring -----------------------------------------------------------------------------------------------

    def copy_back(self) -> None:
        """Copy all numbers back, if the memory is where it was; else `restore_memory` does."""
        if self.nbytes and not self._others("size", "begin"):
            self._copies[self.copied].restore()

    def restore_attributes(self, suspects: Collection[int]) -> None:
        """Give tensors their class and their dictionary of attributes again."""
        for number, holder in self._suspected_holders(suspects):
            cls, attributes = self._answers["holder"][0][number], self._attributes[number]
            if type(holder) is not cls:
                holder.__class__ = cls
            if vars(holder) is not attributes:
                holder.__dict__ = attributes

    def _suspected_holders(self, suspects: Collection[int]) -> list[tuple[int, Tensor]]:
        each = enumerate(zip(self._with_attributes, self._holders, strict=True)) if suspects else ()
        return [(number, holder) for number, (index, holder) in each if index in suspects]

    def restore_memory(self, suspects: Collection[int]) -> dict[str, str]:
        """Put back memory and layout; return the names of tensors that had to be given other memory."""
        moved = self._moved() if suspects else set()
        replaced: dict[str, str] = {}
        for number in [number for number, index in enumerate(self._dense) if index in moved] if moved else ():
            storage, nbytes = self._storages[number], self._answers["size"][0][number]
            if storage.nbytes() != nbytes:
                try:
                    storage.resize_(nbytes)
                except RuntimeError:  # after .numpy() torch does not resize it any more
                    if storage.nbytes() < nbytes:
                        replaced |= dict.fromkeys(self._replace_storage(storage, nbytes), _OTHER_MEMORY)
            self._strided[number].data = self._aliases[number]
        if moved:
            self._note_memory()  # what was resized is elsewhere
            self._copies[self.copied].restore()
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
        stuck = [self.name(index) for index in suspects if not self._restore_flags(index)]
        for number, holder in self._suspected_holders(suspects):
            # Each dictionary is set anew, since the internals may be others, which do not know it yet.
            for name, dictionaries, items in zip(_torch.TENSOR_HOOKS, self._hooks, self._hook_items, strict=True):
                held, own = getattr(holder, name), dictionaries[number]
                if held:
                    held.clear()
                if own is not None:
                    own.clear()
                    own.update(items[number])
                    setattr(holder, name, own)
        return dict.fromkeys(stuck, WRITTEN_WITH_GRAPH)

    def _restore_flags(self, index: int) -> bool:
        tensor, requires_grad = self.tensors[index], self._answers["flag"][0][index]
        if index in self._graphs:
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

    def restore_nodes(self, suspects: Collection[int], model: nn.Module) -> dict[str, str]:
        """Give old and new graphs the right nodes; return the names of parameters for which that fails, and why.

        ``swap_tensors`` forbids backward passes into both tensors; assigning ``.data`` of another shape leaves a node
        behind that expects gradients of that shape for as long as a graph keeps it. Neither shows in numbers or
        addresses.
        """
        for node in self.nodes.values():
            _torch.allow_accumulator(node)
        for tensor in (self.tensors[index] for index in suspects):
            if _torch.use_count(tensor) > 1 and _can_accumulate(tensor):
                _repair_node(tensor)
        if not self.nodes or not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            return {}
        nodes = self.nodes.items()
        unhooked = [self.name(index) for index, node in nodes if _torch.accumulator_of(self.tensors[index]) is not node]
        return dict.fromkeys(unhooked, "DistributedDataParallel would not see its gradients any more")

    def restore_versions(self) -> None:
        """Set autograd's counters back, so that a backward pass whose forward is over finds what it left.

        Only where the numbers were put back; a counter that was set back otherwise would hide that they are others.
        """
        others = self._others("version")
        pairs = zip(self._counted, self._answers["version"][0], strict=True) if others else ()
        self._set_versions({index: number for index, number in pairs if index in others})

    def advance_versions(self) -> None:
        """Count one more write of everything copied: it holds numbers of another time than its counter says."""
        self._set_versions({index: self.tensors[index]._version + 1 for index in self._counted})

    def _set_versions(self, versions: dict[int, int]) -> None:
        copied = {index: number for index, number in versions.items() if self.kinds[index] in self.copied}
        _torch.set_versions(tuple(self.tensors[index] for index in copied), tuple(copied.values()))


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


def restore_internals(tables: Sequence[SavedPart]) -> dict[str, str]:
    """Give tensors the C++ objects again that ``swap_tensors`` has exchanged.

    Return the names of those whose own are gone though something refers to them, and why.
    """
    lost: dict[str, str] = {}
    holders = {_torch.identity_of(tensor): tensor for table in tables for tensor in table.tensors}
    holders |= {table.identities[index]: node.variable for table in tables for index, node in table.nodes.items()}
    for table in tables:
        for index, tensor in enumerate(table.tensors):
            now, own = _torch.identity_of(tensor), table.identities[index]
            if now == own:
                continue
            holder = holders.get(own)
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


def _repair_node(leaf: Tensor) -> None:
    if not leaf.requires_grad:
        _torch.forget_accumulator(leaf)  # made while it did; not needed until it does again
        return
    node = _torch.accumulator_of(leaf)
    _torch.allow_accumulator(node)
    if not _torch.is_right_accumulator(node, leaf):
        _torch.forget_accumulator(leaf)
