"""Numbers as bytes: what the page unpacks in the browser.

Takes steps and values from `page`, hands out a header for JSON and one block of bytes. As text, two million numbers are
20 MB and a second of parsing; packed they are 5 MB and 50 ms.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Packer", "squeezed", "thinned"]

_LARGEST: Final = float(np.finfo(np.float32).max)
_SHORT: Final = np.uint32(0xFFFFFF00)
"""Without its last 8 bits a number is still right to 1 in 65,000; the page shows four or five digits of it."""


class Packer:
    """Collects arrays; series that share their steps share them in the file.

    Recipe: ``packer = Packer(); packer.steps(curve.steps); packer.values(curve.values); squeezed(header, packer)``.
    """

    def __init__(self) -> None:
        self._floats: list[NDArray[np.float32]] = []
        self._num_floats = 0
        self._steps: dict[bytes, int] = {}
        self.step_lists: list[dict[str, int]] = []
        """Where each list of steps is: ``{"first", "every", "count"}`` or, if uneven, ``{"at", "count"}``."""
        self._uneven: list[NDArray[np.int32]] = []
        self._num_uneven = 0

    def steps(self, steps: NDArray[np.int64]) -> int:
        """Keep a list of steps; its number."""
        key = steps.tobytes()
        if key not in self._steps:
            self._steps[key] = len(self.step_lists)
            self.step_lists.append(self._placed(steps))
        return self._steps[key]

    def _placed(self, steps: NDArray[np.int64]) -> dict[str, int]:
        gaps = np.diff(steps)
        if steps.size and (steps.size < 2 or bool((gaps == gaps[0]).all())):
            return {"first": int(steps[0]), "every": int(gaps[0]) if gaps.size else 1, "count": int(steps.size)}
        self._uneven.append(steps.astype(np.int32))
        self._num_uneven += steps.size
        return {"at": self._num_uneven - steps.size, "count": int(steps.size)}

    def values(self, values: NDArray[np.float64], *, short: bool = False) -> int:
        """Keep numbers; their place. ``short`` drops digits that a colour does not show."""
        # What float32 cannot hold is not infinite; NaN and infinities go through clip as they are, told apart here.
        clipped = np.where(np.isinf(values), values, np.clip(values, -_LARGEST, _LARGEST)).astype(np.float32)
        self._floats.append(_shortened(clipped).reshape(-1) if short else clipped.reshape(-1))
        self._num_floats += values.size
        return self._num_floats - values.size

    def block(self) -> tuple[dict[str, int], bytes]:
        """How many there are of each, and all the bytes."""
        floats = np.concatenate([*self._floats, np.empty(0, np.float32)])
        uneven = np.concatenate([*self._uneven, np.empty(0, np.int32)])
        # All first bytes, then all second bytes, …: signs and exponents repeat, so gzip finds them.
        planes = floats.astype("<f4").view(np.uint8).reshape(-1, 4).T.tobytes()
        return {"floats": floats.size, "ints": uneven.size}, uneven.astype("<i4").tobytes() + planes


def _shortened(values: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x80)) & _SHORT).view(np.float32)
    # Rounding up must not make an infinity of a number, nor a number of a NaN.
    return np.where(np.isfinite(rounded) & np.isfinite(values), rounded, values)


def squeezed(header: dict[str, Any], packer: Packer) -> str:
    """Everything in base64: the length of the header, the header, the bytes; compressed."""
    counts, block = packer.block()
    text = json.dumps({**header, "steps": packer.step_lists, "counts": counts}, allow_nan=False, separators=(",", ":"))
    head = text.encode()
    head += b" " * (-(len(head) + 4) % 4)  # whole numbers have to begin at a multiple of 4
    return base64.b64encode(gzip.compress(len(head).to_bytes(4, "little") + head + block, 6, mtime=0)).decode()


def thinned(
    steps: NDArray[np.int64], values: NDArray[np.float64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most ``limit`` of the columns of ``values`` (rows, steps), with every peak kept.

    Recipe: ``steps, values = thinned(curve.steps, curve.values[None], 2000)``.

    Steps are taken together; of each stretch, a row keeps its smallest and its largest number in the order they came,
    and what is not finite before either. They are put at the first step and the middle one.
    """
    count = steps.size
    if count <= limit:
        return steps, values
    size = -(-count // max(1, limit // 2))
    starts = np.arange(0, count, size)
    middles = np.minimum(starts + size // 2, count - 1)  # so that columns are evenly spaced
    padded = np.pad(values, ((0, 0), (0, starts.size * size - count)), mode="edge").reshape(len(values), -1, size)
    low, high = _extremes(padded)
    pairs = np.sort(np.stack([low, high], -1), -1)  # (rows, stretches, 2)
    kept = np.take_along_axis(padded, pairs, -1).reshape(len(values), -1)
    at = np.stack([starts, middles], -1).reshape(-1)
    whole = np.concatenate([[True], np.diff(at) > 0])  # a last stretch of one step has one column
    return steps[at[whole]], kept[:, whole]


def _extremes(values: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where the smallest and largest are, (rows, stretches); of stretches with something not finite, that."""
    bad = ~np.isfinite(values)
    finite = np.where(bad, 0.0, values)
    low = np.where(bad, np.inf, finite).argmin(-1)
    high = np.where(bad, -np.inf, finite).argmax(-1)
    return np.where(bad.any(-1), bad.argmax(-1), low), high
