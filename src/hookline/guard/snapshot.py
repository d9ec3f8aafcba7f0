"""Save a run in memory, tell what has changed since, and put it back.

`Guard` (guard/guard.py), `ModelDataContext` (its checkpoints in memory), the loops (`GradientRetention` of
training/run.py, before an epoch) and ``find_bad_operations`` (`KeptSteps`) take snapshots.

A `Snapshot` has two `SavedPart`s. One is model and optimizer: it is used again at the next save, as long as they hold
the same objects. The other is the rest with the gradients: it is gone through at each save. A part has the containers
and tensors that a `RunWalk` (guard/walk.py) has found. Of each tensor it has an alias (another tensor with the memory
and layout that it had), and a copy of its bytes (`MemoryCopies`). To restore, the alias is put back into the tensor,
which stays the same object, and the copy is written into the memory.

What must stay: the order of the steps in `Snapshot.restore`; the comments there say why. A step of training waits for
each save and restore, so whatever has to be known is asked of all tensors at once (`Question` of guard/walk.py).
docs/guard.md tells what is restored and how long it takes (benchmarks/guarding.py). Tests: tests/guard.
"""

from __future__ import annotations

import math
import signal
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import attrgetter, itemgetter
from types import FrameType
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hookline.errors import GuardError
from hookline.guard.loaders import generators_of_dataset, generators_on, samplers_of
from hookline.guard.rng import RandomStates
from hookline.guard.walk import BATCH, Question, RunWalk, StateChange
from hookline.messages import listed
from hookline.sites import _torch
from hookline.sites.find import attached
from hookline.sites.hook_at_site import next_order
from hookline.sites.optimizers import unwrap_optimizer

ALL: Final = frozenset({"parameter", "buffer", "state", "gradient", "batch"})
"""All kinds of tensors: those that `RunWalk` gives (guard/walk.py). `Guard` chooses by these names what is copied."""
BUFFERS: Final = frozenset({"buffer", "batch"})
_KEPT: Final = ("model", "optimizer")
"""The roots of the main part: they are large and stay the same objects. Others may have new tensors at every step."""
_CPU: Final = torch.device("cpu")
_WIDE: Final = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Integers, since a multi-tensor copy of half-precision floats on CUDA makes other NaNs of some. Those of four bytes
are the fastest: on an H200 1.14 ms for 1.96 GB, as float32; of eight bytes 1.40, of two 1.44, of sixteen 1.90."""
_LARGE: Final = 32 * 2**20
"""Bytes, from which on a piece on a device is copied by itself and first: to guard 1.96 GB on an H200 takes 1.02 of two
raw copies, and 1.12 where all are copied together."""
_SHARE: Final = 0.9
"""The share of a device's free memory that copies may take; the rest is for what the run is going to do."""
_PLAIN: Final = (Tensor, nn.Parameter)
_NO_HOOKS: Final = (None, None)
_layout_of: Final = attrgetter("shape", "dtype", "device")
_flag_of: Final = attrgetter("requires_grad")
_version_of: Final = attrgetter("_version")
_hooks_of: Final = attrgetter(*_torch.TENSOR_HOOKS)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver an interrupt (Ctrl-C) that comes inside the block after it (8 µs).

    Do nothing in other threads, since only the main thread is sent interrupts, and nothing where the handler was not
    set from Python, since it could not be set again.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    received: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


# -- memory --------------------------------------------------------------------------------------------------------


