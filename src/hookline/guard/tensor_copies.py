"""Copy the memory of many tensors out and back, in one call per device.

`TensorStates` makes `MemoryCopies`, which hold one copy of every piece of memory, however many tensors share it. The
copies lie in one buffer per device of a `BufferPool`, which is used again as long as it is large enough.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hookline.errors import GuardError
from hookline.sites import _torch

__all__ = ["BufferPool", "MemoryCopies", "Where"]

Where: TypeAlias = Literal["auto", "device", "host"]

_ALIGNED: Final = 64
"""Bytes; kernels that copy 16 or 32 at once want their addresses to be a multiple of that."""
_WIDE: Final = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Integers, since a multi-tensor copy of half-precision floats on CUDA makes other NaNs of some. Those of four bytes
are the fastest: on an H200 1.14 ms for 1.96 GB, as float32; of eight bytes 1.40, of two 1.44, of sixteen 1.90."""
_LARGE: Final = 32 * 2**20
"""Bytes, from which on a piece on a device is copied by itself and first: 1.08 ms instead of 1.14, 10 µs a launch."""
_SHARE: Final = 0.9
"""The share of a device's free memory that copies may take; the rest is for what the run is going to do."""


class BufferPool:
    """One buffer for the copies of each device."""

    def __init__(self, where: Where = "auto") -> None:
        self.where = where
        self._buffers: dict[torch.device, Tensor] = {}

    def buffer(self, device: torch.device, nbytes: int) -> Tensor:
        """Return at least ``nbytes`` bytes for copies of what is on ``device``."""
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop(device, None)
            buffer = None  # free it before a larger one is made
            buffer = self._buffers[device] = self._allocate(device, nbytes)
        return buffer

    @property
    def devices(self) -> dict[torch.device, torch.device]:
        """For each device that has something to copy, the device of the copies."""
        return {device: buffer.device for device, buffer in self._buffers.items()}

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


class _Piece(NamedTuple):
    """A stretch of memory."""

    live: Tensor
    members: list[int]
    """The indices of the tensors that lie in it."""


class MemoryCopies:
    """A copy of the memory of some tensors; they must have memory and not be on the meta device.

    Make it outside of inference mode: what is made there cannot be written elsewhere.
    """

    def __init__(self, tensors: Sequence[Tensor], pool: BufferPool) -> None:
        self._pieces = _pieces_of(tensors)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for piece in self._pieces:
            groups[piece.live.device, piece.live.dtype].append(piece.live)
        self.nbytes = sum(piece.live.nbytes for piece in self._pieces)
        self._lists = _buffers_for(groups, pool)
        self._large, self._small = _split(self._lists)

    def save(self) -> None:
        """Copy from the tensors, without waiting: later work on the device comes after the copy."""
        for live, copy in self._large:
            copy.copy_(live, non_blocking=True)
        for pieces, copies in self._small:
            _torch.copy_all(copies, pieces, non_blocking=True)

    def restore(self) -> None:
        """Copy into the tensors; autograd does not notice."""
        for live, copy in self._large:
            live.copy_(copy, non_blocking=True)
        for pieces, copies in self._small:
            _torch.copy_all(pieces, copies, non_blocking=True)

    def move(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Use the storage ``new`` for what lay in ``old``."""
        for live in (piece.live for piece in self._pieces):
            if live.untyped_storage()._cdata == old._cdata:
                live.set_(new, live.storage_offset(), live.shape)  # type: ignore[call-overload]

    def differing(self) -> set[int]:
        """Return the indices of the tensors in whose memory a byte is not as it was; reads everything."""
        copied = {id(one): other for live, copies in self._lists for one, other in zip(live, copies, strict=True)}
        differ = [p for p in self._pieces if not torch.equal(p.live, copied[id(p.live)].to(p.live.device))]
        return {index for piece in differ for index in piece.members}


def _buffers_for(
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]], pool: BufferPool
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return for each group its pieces, and as many of the same sizes cut from one buffer per device."""
    total: dict[torch.device, int] = defaultdict(int)
    for (device, _), pieces in groups.items():
        total[device] += sum(_aligned(piece.nbytes) for piece in pieces)
    buffers = {device: pool.buffer(device, nbytes) for device, nbytes in total.items()}
    begin: dict[torch.device, int] = defaultdict(int)
    lists = []
    for (device, dtype), pieces in groups.items():
        copies = []
        for piece in pieces:
            at = begin[device]
            copies.append(buffers[device][at : at + piece.nbytes].view(dtype))
            begin[device] = at + _aligned(piece.nbytes)
        lists.append((pieces, copies))
    return lists


def _split(
    lists: list[tuple[list[Tensor], list[Tensor]]],
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[list[Tensor], list[Tensor]]]]:
    """Return the pairs of large pieces on a device and their copies, and the lists without them."""
    pairs = [list(zip(live, copies, strict=True)) for live, copies in lists]
    large = [pair for each in pairs for pair in each if _is_large(pair[0])]
    rest = [[pair for pair in each if not _is_large(pair[0])] for each in pairs]
    return large, [([live for live, _ in each], [copy for _, copy in each]) for each in rest if each]


def _is_large(piece: Tensor) -> bool:
    return piece.nbytes >= _LARGE and piece.device.type != "cpu"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _pieces_of(tensors: Sequence[Tensor]) -> list[_Piece]:
    """Return the stretches of memory that the tensors lie in, one for each storage."""
    found: dict[tuple[torch.device, int], list[tuple[int, torch.UntypedStorage, tuple[int, int]]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            storage = tensor.untyped_storage()
            found[tensor.device, storage.data_ptr()].append((index, storage, _span(tensor)))
    pieces = []
    for entries in found.values():
        members, storages, spans = zip(*entries, strict=True)
        # Views of one NumPy array have storages of their own that begin at the same byte: the longest has them all.
        longest = max(storages, key=torch.UntypedStorage.nbytes)
        pieces.append(_Piece(_as_integers(longest, spans), list(members)))
    return pieces


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor uses, and the one after the last."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first * tensor.itemsize), int((last + 1) * tensor.itemsize)


def _as_integers(storage: torch.UntypedStorage, spans: Iterable[tuple[int, int]]) -> Tensor:
    """Return a view of all ``spans`` of a storage in the widest integers that fit; copies then keep every bit."""
    begins, ends = zip(*spans, strict=True)
    begin, end = min(begins), max(ends)
    width, dtype = next((width, dtype) for width, dtype in _WIDE if math.gcd(begin, end) % width == 0)
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, begin // width, ((end - begin) // width,))  # type: ignore[call-overload,no-any-return]
