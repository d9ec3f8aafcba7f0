"""Find where an ``index=`` would take a unit of flattened tokens for a token.

The output of a role inside of the blocks has the axes (batch, tokens, width), so ``(slice(None), 5)`` is the sixth
token. Some modules get the tokens of all sequences as rows, (batch × tokens, width): the MLP of OPT, routers, all
layers in vLLM. There the same index is the sixth unit of every token. ``patch`` and ``capture`` ask `TokenAxes` before
they cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn

from hookline.sites import _torch
from hookline.sites.roles import find_roles

__all__ = ["GIVE_ROWS", "TokenAxes", "axes_for"]

GIVE_ROWS: Final = "Give rows: of one prompt, index=5 is token 5. A unit is index=(..., 5)."
"""What to do about a fault."""

_BY_TOKEN: Final = ("resid", "attn", "mlp", "router")
"""Roles whose outputs have a row for each token. A head may have one for each sequence, as a classifier has."""
_FLAT: Final = 2
"""Dimensions of (batch × tokens, width)."""


def axes_for(model: nn.Module, items: Sequence[Any]) -> TokenAxes | None:
    """Return what checks an index of these ``items``; None if it says by ``...`` that it counts from the last axis."""
    is_by_axis = len(items) > 1 and not any(item is Ellipsis or item is None for item in items)
    return TokenAxes(model) if is_by_axis else None


class TokenAxes:
    """Knows which modules of a model have a role by whose axes an index is read."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._roles: dict[str, str] | None = None

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
