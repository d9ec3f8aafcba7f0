"""The one way in which an edit says that it does not fit: what, where, what is there, what to do.

Called by the other files of this folder in the middle of a run, also while the compiler traces them.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from hookline.errors import HookReturnError
from hookline.sites import _torch
from hookline.sites.kinds import Kind

if TYPE_CHECKING:
    from hookline.sites.site import Site

__all__ = ["misfit", "place_of", "shape_of"]


@_torch.constant_while_tracing  # so that the compiler hands on the message, and not the fact that something was raised
def misfit(what: str, where: str, found: str, remedy: str) -> NoReturn:
    """Raise: ``what`` does not fit the activation at ``where``, which is as ``found``."""
    raise HookReturnError(f"{what}, but {where} {found}. {remedy}")


def place_of(site: Site) -> str:
    """The activation that is edited, in words."""
    side = "input" if site.kind is Kind.FORWARD_PRE else "output"
    return f"the {side} of {site.name!r}" if site.name else f"the {side} of the model"


def shape_of(x: Tensor) -> str:
    """The shape in words; the compiler, which may keep sizes open, is made to say them."""
    sizes = [str(operator.index(size)) for size in x.shape]
    return f"({', '.join(sizes)}{',' if x.dim() == 1 else ''})"
