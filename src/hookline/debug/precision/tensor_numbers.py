"""Measure one tensor for a precision check: NaN and infinities, minimum, maximum, mean, first values, hash.

`PrecisionChecker` calls `measure` and `hash_of`; both read the tensor and change nothing. They wait for the device.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hookline.guard.digest import dense

__all__ = ["TensorNumbers", "as_numpy", "hash_of", "local_copy", "measure"]

FIRST: Final = 6
"""How many values a line shows."""
_NUMPY_HAS: Final = (
    *(torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
)


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """The numbers of one tensor; minimum, maximum and mean are those of its finite values."""

    minimum: float | int
    maximum: float | int
    mean: float
    nan: int
    inf: int
    first: tuple[Any, ...]
    """The first six values."""
    more: bool
    """Whether there are others behind them."""

    def text(self) -> str:
        """Return them as a line of the log shows them."""
        first = ", ".join(_short(value) for value in self.first)
        return (
            f"min={_short(self.minimum)} max={_short(self.maximum)} mean={_short(self.mean)} "
            f"[{first}{', ...' if self.more else ''}]"
        )


def local_copy(tensor: Tensor) -> Tensor | None:
    """Return the tensor's numbers as a plain tensor on the host; None if it has none (fake, meta, in a transform)."""
    plain = dense(tensor)
    return None if plain is None else plain.cpu().contiguous()


def measure(plain: Tensor) -> TensorNumbers:
    """Return the numbers of a tensor that `local_copy` gave; of an empty one, zeros."""
    flat = _flat_numbers(plain)
    first = tuple(as_numpy(plain.reshape(-1)[:FIRST]).tolist())
    more = plain.numel() > FIRST
    if not flat.size:
        return TensorNumbers(0, 0, 0.0, 0, 0, first, more)
    if flat.dtype.kind in "iub":
        whole = flat.astype(np.uint8) if flat.dtype.kind == "b" else flat
        mean = float(np.mean(whole, dtype=np.float64))
        return TensorNumbers(int(whole.min()), int(whole.max()), mean, 0, 0, first, more)
    finite = np.isfinite(flat)
    good = int(finite.sum())
    nan = int(np.isnan(flat).sum()) if good < flat.size else 0
    kept = flat if good == flat.size else flat[finite]
    if not good:
        return TensorNumbers(float("nan"), float("nan"), float("nan"), nan, flat.size - nan, first, more)
    mean = _mean(kept)
    return TensorNumbers(float(kept.min()), float(kept.max()), mean, nan, flat.size - good - nan, first, more)


def _mean(kept: np.ndarray[Any, Any]) -> float:
    """Return the mean in float64, where the sum of large values may overflow."""
    with np.errstate(over="ignore"):
        mean = float(np.mean(kept, dtype=np.float64))
    return mean if np.isfinite(mean) else float(np.sum(kept.astype(np.float64) / kept.size))


def hash_of(plain: Tensor, tolerance: float = 0.0) -> str:
    """Return the md5 of the numbers of a tensor that `local_copy` gave.

    With ``tolerance`` 0 it is the md5 of its bytes. Above that, of the values rounded to multiples of ``tolerance``, in
    float64: then tensors of several dtypes that hold nearly the same values have one hash.
    """
    if not tolerance:
        return hashlib.md5(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), usedforsecurity=False).hexdigest()
    flat = _flat_numbers(plain).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.rint(flat / tolerance) + 0.0  # -0.0 becomes 0.0
    rounded[np.isnan(flat)] = np.nan  # one of the many bit patterns of NaN
    return hashlib.md5(rounded.tobytes(), usedforsecurity=False).hexdigest()


def as_numpy(plain: Tensor) -> np.ndarray[Any, Any]:
    """Return an array with the same numbers; dtypes that numpy lacks (bfloat16, float8, …) become wider ones."""
    if plain.dtype in _NUMPY_HAS:
        array: np.ndarray[Any, Any] = plain.numpy()
        return array
    wider = torch.complex64 if plain.is_complex() else torch.float32 if plain.is_floating_point() else torch.int64
    return plain.to(wider).numpy()


def _flat_numbers(plain: Tensor) -> np.ndarray[Any, Any]:
    """Return all numbers in one row; a complex one counts as two."""
    array = as_numpy(plain).reshape(-1)
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def _short(value: Any) -> str:
    return format(value, ".6g") if isinstance(value, float) else str(value)
