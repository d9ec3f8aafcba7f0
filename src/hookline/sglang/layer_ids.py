"""Find out which layer of a model a module belongs to, and which one is running.

The general dumper asks `layer_running` at each dump, and its hooks look names up in `find_layers`. No tag is set and
cleared: a forward that raises leaves nothing behind.
"""

from __future__ import annotations

import re
import weakref
from typing import Final

from torch import nn

from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules

__all__ = ["find_layers", "layer_running"]

_LAYER: Final = re.compile(r"(?:.*\.)?layers\.(\d+)")
_KNOWN: Final[weakref.WeakKeyDictionary[nn.Module, int]] = weakref.WeakKeyDictionary()
"""The layers of the models that hooks of the dumper are on."""


def find_layers(model: nn.Module) -> dict[str, int]:
    """Return the id of the layer for each module in one, by its name, and remember the layers themselves.

    A layer's id is its ``layer_id``, or its ``layer_number`` less 1, or its number in ``layers``.
    """
    ids: dict[str, int] = {}
    found: dict[str, int] = {}
    for name, module in clean_modules(model):
        match = _LAYER.fullmatch(name)
        if match is not None:
            ids[name] = _KNOWN[module] = _id_of(module, int(match[1]))
        # The innermost layer counts: names come with parents first.
        around = [layer for layer in ids if name == layer or name.startswith(f"{layer}.")]
        if around:
            found[name] = ids[around[-1]]
    return found


def layer_running() -> int | None:
    """Return the id of the innermost layer whose forward runs in this thread; None outside of any."""
    if not _KNOWN:
        return None
    return next((_KNOWN[module] for module in _torch.all_running() if module in _KNOWN), None)


def _id_of(module: nn.Module, number: int) -> int:
    own, counted = getattr(module, "layer_id", None), getattr(module, "layer_number", None)
    if isinstance(own, int):
        return own
    return counted - 1 if isinstance(counted, int) else number
