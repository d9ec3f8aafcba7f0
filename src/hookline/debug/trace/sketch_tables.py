"""Hold the random signs of fingerprints, on the host and on a device.

`fingerprints` multiplies tensors by them; `fingerprint_kernel` gives them to its program for GPUs.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BLOCK", "COLUMNS", "ROWS", "WIDTH", "DeviceTables", "SketchTables"]

COLUMNS: Final = 1021
ROWS: Final = 256
BLOCK: Final = COLUMNS * ROWS
WIDTH: Final = 64
"""How many neighbouring columns make a group; there are 16."""


class SketchTables:
    """The random signs of a seed. All traces have those of 0, so that any two can be compared."""

    def __init__(self, seed: int = 0) -> None:
        made = np.random.Generator(np.random.Philox(seed))
        self.seed = seed
        self.signs: NDArray[np.float32] = (made.integers(0, 2, (ROWS, COLUMNS)) * 2 - 1).astype(np.float32)
        self.odd: NDArray[np.uint64] = made.integers(0, 1 << 64, COLUMNS, dtype=np.uint64) | np.uint64(1)
        self.starts: NDArray[np.intp] = np.arange(0, COLUMNS, WIDTH)
        self.signs_double: NDArray[np.float64] = self.signs.astype(np.float64)

    @functools.cache  # noqa: B019  # one object for each seed lives as long as the process
    def block_signs(self, blocks: int) -> NDArray[np.float64]:
        """Return a sign for each of so many blocks and each group."""
        made = np.random.Generator(np.random.Philox(key=self.seed + (1 << 64)))
        signs: NDArray[np.float64] = (made.integers(0, 2, (blocks, len(self.starts))) * 2 - 1).astype(np.float64)
        signs[0] = 1.0
        return signs


class DeviceTables:
    """The tables of a seed, on one device."""

    def __init__(self, device: torch.device, host: SketchTables) -> None:
        self.host = host
        self.signs: Tensor = torch.from_numpy(host.signs).to(device)
        self.odd: Tensor = torch.from_numpy(host.odd.view(np.int64)).to(device)
        self._block_signs: dict[int, Tensor] = {}

    def block_signs(self, blocks: int) -> Tensor:
        """Return the signs of so many blocks; copied to the device once."""
        found = self._block_signs.get(blocks)
        if found is None:
            signs = torch.from_numpy(self.host.block_signs(blocks))
            found = self._block_signs[blocks] = signs.to(self.odd.device)
        return found