class CopyPool:
    """Free memory for copies: tensors, by device, type and shape of the piece that they can hold a copy of.

    A copy of a piece on a GPU may lie on the host, so the device is that of the piece.
    """

    def __init__(self) -> None:
        self.free: defaultdict[Any, list[Tensor]] = defaultdict(list)

    def take(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return memory for copies of ``pieces``, which are on one device."""
        device = pieces[0].device
        found = [(piece, free.pop() if (free := self.free[_key(piece)]) else None) for piece in pieces]
        home = device if _fits(device, sum(piece.nbytes for piece, copy in found if copy is None)) else _CPU
        return [self._make(piece, home) if copy is None else copy for piece, copy in found]

    def _make(self, piece: Tensor, home: torch.device) -> Tensor:
        try:
            return _empty_like(piece, home)
        except (RuntimeError, MemoryError) as error:
            if home != _CPU:
                return self._make(piece, _CPU)
            raise GuardError(
                f"The guard has no room on {home} for a copy of {piece.nbytes / 2**20:,.0f} MiB. Nothing was touched. "
                f"Next: a narrower scope. torch said: {error}"
            ) from error


def _key(piece: Tensor) -> Any:
    return piece.device, piece.dtype, piece.shape


def _empty_like(piece: Tensor, home: torch.device) -> Tensor:
    is_pinned = home == _CPU and piece.device != _CPU
    return torch.empty(piece.shape, dtype=piece.dtype, device=home, pin_memory=is_pinned)


def _fits(device: torch.device, nbytes: int) -> bool:
    """Return whether the device has room, counting what torch holds there and does not use."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return nbytes <= _SHARE * (free + unused)


class MemoryCopies:
    """A copy of the memory of some tensors: of every storage one piece, however many tensors share it."""

    def __init__(self, aliases: Iterable[Tensor], pool: CopyPool) -> None:
        """Get memory for copies of ``aliases``."""
        members: dict[tuple[torch.device, int], list[Tensor]] = defaultdict(list)
        for alias in aliases:
            if alias.numel():
                members[alias.device, alias.untyped_storage().data_ptr()].append(alias)
        found: dict[Any, list[Tensor]] = defaultdict(list)
        for piece in map(_piece_of, members.values()):
            found[not _is_large(piece), piece.device, piece.dtype].append(piece)
        self.pieces = [(found[key], pool.take(found[key])) for key in sorted(found, key=itemgetter(0))]
        """Pieces of memory and the copies of them, in groups of one device and type; large pieces first."""
        self.nbytes = sum(piece.nbytes for live, _ in self.pieces for piece in live)
        self._pool = pool

    def save(self) -> None:
        """Copy from the tensors."""
        for live, copies in self.pieces:
            _copy(live, to=copies)

    def restore(self) -> None:
        """Copy into the memory that the tensors had; autograd does not notice."""
        for live, copies in self.pieces:
            _copy(copies, to=live)

    def free(self) -> None:
        """Give the memory back to the pool."""
        pieces, self.pieces = self.pieces, []  # first, as an interrupt may come: no copy may be given back twice
        for live, copies in pieces:
            for piece, copy in zip(live, copies, strict=True):
                self._pool.free[_key(piece)].append(copy)


def _copy(sources: list[Tensor], *, to: list[Tensor]) -> None:
    """Copy without waiting for the device: what it is given later runs after the copy."""
    if not _is_large(sources[0]) and not _is_large(to[0]):
        _torch.copy_all(to, sources, non_blocking=True)
        return
    for source, target in zip(sources, to, strict=True):
        target.copy_(source, non_blocking=True)


def _is_large(piece: Tensor) -> bool:
    return piece.nbytes >= _LARGE and piece.device.type != "cpu"


def _piece_of(aliases: list[Tensor]) -> Tensor:
    """Return a view, as integers, of all the memory that ``aliases`` of one storage use; its copy keeps every bit."""
    first = aliases[0]
    if first.device.type == "cpu" and len(aliases) == 1 and _is_whole(first):
        return first
    # Views of one NumPy array have storages of their own that begin at the same byte: the longest has them all.
    storage = max((alias.untyped_storage() for alias in aliases), key=torch.UntypedStorage.nbytes)
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
    """What differs in a part of a run from what was saved."""

    changes: list[StateChange]
    """The differences by name, as far as counters and addresses show them."""
    written: set[int]
    """The indices of tensors whose counter or memory differs."""
    containers: list[Any]
    """The containers that differ, as they were (notes of `RunWalk`)."""
    suspects: list[int]
    """The indices of tensors in which more than the numbers may differ: memory, flags, insides, attributes, hooks. Only
    these are put back one by one."""


class SavedPart:
    """The containers and tensors of a walk, as they were when `copy` and `note` were last called.

    Every question goes to all tensors at once: a model has hundreds. Those with another answer than before are then
    put back one by one.
    """

    def __init__(self, walk: RunWalk, pool: CopyPool) -> None:
        self.walk, self.tensors, self.kinds, self.name = walk, walk.tensors, walk.kinds, walk.name
        self._pool = pool
        # The memory belongs to the tensor itself, or to its part (of a DTensor); sparse tensors have no such memory.
        self._live: list[Tensor] = [each if type(each) in _PLAIN else _torch.own_part(each) for each in self.tensors]
        self.aliases = {i: live.data for i, live in enumerate(self._live) if live.layout is torch.strided}
        self._own = {i: tensor for i, tensor in enumerate(self.tensors) if self.kinds[i] != "state"}
        """The tensors but those of the optimizer."""
        self._odd = [index for index in range(len(self.tensors)) if index not in self.aliases]
        self.identities = list(map(_torch.identity_of, self.tensors))
        self.copies, self.copied = MemoryCopies((), pool), frozenset[str]()
        """The kinds of the tensors that were copied."""
        self.ask()

    def ask(self) -> None:
        """Begin to ask the tensors, which are as they should be now."""
        each = dict(enumerate(self.tensors))
        self._versions = Question({i: tensor for i, tensor in each.items() if not tensor.is_inference()}, _version_of)
        self._flags = Question(each, _flag_of)
        # To ask a plain tensor for its attributes would make a dictionary; torch refuses to swap one that anything
        # refers to, and swapping gives it other memory.
        holders = {index: tensor for index, tensor in each.items() if type(tensor) is not Tensor}
        self._holding = Question(holders, _torch.identity_of, _torch.use_count, _hooks_of, type)
        self._ask_memory()
        live = {index: self._live[index] for index in self.aliases}
        self._layouts = Question(live, _layout_of, Tensor.stride, Tensor.is_conj)
        # One call for layouts and flags of all, which takes an eighth of the time. It may say no where nothing differs:
        # then they are compared one by one. It does not see that a view is conjugated, so complex tensors are always
        # compared, as where there is no such call: ``bool()`` says no.
        others = [tensor for index, tensor in each.items() if live.get(index) is not tensor]
        has_complex = any(map(Tensor.is_complex, live.values()))
        self._is_as_made = (None if has_complex else _torch.layout_check([*live.values(), *others])) or bool

    def _ask_memory(self) -> None:
        """Begin to ask the tensors for their memory, which is where and as long as it should be now."""
        storages = {index: alias.untyped_storage() for index, alias in self.aliases.items()}
        self._lengths = Question(storages, torch.UntypedStorage.nbytes)
        self._storages = Question(storages, torch.UntypedStorage.data_ptr)
        self._addresses = Question({index: self._live[index] for index in self.aliases}, Tensor.data_ptr)

    def resized(self) -> set[int]:
        """Return the indices of the tensors whose memory has another length, so that no copy can go there or back."""
        return self._lengths.differing()

    def moved(self) -> tuple[set[int], set[int]]:
        """Return the indices of the tensors that are elsewhere in memory, or have another layout; and other flags."""
        moved = self._addresses.differing() | self._storages.differing()
        if self._is_as_made():
            return moved, set()
        return moved | self._layouts.differing(), self._flags.differing()

    # -- saving --------------------------------------------------------------------------------------------------

    def copy(self, copied: frozenset[str]) -> None:
        """Copy the numbers of the tensors of these kinds."""
        if copied != self.copied:
            self.copies.free()
            aliases = [alias for index, alias in self.aliases.items() if self.kinds[index] in copied]
            self.copies, self.copied = MemoryCopies(aliases, self._pool), copied
        self.copies.save()

    def note(self) -> None:
        """Note everything except the numbers: counters, flags, attributes, hooks, graphs."""
        self._versions.note()
        self._holding.note()
        tensors = self.tensors
        trained = compress(range(len(tensors)), self._flags.before)
        self._graphs = {index: tensors[index].grad_fn for index in trained if not tensors[index].is_leaf}
        """The node that computed a tensor: a write in place gives it another one."""
        self._sparse = {index: self._live[index].clone() for index in self._odd if self.kinds[index] in self.copied}
        self._attributes = dict[int, dict[str, Any]]()
        self._hooks = dict[int, list[tuple[Any, tuple[Any, ...]]]]()
        """For each kind of hooks of a tensor its dictionary and what is in it; None for a kind that it never had."""
        self.used = set[int]()
        """The indices of tensors to which something in C++ refers: graphs, views."""
        for index, (identity, uses, hooks, _) in zip(self._holding.things, self._holding.before, strict=True):
            self.identities[index], self._attributes[index] = identity, vars(tensors[index])
            if uses > 1:
                self.used.add(index)
            if hooks != _NO_HOOKS:
                self._hooks[index] = [(held, tuple(held.items()) if held else ()) for held in hooks]
        found = {index: _live_node(tensors[index]) for index in self.used}
        self.nodes = {index: node for index, node in found.items() if node is not None}
        """The nodes that add up gradients (AccumulateGrad), of tensors in a graph that is still alive."""

    def leaves(self) -> dict[int, Tensor]:
        """Return the tensors that can have a gradient: not computed ones, nor those of the optimizer."""
        return {index: tensor for index, tensor in self._own.items() if index not in self._graphs}

    def forget(self) -> bool:
        """Drop references to graphs; return False if a tensor of the part was itself computed, so that it keeps one."""
        self.nodes, self._sparse = {}, {}
        return not self._graphs

    # -- looking -------------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """Return what differs now."""
        containers, (moved, flags) = self.walk.changed(), self.moved()
        moved |= self.resized()
        written = moved | self._versions.differing()
        suspects = moved | flags | self._holding.differing()
        suspects.update(self.nodes, self._sparse, self._hooks)
        suspects.update(i for i, node in self._graphs.items() if self.tensors[i].grad_fn is not node)
        suspects.update(i for i, own in self._attributes.items() if vars(self.tensors[i]) is not own)
        changes = self.walk.changes(containers)
        changes += [StateChange(self.kinds[i], self.name(i), self.kinds[i] in self.copied) for i in sorted(written)]
        changes += [StateChange("structure", f"{self.name(index)}.requires_grad") for index in sorted(flags)]
        return Look(changes, written, containers, sorted(suspects))

    # -- restoring -----------------------------------------------------------------------------------------------

    def copy_back(self) -> None:
        """Copy all numbers back if the memory is where it was; otherwise leave it to `restore_memory`."""
        if self.copies.nbytes and not self.resized():
            self.copies.restore()

    def restore_memory(self, suspects: Collection[int]) -> dict[str, str]:
        """Put back memory and layout; return the names of tensors that had to be given other memory, and why."""
        moved = self.resized() | self.moved()[0] if suspects else set()
        replaced: dict[str, str] = {}
        for index, nbytes in zip(self.aliases, self._lengths.before, strict=True) if moved else ():
            if index in moved:
                if not self._restore_length(self.aliases[index].untyped_storage(), nbytes):
                    replaced[self.name(index)] = "its memory was shrunk, and shown to NumPy, so it has other memory now"
                self._live[index].data = self.aliases[index]
        if moved:
            self._ask_memory()  # what was resized is elsewhere
            self.copies.restore()
        for index, numbers in self._sparse.items():
            self._live[index].copy_(numbers)
        return replaced

    def _restore_length(self, storage: torch.UntypedStorage, nbytes: int) -> bool:
        """Give memory its length again; where torch refuses, move all that is in it elsewhere, and return False."""
        try:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
        except RuntimeError:  # after .numpy() torch does not resize it any more
            if storage.nbytes() < nbytes:
                fresh = torch.empty(nbytes, dtype=torch.uint8, device=storage.device).untyped_storage()
                pieces = [piece for live, _ in self.copies.pieces for piece in live]
                for one in (*self.aliases.values(), *pieces):
                    if one.untyped_storage()._cdata == storage._cdata:
                        one.set_(fresh, one.storage_offset(), one.shape, one.stride())
                return False
        return True

    def restore_tensors(self, suspects: Collection[int]) -> dict[str, str]:
        """Put back attributes, flags and hooks; return the names of tensors with a graph that cannot be taken off."""
        stuck = [self.name(index) for index in suspects if not self._restore_flags(index)]
        for index in suspects:
            tensor = self.tensors[index]
            if index in self._attributes and vars(tensor) is not self._attributes[index]:
                tensor.__dict__ = self._attributes[index]
            # Each dictionary is set anew, since the internals may be others, which do not know it yet.
            own, held = self._hooks.get(index, [(None, ())] * 2), _hooks_of(tensor)
            for name, now, (hooks, items) in zip(_torch.TENSOR_HOOKS, held, own, strict=True):
                if now:
                    now.clear()
                if hooks is not None:
                    hooks.clear()
                    hooks.update(items)
                    setattr(tensor, name, hooks)
        return dict.fromkeys(stuck, "it is a view, or was computed, and was written with a graph, which stays")

    def _restore_flags(self, index: int) -> bool:
        tensor, requires_grad = self.tensors[index], self._flags.before[index]
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
        now = {index: get_gradient_edge(self.tensors[index]).node for index in self.nodes}
        unhooked = [self.name(index) for index, node in self.nodes.items() if now[index] is not node]
        return dict.fromkeys(unhooked, "DistributedDataParallel would not see its gradients any more")

    def restore_versions(self, look: Look, *, advance: bool) -> None:
        """Set autograd's version counters back, so that a backward pass whose forward is over finds what it left.

        Only for tensors whose numbers were put back: elsewhere a counter that was set back would hide a change.
        ``advance``: count one more write instead, since the numbers are older than the counters say, and a graph that
        was built in between must see that.
        """
        touched = look.written.union(look.suspects)
        noted = zip(self._versions.things, self._versions.before, strict=True) if advance or touched else ()
        versions = {
            self.tensors[index]: self.tensors[index]._version + 1 if advance else before
            for index, before in noted
            if self.kinds[index] in self.copied and (advance or index in touched)
        }
        _torch.set_versions(tuple(versions), tuple(versions.values()))


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


def _restore_internals(parts: Sequence[SavedPart]) -> dict[str, str]:
    """Give tensors the C++ objects again that ``swap_tensors`` has exchanged.

    Return the names of those whose own are gone though something refers to them, and why.
    """
    lost: dict[str, str] = {}
    holders = {_torch.identity_of(tensor): tensor for part in parts for tensor in part.tensors}
    holders |= {part.identities[index]: node.variable for part in parts for index, node in part.nodes.items()}
    for part in parts:
        for index, tensor in enumerate(part.tensors):
            now, own = _torch.identity_of(tensor), part.identities[index]
            if now == own:
                continue
            holder = holders.get(own)
            if holder is None:
                # Hooks of autograd sit in the internals. New ones have none; numbers and flags are put back into them.
                own_memory = part.aliases.get(index, tensor)  # torch takes no data of another device than the tensor's
                holder = torch.empty(0, dtype=own_memory.dtype, device=own_memory.device)
                if index in part.used:
                    lost[part.name(index)] = "swap_tensors() gave its insides, which something refers to, away"
            _torch.swap_insides(tensor, holder)
            part.identities[index] = _torch.identity_of(tensor)
            holders[now], holders[part.identities[index]] = holder, tensor
    return lost


def _can_accumulate(tensor: Tensor) -> bool:
    plain = type(tensor) is nn.Parameter and tensor.layout is torch.strided
    return plain and tensor.is_leaf and tensor.is_floating_point() and not tensor.is_inference()


def _live_node(tensor: Tensor) -> Any:
    """Return the node that adds up the gradients of a tensor, if a graph keeps it alive."""
    if not _can_accumulate(tensor) or not tensor.requires_grad:
        return None
    before = _torch.use_count(tensor)
    node = get_gradient_edge(tensor).node
    return node if _torch.use_count(tensor) == before else None  # a node that was made just now adds one use


def _repair_node(leaf: Tensor) -> None:
    node = get_gradient_edge(leaf).node if leaf.requires_grad else None
    if node is not None:
        _torch.allow_accumulator(node)
    if node is None or not _torch.is_right_accumulator(node, leaf):
        _torch.forget_accumulator(leaf)


# -- the whole run -------------------------------------------------------------------------------------------------


def roots_of(
    model: Any, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, loader: Any = None
) -> dict[str, Any]:
    """Return the objects that hold the state of a run, by their names in messages; refuse one without attributes."""
    if not isinstance(model, nn.Module):
        raise GuardError(f"The guard takes a model, that is a torch.nn.Module; got {type(model).__name__}.")
    roots = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if not isinstance(optimizer, Optimizer | None):  # wrappers may lie around each other, and the walk enters none
        roots |= {"optimizer": unwrap_optimizer(optimizer), "optimizer wrapper": optimizer}
    for name, root in roots.items():
        if root is not None and not hasattr(root, "__dict__"):
            raise GuardError(f"{name}= has no attributes to save: it is {root!r}. Next: pass the object itself.")
    if not isinstance(loader, DataLoader):  # the generators alone, since the rest may be the data
        return {**roots, "loader": None if loader is None else generators_on(loader)}
    found = {"loader": loader, **samplers_of(loader)}
    named = {name: part for name, part in found.items() if hasattr(part, "__dict__")}
    return {**roots, **named, "loader.dataset": generators_of_dataset(loader.dataset)}


class Snapshot:
    """The state of a run when `take` was last called; later calls use the same memory again."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots, self.pool = roots, CopyPool()
        self._main: SavedPart | None = None
        """The part of model and optimizer; kept from one save to the next."""
        self._parts: list[SavedPart] = []
        """The main part, then the part of all other objects and the gradients; empty if nothing is saved."""
        self._owners: dict[int, Tensor] = {}
        """The tensors that can have a gradient, by their indices in the main part."""
        self._grads: list[Tensor | None] = []
        """The gradient of each of them, the tensor itself."""
        self._random: RandomStates | None = None
        self._order = self._checked_order = 0
        """The order number of hooks when it was taken, and when it last looked for hooks attached since."""

    @classmethod
    def of(cls, roots: Mapping[str, Any], into: Self | None = None, *, gradients: bool = True) -> Self:
        """Return a snapshot of now. Its memory is that of ``into``, an earlier one, if that has the same roots."""
        snapshot = into if into is not None and into.roots == roots else cls(roots)
        snapshot.take(gradients=gradients)
        return snapshot

    @property
    def nbytes(self) -> int:
        """How many bytes were copied."""
        return sum(part.copies.nbytes for part in self._parts)

    @property
    def has_buckets(self) -> bool:
        """Whether gradients may be views of DDP's buckets, which a backward pass writes also while they are off."""
        return any(getattr(module, "gradient_as_bucket_view", False) for module in self.roots["model"].modules())

    # -- saving --------------------------------------------------------------------------------------------------

    @interrupts_deferred()
    def take(self, copied: frozenset[str] = ALL, *, gradients: bool = True, batch: Any = None) -> None:
        """Save; copy the tensors of these kinds, and look after ``gradients``, random streams, and ``batch``."""
        self.forget()
        with torch.inference_mode(False), torch.no_grad():  # what is made in there could not be written elsewhere
            main = self._copy_main(copied)
            main.note()
            others = {name: root for name, root in self.roots.items() if name not in _KEPT}
            walk = RunWalk({**others, BATCH: batch}, main.walk.seen)
            if gradients:
                self._find_gradients(main, walk)
            rest = SavedPart(walk, self.pool)
            rest.copy(copied)
            rest.note()
        self.pool.free.clear()
        self._random = RandomStates(main.walk.generators + rest.walk.generators)
        self._order = self._checked_order = next_order()
        self._main, self._parts = main, [main, rest]

    def _copy_main(self, copied: frozenset[str]) -> SavedPart:
        """Copy model and optimizer, and return their part: that of before, if they hold the same objects still."""
        kept, self._main = self._main, None
        if kept is not None and not kept.resized():
            kept.copy(copied)  # before anything else: a GPU copies meanwhile
            moved, flags = kept.moved()
            if not moved and kept.walk.refresh():
                if flags:
                    kept.ask()
                return kept
        if kept is not None:
            kept.copies.free()
        main = SavedPart(RunWalk({name: self.roots.get(name) for name in _KEPT}), self.pool)
        main.copy(copied)
        return main

    def _find_gradients(self, main: SavedPart, walk: RunWalk) -> None:
        """Note which tensors have which gradient, and add those to ``walk`` that are not met otherwise."""
        self._owners = main.leaves()
        self._grads = list(map(attrgetter("grad"), self._owners.values()))
        for index, grad in zip(self._owners, self._grads, strict=True):
            if grad is not None and id(grad) not in main.walk.seen and id(grad) not in walk.seen:
                walk.add_tensor(grad, (main.walk.places[index], "grad"), "gradient")

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients as they were, by their parameter; the tensors themselves."""
        pairs = zip(self._owners.values(), self._grads, strict=True)
        return {owner: grad for owner, grad in pairs if grad is not None}

    def park_gradients(self) -> None:
        """Take the gradients off the tensors; they come back at `restore`."""
        for owner in self.gradients:
            owner.grad = None

    def forget(self, *, everything: bool = False) -> None:
        """Let go of what was saved; keep the memory, and what is known about a run that has not changed since."""
        for rest in self._parts[1:]:
            rest.copies.free()
        self._parts, self._owners, self._grads, self._random = [], {}, [], None
        if self._main is not None and (not self._main.forget() or everything):
            self._main.copies.free()
            self._main = None

    # -- afterwards ----------------------------------------------------------------------------------------------

    def _other_grads(self) -> dict[int, Tensor | None]:
        """Return the gradients that are not on their owners any more, by the owner's index."""
        now = [owner.grad if owner.is_leaf else None for owner in self._owners.values()]  # torch warns about others
        each = zip(self._owners, now, self._grads, strict=True)
        return {index: before for index, grad, before in each if grad is not before}

    def restore(self, *, hooks: bool = True, versions: bool = True) -> tuple[list[StateChange], dict[str, str]]:
        """Put everything back, any number of times; return what differed, and by name what is lost, and why.

        Args:
            hooks: Take off the hooks of hookline that were attached since. That cannot be undone: False where the run
                goes back only for a while.
            versions: Set autograd's counters back too. False for numbers of long ago: after as many steps as were made
                since, the counters of now would come again, with other numbers.
        """
        is_hooked = hooks and self._notice_new_hooks()
        if is_hooked:
            self._remove_new_hooks()  # while modules that were put in are found
        with torch.inference_mode(False), torch.no_grad():
            for part in self._parts:
                part.copy_back()  # first: nothing else depends on the numbers, and a GPU copies meanwhile
            looks = [part.look() for part in self._parts]
            changes = list(dict.fromkeys(change for look in looks for change in look.changes))
            lost = self._restore_parts(looks, is_hooked=is_hooked)
            for index, grad in self._other_grads().items():
                changes.append(StateChange("other gradient", f"{self._parts[0].name(index)}.grad"))
                self._owners[index].grad = grad
            for part, look in zip(self._parts, looks, strict=True):
                part.restore_versions(look, advance=not versions)
        if self._random is not None:
            changes += [StateChange("random", name) for name in self._random.changed()]
            self._random.restore()
        torch.clear_autocast_cache()  # it holds casts of numbers that may be others now
        return changes, lost

    def _restore_parts(self, looks: Sequence[Look], *, is_hooked: bool) -> dict[str, str]:
        """Put back tensors, and the containers they are in; return by name what could not be, and why."""
        pairs = list(zip(self._parts, looks, strict=True))
        lost = _restore_internals(self._parts) if any(look.suspects for look in looks) else {}
        for part, look in pairs:
            lost |= part.restore_memory(look.suspects)
        for part, look in pairs:
            lost |= part.walk.restore(look.containers)
        if is_hooked:
            self._remove_new_hooks()  # those on modules that were taken out, too: they are back only now
        for part, look in pairs:
            lost |= part.restore_tensors(look.suspects)
        for part, look in pairs:
            lost |= part.restore_nodes(look.suspects, self.roots["model"])
        return lost

    @interrupts_deferred()
    def go_back(self, who: str, *, versions: bool = False) -> None:
        """Put everything but hooks back, for a while; if something is lost, raise a `GuardError` that names ``who``."""
        raise_if_lost(who, self.restore(hooks=False, versions=versions)[1])

    def _notice_new_hooks(self) -> bool:
        """Return whether a hook of hookline was attached anywhere since this was last called."""
        before, self._checked_order = self._checked_order, next_order()
        return self._checked_order > before + 1

    def _remove_new_hooks(self) -> None:
        """Remove hooks of hookline attached since, also those on no model; their handles clear all that belongs."""
        for where in (None, self.roots["model"], self.roots.get("optimizer")):
            if where is None or isinstance(where, nn.Module | Optimizer):
                for handle in attached(where):
                    if handle._attachment.order > self._order:
                        handle.remove(quiet=True)


def raise_if_lost(who: str, lost: Mapping[str, str]) -> None:
    """Raise a `GuardError` if something is ``lost``: by name what could not be put back after ``who``, and why."""
    if lost:
        shown = listed([f"{name} ({reason})" for name, reason in lost.items()])
        raise GuardError(
            f"{who} has changed what cannot be put back: {shown}; all else was. The run cannot continue as if nothing "
            "had happened. Next: do that to a copy."
        )
