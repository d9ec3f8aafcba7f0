"""A function of the user's as an edit.

Takes whatever stands in the mapping that ``patch`` was given, hands an `Edit` back, or the error that says what is
wrong with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.errors import HookSignatureError
from hookline.messages import type_name
from hookline.observe.patch import edits
from hookline.observe.patch.edit import Edit
from hookline.observe.patch.misfits import misfit, place_of, shape_of
from hookline.sites import _torch
from hookline.sites.select import describe
from hookline.sites.signature import hook_name

if TYPE_CHECKING:
    from hookline.sites.site import Site

__all__ = ["as_edit"]

_MAKERS = (edits.ablate, edits.mean_ablate, edits.replace, edits.scale, edits.steer, edits.swap)


def as_edit(given: Any, target: Any) -> Edit:
    """An edit as it is, a function as an edit."""
    if isinstance(given, Edit):
        return given
    if isinstance(given, Tensor):
        raise HookSignatureError(f"The edit for {describe(target)} is a tensor: write replace(tensor).")
    if not callable(given):
        raise HookSignatureError(
            f"The edit for {describe(target)} is {type_name(given)}: give an edit (ablate(), scale(0.5), …), or a "
            "function of the activation."
        )
    if any(given is maker for maker in _MAKERS):
        raise HookSignatureError(f"The edit for {describe(target)} was not made: write {given.__name__}(…).")
    if isinstance(given, type):
        raise HookSignatureError(f"The edit for {describe(target)} is the class {given.__name__}: make one of it.")
    return _Function(given, target)


class _Function(Edit):
    def __init__(self, function: Callable[..., Any], target: Any) -> None:
        super().__init__(hook_name(function))
        self.function = function
        self.wants_site = _check_function(function, target)

    def change(self, part: Tensor, x: Tensor, site: Site) -> Tensor:
        new = self.function(part, site=site) if self.wants_site else self.function(part)
        if not isinstance(new, Tensor):
            misfit(f"{self.word} returned {_kind_of(type(new))}", place_of(site), "is a tensor", _RETURN)
        if new.shape != part.shape:
            self.misfit(f"returned a tensor of shape {shape_of(new)}", part, x, site, _SAME_SHAPE)
        return new.to(device=part.device, dtype=part.dtype)  # the next layer computes in what it was given before


_RETURN = "Return the new tensor, or the one that was given to leave it as it is."
_SAME_SHAPE = "Return a tensor of the shape that was given, or use hookline.attach, whose hooks may return anything."


@_torch.constant_while_tracing
def _kind_of(cls: type) -> str:
    return cls.__name__ if cls is type(None) else f"a {cls.__name__}"


def _check_function(function: Any, target: Any) -> bool:
    """Raise unless it can be called with an activation; tell whether it declares ``site``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False  # some built-ins have none; they are taken at their word
    site = signature.parameters.get("site")
    wants_site = site is not None and site.kind is inspect.Parameter.KEYWORD_ONLY
    try:
        signature.bind("output", **({"site": None} if wants_site else {}))
    except TypeError as error:
        raise HookSignatureError(
            f"{hook_name(function)}{signature} cannot be the edit for {describe(target)}: it is called as "
            f"edit(activation), with site= where it declares a keyword-only site ({error}). A hook of module, args and "
            "output goes to hookline.attach."
        ) from None
    return wants_site
