"""Read ``index=``, the part of a tensor to capture or patch, as between the brackets of a tensor.

``capture`` (capturing.py) and edits (`EditIndex` of patching.py) call `parse_index` with what a user wrote. Both make a
`TokenAxes` for the model, ask it for a `fault` before they cut an output (edits: also an input), and add `GIVE_ROWS` to
the error. For edits that may happen while the compiler traces: what is not tensor code there has to be
`constant_while_tracing` (sites/_torch.py).

Captures give the items to torch as they are. Edits make tensors of numbers, places and masks. So a new kind of item
needs a case in `_parse_item` (and its error text), in `index_text`, in `_add` and the other methods of `EditIndex`, and
in `IndexLike` of patching.py; the docstrings of `capture` and `patch` say what users may write. One that takes up no
dimension, or several, needs a case in `TokenAxes.checking` too.

    >>> parse_index((0, range(3)))
    (0, tensor([0, 1, 2]))
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.sites import _torch
from hookline.sites.roles import find_roles

GIVE_ROWS: Final = "Give rows: of one prompt, index=5 is token 5. A unit is index=(..., 5)."
"""What to do about a fault that `TokenAxes` finds."""

_BY_TOKEN: Final = ("resid", "attn", "mlp", "router")
"""Roles whose outputs have a row for each token; keys of `find_roles` (sites/roles.py). The head of a model ("unembed")
is not one: that of a classifier has one row for each sequence."""
_FLAT: Final = 2
"""The number of dimensions of (batch × tokens, width)."""


def parse_index(given: Any, *, new_dimensions: bool = False) -> tuple[Any, ...]:
    """Return the items of an index, with lists and arrays as tensors; raise for what cannot be an index.

    A None makes a new dimension: captures allow it by ``new_dimensions``, edits do not, as there is no place to edit.
    """
    items = given if isinstance(given, tuple) else (given,)
    return tuple([None if item is None and new_dimensions else _parse_item(item, given) for item in items])


def _parse_item(item: Any, index: Any) -> Any:
    places = _places(item)
    if places is not None and places.dtype in (torch.bool, torch.int64, torch.int32):
        return places if places.dtype == torch.bool else places.long()
    if isinstance(item, int | np.integer) and not isinstance(item, bool):
        return int(item)
    if isinstance(item, slice) or item is Ellipsis:
        return item
    raise OptionError(
        f"index={index_text(index)} holds {index_text(item)}: give numbers, slices, '...', a bool mask, a list or "
        "tensor of places (int64), or a tuple of these, as between the brackets of a tensor; to capture a part, a "
        "function from tensor to tensor will do as well. The last token of (B, T, D) is index=(slice(None), -1)."
    )


def _places(item: Any) -> Tensor | None:
    """Return a mask, or places, as a tensor without a graph; None for anything else."""
    if isinstance(item, Tensor):
        return item.detach()
    if not isinstance(item, list | np.ndarray | range):
        return None
    if len(item) == 0:
        return torch.zeros(0, dtype=torch.int64)
    try:
        return torch.as_tensor(list(item) if isinstance(item, range) else item)
    except (TypeError, ValueError, RuntimeError):
        return None


def index_text(given: Any) -> str:
    """Return the index as a user would write it, without the numbers of tensors."""
    if isinstance(given, tuple):
        return "(" + ", ".join(map(index_text, given)) + ("," if len(given) == 1 else "") + ")"
    if isinstance(given, slice):
        ends = ["" if end is None else str(end) for end in (given.start, given.stop, given.step)]
        return ":".join(ends[:2] if not ends[2] else ends)
    if isinstance(given, Tensor | np.ndarray):
        return f"<{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}>"
    return "..." if given is Ellipsis else repr(given)


class TokenAxes:
    """Finds modules at which the second item of an index would name a unit, though the user means a token.

    The output of a role inside of the blocks has the axes (batch, tokens, width), so ``(slice(None), 5)`` is the sixth
    token. Some modules get the tokens of all sequences as rows, (batch × tokens, width): the MLP of OPT, routers, all
    layers in vLLM. There the same index is the sixth unit of every token.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._roles: dict[str, str] | None = None

    @classmethod
    def checking(cls, model: nn.Module, items: Sequence[Any]) -> TokenAxes | None:
        """Return what checks an index; None for one without a second item, or with ``...``, which says which axis."""
        is_by_axis = len(items) > 1 and not any(item is Ellipsis or item is None for item in items)
        return cls(model) if is_by_axis else None

    def fault(self, name: str, x: Tensor) -> str:
        """Return why a second item of an index cannot mean a token of ``x``, at the module ``name``; "" if it can."""
        return self._fault_at(name) if x.dim() == _FLAT else ""

    @_torch.constant_while_tracing
    def _fault_at(self, name: str) -> str:
        if self._roles is None:  # 5 to 15 ms for a GPT-2 of 150 modules: not before it is needed
            model = self._model()
            found = {} if model is None else find_roles(model)
            self._roles = {each: role for role in _BY_TOKEN for each in found.get(role, ())}
        role = self._roles.get(name)
        if role is None:
            return ""
        return (
            f"has no axis for the batch, the tokens of all sequences are its rows (role {role!r}), and a second item "
            "would be a unit, not a token"
        )
