"""What an intervention could do to the data: write into the current batch, or into the dataset.

Used by `Guard`. The batch is small, so it is saved with the model and put back (`BatchHolder`). A dataset may be
larger than memory, so it is never copied: `DataWatch` notes counters and samples, and names what was written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hookline.guard.loaders import datasets_of

__all__ = ["BatchHolder", "DataWatch", "is_record", "slots_of"]

_MOST: Final = 4096
"""How many tensors and arrays of a dataset are looked at, and how many objects on the way there."""
_SAMPLE: Final = 4096
"""How many elements of each; all of them where there are no more."""
_NO_RECORDS: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.device, torch.dtype)


class BatchHolder:
    """Something with an attribute, for a snapshot to begin at."""

    def __init__(self, batch: Any) -> None:
        self._held = batch


def is_record(value: Any) -> bool:
    """Return whether an object of a batch may have tensors for attributes: a dataclass, a ``BatchEncoding``."""
    return (hasattr(value, "__dict__") or bool(slots_of(value))) and not isinstance(value, _NO_RECORDS)


def slots_of(value: Any) -> list[str]:
    """Return the names of an object's slots that have a value."""
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in kinds for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


class DataWatch:
    """The tensors and arrays of a loader's dataset, as they are when this is made.

    A write is told by the counters that autograd keeps and, on the CPU, by up to 4,096 elements of each, spread evenly:
    a single element that is written through ``.data`` or NumPy in a larger one may be missed.
    """

    def __init__(self, loader: Any) -> None:
        self._before = [(name, held, _mark(held)) for name, held in _held_by(loader)]

    def written(self) -> list[str]:
        """Return the names of what has been written since."""
        return [name for name, held, before in self._before if _mark(held) != before]


def _held_by(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays of a loader's dataset, and what they are called."""
    if isinstance(loader, list | tuple):
        yield from islice(_inside("loader", loader), _MOST)
    elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        for number, part in enumerate(datasets_of(loader.dataset)):
            name = "loader.dataset" if number == 0 else f"loader.dataset, {type(part).__name__}"
            yield from islice(_inside(name, part), _MOST)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    todo, met = [(name, value)], 0
    while todo and met < _MOST:
        name, value = todo.pop()
        met += 1
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, np.ndarray):
            if value.dtype != object:
                yield name, value
        elif isinstance(value, dict):
            todo += [(f"{name}[{key!r}]", item) for key, item in islice(value.items(), _MOST)]
        elif isinstance(value, list | tuple):
            todo += [(f"{name}[{number}]", item) for number, item in enumerate(islice(value, _MOST))]
        elif met == 1 and hasattr(value, "__dict__"):
            todo += [(f"{name}.{key}", item) for key, item in vars(value).items() if key not in ("dataset", "datasets")]


def _mark(held: Any) -> tuple[Any, ...]:
    """Return what is another after a write."""
    if isinstance(held, np.ndarray):
        return held.shape, held.dtype, _crc(held)
    version = None if held.is_inference() else held._version
    is_read = held.device.type == "cpu" and held.layout is torch.strided and type(held) is Tensor
    return held.data_ptr() if is_read else 0, held.shape, version, _crc_of_tensor(held) if is_read else 0


def _crc(array: Any) -> int:
    step = -(-array.size // _SAMPLE) or 1
    sample = array.reshape(-1)[::step] if array.flags.c_contiguous else array.flat[::step]
    return zlib.crc32(np.ascontiguousarray(sample).view(np.uint8).data) if array.size else 0


def _crc_of_tensor(tensor: Tensor) -> int:
    if not tensor.numel() or tensor.untyped_storage().nbytes() < tensor.nbytes:
        return tensor.untyped_storage().nbytes()
    with torch.no_grad():
        flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
        # A copy: memory that was shown to NumPy once cannot be resized any more.
        sample = flat[:: -(-flat.numel() // _SAMPLE)].clone().view(torch.uint8)
    return zlib.crc32(sample.numpy().data)
