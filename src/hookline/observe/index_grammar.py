"""Check ``index=``, the part of a tensor to capture or patch, as between the brackets of a tensor.

``capture`` and edits call it with what a user wrote.

    >>> plain_item(range(3), "range(0, 3)")
    tensor([0, 1, 2])
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.errors import OptionError

__all__ = ["plain_item", "text_of"]


def plain_item(item: Any, text: str) -> Any:
    """Return one item between the brackets, with lists and arrays as tensors; raise for what cannot be one."""
    if isinstance(item, list | np.ndarray | range):
        item = _places(list(item) if isinstance(item, range) else item, text)
        item = item.long() if item.numel() == 0 else item  # an empty list is one of places
    if isinstance(item, Tensor):
        if item.dtype in (torch.bool, torch.int64, torch.int32):
            return item.detach().long() if item.dtype == torch.int32 else item.detach()
        raise OptionError(f"index={text} holds a tensor of {item.dtype}: give a bool mask, or places as int64.")
    if isinstance(item, np.integer):
        return int(item)
    if isinstance(item, slice):
        return _plain_slice(item, text)
    if item is Ellipsis or (isinstance(item, int) and not isinstance(item, bool)):
        return item
    raise OptionError(
        f"index={text} holds {item!r}: give numbers, slices, '...', a bool mask, a list or tensor of places, or a "
        "tuple of these, as between the brackets of a tensor."
    )


def _places(given: Any, text: str) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"index={text} holds a list that is none of places, or of True and False ({error})."
        ) from None


def _plain_slice(item: slice, text: str) -> slice:
    try:
        ends = [None if end is None else operator.index(end) for end in (item.start, item.stop, item.step)]
    except (TypeError, ValueError):
        raise OptionError(f"index={text} has a slice between {item.start!r} and {item.stop!r}: give numbers.") from None
    if ends[2] is not None and ends[2] < 1:
        raise OptionError(
            f"index={text} has a slice with step {ends[2]}: torch takes steps forward only. Give the places, as a list "
            "or range."
        )
    return slice(*ends)


def text_of(given: Any) -> str:
    """Return the index as a user would write it, without the numbers of tensors."""
    if isinstance(given, tuple):
        return "(" + ", ".join(map(text_of, given)) + ("," if len(given) == 1 else "") + ")"
    if isinstance(given, slice):
        ends = ["" if end is None else str(end) for end in (given.start, given.stop, given.step)]
        return ":".join(ends[:2] if not ends[2] else ends)
    if isinstance(given, Tensor | np.ndarray):
        return f"<{'mask' if str(given.dtype).endswith('bool') else 'places'} of shape {tuple(given.shape)}>"
    return "..." if given is Ellipsis else repr(given)
