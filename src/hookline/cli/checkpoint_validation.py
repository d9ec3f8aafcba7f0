"""``--validate-checkpoints``: every checkpoint is read back, and compared with what was to be saved, bit for bit.

Stands in for `Checkpoints` in a run; takes trees from the loop, says OK or what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline.training.checkpoints import checkpoint_file
from hookline.training.checkpoints.checkpoints import Checkpoints

__all__ = ["ValidatedCheckpoints", "differing"]


class ValidatedCheckpoints(Checkpoints):
    """Checkpoints that are read back as soon as they are written.

    Recipe: ``ValidatedCheckpoints("run/checkpoints", every=1, say=print)``.
    """

    def __init__(self, folder: str | Path, *, say: Callable[[str], None], **options: Any) -> None:
        super().__init__(folder, **options)
        self._say = say

    def write(self, tree: Mapping[str, Any], steps: int) -> Path:
        """Write it, read it, compare."""
        path = super().write(tree, steps)
        wrong = list(differing(tree, checkpoint_file.read(path), "$"))
        self._say(f"{path.name}: {'OK' if not wrong else 'MISMATCH at ' + ', '.join(wrong[:5])}")
        return path


def differing(saved: Any, found: Any, path: str) -> Iterator[str]:
    """Where two trees differ."""
    if isinstance(saved, Mapping):
        if not isinstance(found, Mapping) or list(saved) != list(found):
            yield path
        else:
            for key in saved:
                yield from differing(saved[key], found[key], f"{path}.{key}")
    elif isinstance(saved, list | tuple):
        if type(found) not in (list, tuple) or len(saved) != len(found):
            yield path
        else:
            for place, (one, other) in enumerate(zip(saved, found, strict=True)):
                yield from differing(one, other, f"{path}[{place}]")
    elif not _same(saved, found):
        yield path


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one).__module__ == type(other).__module__ and _bits(one) == _bits(other)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _bits(value: Any) -> tuple[Any, ...]:
    """Everything of a tensor or array: its type, its shape, its bytes."""
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    return str(value.dtype), tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)
