"""Store captured values: cut, cast, move and copy their tensors as asked, and note the version of shared ones.

The recorder of a capture calls `ValueStore.keep`; `CapturedCall` reads the `StoredValue` it gives.

    >>> import torch
    >>> ValueStore(index=(slice(None), -1)).keep({"x": torch.arange(6).reshape(2, 3)}, "output of 'a'").value
    {'x': tensor([2, 5])}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hookline.errors import CaptureError
from hookline.sites import _torch
from hookline.tree import map_tensors

__all__ = ["AS_IT_IS", "NoNumbers", "StoredValue", "ValueStore", "bytes_of", "size_text"]


class NoNumbers(Exception):
    """A tensor holds no numbers: inside of a transform, or while a model is traced or exported."""


class StoredValue(NamedTuple):
    """A value as it was stored."""

    value: Any
    """The structure as the module had it; lists and dicts are copies, since the model may go on filling its own."""
    borrowed: tuple[tuple[Tensor, int], ...] = ()
    """Tensors whose memory is shared with the model, each with the version it had."""


class ValueStore:
    """Prepares every tensor for the cache by the options of ``capture``."""

    def __init__(
        self,
        *,
        index: Any = None,
        detach: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        clone: bool = False,
        limit: int | None = None,
    ) -> None:
        self._index = index
        self._detach = detach
        self._dtype = dtype
        self._device = device
        self._clone = clone
        self._limit = limit
        self.is_plain = (
            not (detach or clone) and (index is None and dtype is None) and (device is None and limit is None)
        )
        """Whether values are kept unchanged."""
        self._used = 0
        self._charged: dict[int, int] = {}
        """Address and size of shared memory that counts already: a block's output is the next one's input. Ids would be
        wrong: a tensor that is kept detached dies, and the next one gets its id."""
        self._streams: set[Any] = set()
        """CUDA streams that may still be copying into pinned memory."""

    def keep(self, value: Any, what: str) -> StoredValue:
        """Return a value of any structure as it is to be kept; ``what`` names it in errors. Raise `NoNumbers`."""
        if isinstance(value, Tensor):
            piece, version = self._keep_tensor(value, what)
            return StoredValue(piece, () if version is None else ((piece, version),))
        borrowed: list[tuple[Tensor, int]] = []

        def keep_one(path: str, tensor: Tensor) -> Tensor:
            piece, version = self._keep_tensor(tensor, what)
            if version is not None:
                borrowed.append((piece, version))
            return piece

        return StoredValue(map_tensors(value, keep_one), tuple(borrowed))

    def wait_for_copies(self) -> None:
        """Wait for copies that are under way; after it every kept tensor can be read."""
        while self._streams:
            self._streams.pop().synchronize()

    def clear(self) -> None:
        """Count nothing as kept any more."""
        self.wait_for_copies()
        self._used = 0
        self._charged.clear()

    # -- one tensor --------------------------------------------------------------------------------------

    def _keep_tensor(self, tensor: Tensor, what: str) -> tuple[Tensor, int | None]:
        """Return the tensor to keep, and its version if its memory is shared with the model."""
        if not _torch.has_numbers(tensor):
            raise NoNumbers
        piece, is_own = tensor, False
        # Inference mode keeps no count of changes, so there only a copy is safe from them.
        copies = self._clone or tensor.is_inference()
        if self._index is not None and tensor.dim():
            piece = self._cut(tensor, what)
            is_own = not _share_memory(piece, tensor)
            copies = not is_own  # a copy of the part frees the whole
        dtype = self._dtype if self._dtype is not None and piece.is_floating_point() else piece.dtype
        if self._limit is not None:
            self._charge(piece, dtype, what, borrows=not copies and piece is tensor)
        if self._detach:
            piece = piece.detach()
        kept = self._move(piece if dtype is piece.dtype else piece.to(dtype))
        if kept is not piece:
            return kept, None
        if copies:
            return piece.clone(), None
        return piece, None if is_own else piece._version

    def _cut(self, tensor: Tensor, what: str) -> Tensor:
        """Return the part that ``index=`` asks for."""
        index = self._index
        try:
            piece = index(tensor) if callable(index) else tensor[index]
        except Exception as error:
            raise CaptureError(
                f"index={_shown(index)} does not fit the {what}, of shape {tuple(tensor.shape)} ({error}). Give one "
                "that fits every tensor of every target, narrow the target, or give a function that looks at the shape."
            ) from error
        if not isinstance(piece, Tensor):
            raise CaptureError(
                f"index={_shown(index)} made a {type(piece).__name__} of the {what}, of shape {tuple(tensor.shape)}; "
                "a function given as index= takes a tensor and returns one."
            )
        return piece

    def _move(self, piece: Tensor) -> Tensor:
        device = self._device
        if device is None or piece.device == device:
            return piece
        if not (piece.is_cuda and device.type == "cpu"):
            return piece.to(device)
        # Into pinned memory the copy runs while the host goes on. It is in the stream that made the tensor, so whatever
        # is done to that memory afterwards, a reuse by the allocator included, comes after it.
        pinned = torch.empty_like(piece, device=device, pin_memory=True, requires_grad=False)
        pinned.copy_(piece, non_blocking=True)
        self._streams.add(torch.cuda.current_stream(piece.device))
        return pinned

    def _charge(self, piece: Tensor, dtype: torch.dtype, what: str, *, borrows: bool) -> None:
        """Count the bytes that are about to be kept, or raise before they are."""
        assert self._limit is not None
        moves = dtype is not piece.dtype or self._device not in (None, piece.device)
        place = _memory_of(piece) if borrows and not moves else None
        # A shared tensor keeps the whole memory that it is a view of.
        size = piece.numel() * dtype.itemsize if place is None else place[1] - self._charged.get(place[0], 0)
        if size > 0 and self._used + size > self._limit:
            raise CaptureError(
                f"The {what}, shape {tuple(piece.shape)}, {str(dtype).removeprefix('torch.')}, takes "
                f"{size_text(size)}; {size_text(self._used)} of limit={size_text(self._limit)} are in use. Keep a part "
                "of it (index=), keep it smaller (dtype=torch.bfloat16), capture fewer sites, call cache.clear() "
                "between steps, or raise limit=; device='cpu' keeps it out of the memory of a GPU. What was captured "
                "before stays readable."
            )
        if size > 0:
            self._used += size
            if place is not None:
                self._charged[place[0]] = place[1]


AS_IT_IS: Final = ValueStore()
"""Keeps values unchanged; for all captures without options: it counts nothing, and copies nothing elsewhere."""


def _memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return address and size of a tensor's memory; None for kinds of tensor that have none of their own."""
    try:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return None
    return (place, size) if place else None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return how much memory some tensors take together; what several of them share counts once."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        place = _memory_of(tensor)
        key = ("tensor", id(tensor)) if place is None else (str(tensor.device), place[0])
        sizes[key] = tensor.numel() * tensor.element_size() if place is None else place[1]
    return sum(sizes.values())


def _share_memory(piece: Tensor, tensor: Tensor) -> bool:
    if piece is tensor or piece._base is not None:
        return True
    try:
        return piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # kinds of tensor without a storage
        return True


def _shown(index: Any) -> str:
    return str(getattr(index, "__qualname__", index if not isinstance(index, Tensor) else "a tensor"))


def size_text(size: float) -> str:
    """Return a number of bytes in words: ``1.5 MB``."""
    units = ["GB", "MB", "kB", "B"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{size:.0f} B" if units[-1] == "B" else f"{size:,.1f} {units[-1]}"
