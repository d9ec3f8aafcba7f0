"""How one captured value is kept: cut, cast, moved and copied as asked, with a note of what others could still change.

Takes options from ``capture`` and values from the ``recorder``, hands back `Kept`, which ``calls`` opens.

    >>> import torch
    >>> Store(index=(slice(None), -1)).keep({"x": torch.arange(6).reshape(2, 3)}, "output of 'a'").value
    {'x': tensor([2, 5])}
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.errors import CaptureError
from hookline.sites import _torch

__all__ = ["Kept", "NoNumbers", "Store", "bytes_of", "each_tensor", "memory_of", "size_text", "tensors_of"]


class NoNumbers(Exception):
    """A tensor came that holds none: inside of a transform, or while a model is traced or exported."""


class Kept(NamedTuple):
    """A value as it was kept."""

    value: Any
    """The structure as the module had it; lists and dicts are copies, since others may go on filling theirs."""
    borrowed: tuple[tuple[Tensor, int], ...] = ()
    """Tensors that are not ours alone, each with the version it had."""


class Store:
    """What is done with every tensor on its way into the cache."""

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
        self._used = 0
        self._charged: dict[int, int] = {}
        """Of memory that is borrowed and counts already, where it is and how much: a block's output is the next one's
        input. Going by ids would not do: a tensor that is kept detached dies, and the next one gets its id."""
        self._streams: set[Any] = set()
        """CUDA streams that may still be copying into memory of ours."""

    @property
    def is_plain(self) -> bool:
        """Whether values are kept just as they come."""
        asked = (self._index, self._dtype, self._device, self._limit)
        return not (self._detach or self._clone) and all(option is None for option in asked)

    def keep(self, value: Any, what: str) -> Kept:
        """Keep a value of any structure; ``what`` it is, for errors. Raises `NoNumbers`."""
        if isinstance(value, Tensor):
            piece, version = self._keep_tensor(value, what)
            return Kept(piece, () if version is None else ((piece, version),))
        borrowed: list[tuple[Tensor, int]] = []

        def keep_one(path: str, tensor: Tensor) -> Tensor:
            piece, version = self._keep_tensor(tensor, what)
            if version is not None:
                borrowed.append((piece, version))
            return piece

        return Kept(each_tensor(value, keep_one), tuple(borrowed))

    def settle(self) -> None:
        """Wait for copies that are under way; after it every kept tensor can be read."""
        while self._streams:
            self._streams.pop().synchronize()

    def clear(self) -> None:
        """Nothing is kept any more."""
        self.settle()
        self._used = 0
        self._charged.clear()

    # -- one tensor --------------------------------------------------------------------------------------

    def _keep_tensor(self, tensor: Tensor, what: str) -> tuple[Tensor, int | None]:
        """The tensor to keep, and its version if its memory is not ours alone."""
        if not _torch.has_numbers(tensor):
            raise NoNumbers
        piece, mine = tensor, False
        # Inference mode keeps no count of changes, so there only a copy is safe from them.
        copies = self._clone or tensor.is_inference()
        if self._index is not None and tensor.dim():
            piece = self._cut(tensor, what)
            mine = not _share_memory(piece, tensor)
            copies = not mine  # a copy of the part lets the whole go
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
        return piece, None if mine else piece._version

    def _cut(self, tensor: Tensor, what: str) -> Tensor:
        """The part that was asked for."""
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
        # Into pinned memory the copy runs while the host goes on. It stands in the stream of whoever made the tensor,
        # so what that does to the memory afterwards, a reuse by the allocator included, comes after it.
        pinned = torch.empty_like(piece, device=device, pin_memory=True, requires_grad=False)
        pinned.copy_(piece, non_blocking=True)
        self._streams.add(torch.cuda.current_stream(piece.device))
        return pinned

    def _charge(self, piece: Tensor, dtype: torch.dtype, what: str, *, borrows: bool) -> None:
        """Count the bytes that are about to be kept, or raise before they are."""
        assert self._limit is not None
        moves = dtype is not piece.dtype or self._device not in (None, piece.device)
        place = memory_of(piece) if borrows and not moves else None
        # What is borrowed keeps the whole memory that it is a view of.
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


def memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """Where the memory of a tensor is, and how many bytes; None for kinds of tensor that have none of their own."""
    try:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return None
    return (place, size) if place else None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """How much memory some tensors take together; what several of them share counts once."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        place = memory_of(tensor)
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
    """Bytes for people."""
    units = ["GB", "MB", "kB", "B"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{size:.0f} B" if units[-1] == "B" else f"{size:,.1f} {units[-1]}"


# -- structures ----------------------------------------------------------------------------------------------


def _same(leaf: Any) -> Any:
    return leaf


def each_tensor(
    value: Any,
    change: Callable[[str, Tensor], Any],
    other: Callable[[Any], Any] = _same,
    path: str = "",
    above: tuple[int, ...] = (),
) -> Any:
    """The same structure, in containers of its own, with ``change(path, tensor)`` for every tensor.

    Unlike ``tree.replace`` it leaves the lists and dicts of others alone. What is neither tensor nor container becomes
    ``other(leaf)``; a container of a kind that cannot be rebuilt, a plain tuple, list or dict.
    """
    if isinstance(value, Tensor):
        return change(path, value)
    if id(value) in above:
        return value  # it contains itself

    def below(key: Any, item: Any) -> Any:
        return each_tensor(item, change, other, f"{path}.{key}" if path else str(key), (*above, id(value)))

    if isinstance(value, tuple):
        items = [below(index, item) for index, item in enumerate(value)]
        unchanged = all(new is old for new, old in zip(items, value, strict=True))
        return value if unchanged else _tuple_like(value, items)
    if isinstance(value, list):
        return [below(index, item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: below(key, item) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _record_like(value, {name: below(name, getattr(value, name)) for name in fields})
    return other(value)


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a structure, in order."""
    found: list[Tensor] = []

    def note(path: str, tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    each_tensor(value, note)
    return found


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    if hasattr(kind, "_make"):
        return kind._make(items)
    if kind is tuple or hasattr(kind, "n_sequence_fields"):  # what torch.max and others return
        return kind(items)
    return tuple(items)


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    # A copy of a dict has items of its own. Of other mappings it may share what is inside, and with it the run.
    if type(value) is dict or not isinstance(value, dict | UserDict):
        return items
    try:
        twin: Any = copy.copy(value)
        for key, item in items.items() if twin is not value else ():
            twin[key] = item  # a ModelOutput keeps its attributes in step
    except Exception:  # whatever its own methods do
        return items
    return items if twin is value else twin


def _record_like(value: Any, items: dict[str, Any]) -> Any:
    try:
        twin = copy.copy(value)
        for key, item in items.items() if twin is not value else ():
            object.__setattr__(twin, key, item)  # frozen ones too
    except Exception:
        return items
    return items if twin is value else twin
