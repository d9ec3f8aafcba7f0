"""Captured calls once more, with tensors of their own: what copying and pickling a cache carries.

Takes calls by module from ``cache`` and hands it others, which no run, graph or hook reaches.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from hookline.observe.capture.captured_calls import CapturedCall
from hookline.observe.capture.stored_value import Kept, each_tensor
from hookline.sites.compiled.value_layout import Unseen

__all__ = ["copied_calls"]

_PICKLED: Final = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, Unseen)
_CHANGED: Final = -1
"""A version that no tensor has: who reads a copy of what was overwritten is told so, as with the original."""


def copied_calls(calls: dict[str, list[CapturedCall]], *, clone: bool) -> dict[str, list[CapturedCall]]:
    """The same calls without their graphs; with ``clone`` in memory of their own, without it fit to be pickled."""
    copied: dict[int, Tensor] = {}

    def one(tensor: Tensor) -> Tensor:
        if id(tensor) not in copied:  # what is in two places is one tensor in the copy as well
            copied[id(tensor)] = tensor.detach().clone() if clone else tensor.detach()
        return copied[id(tensor)]

    def copy_of(kept: Kept) -> Kept:
        changed = [tensor for tensor, version in kept.borrowed if tensor._version != version]
        value = each_tensor(kept.value, lambda path, tensor: one(tensor), _same if clone else _for_pickle)
        return Kept(value, tuple((one(tensor), _CHANGED) for tensor in changed))

    found: dict[str, list[CapturedCall]] = {}
    for name, of_module in calls.items():
        found[name] = [call.copied(copy_of) for call in of_module]
    return found


def _same(leaf: Any) -> Any:
    return leaf


def _for_pickle(leaf: Any) -> Any:
    """A number or the like as it is; of an object, which may not bear pickling, its class."""
    kind = type(leaf)
    return leaf if isinstance(leaf, _PICKLED) else Unseen(f"{kind.__module__}.{kind.__qualname__}")
