"""How a compiled graph finds the hooks of a module: a key per table, held by the graph as a tensor.

A number would be a constant of the graph, and twelve blocks would need twelve graphs; a tensor is one of its inputs.
Takes tables from ``table`` as they come, gives them back to the operators (`live`).
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hookline.sites.modules.module_hooks import ModuleHooks

__all__ = ["hooks_with_key", "new_key"]

_NUMBERS: Final = itertools.count()
_TABLES: Final[dict[int, weakref.ref[ModuleHooks]]] = {}


def new_key(table: ModuleHooks) -> Tensor:
    """A key for the table; good for as long as the table lives."""
    number = next(_NUMBERS)
    _TABLES[number] = weakref.ref(table, lambda _, tables=_TABLES: tables.pop(number, None))  # type: ignore[misc]
    if not torch.is_inference_mode_enabled():
        return torch.tensor(number, device="cpu")
    with torch.inference_mode(False):  # the key is an ordinary tensor
        return torch.tensor(number, device="cpu")


def hooks_with_key(key: Tensor) -> ModuleHooks | None:
    """The table of that key, unless it is gone."""
    ref = _TABLES.get(int(key))
    return None if ref is None else ref()
