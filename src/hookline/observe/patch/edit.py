"""What all edits share: a name, the part of the activation they are for, and the way they are applied to it.

`edits` and `function` say what becomes of that part; `hooks` calls ``apply`` with the main tensor of a site.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from hookline.observe.patch.edit_index import Index, IndexLike
from hookline.observe.patch.misfits import misfit, place_of, shape_of
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.sites.modules.forward_counter import ForwardCounter
    from hookline.sites.site import Site

__all__ = ["Edit", "broadcasts", "dtype_name"]


class Edit:
    """A change of activations, to be put on sites by ``patch``.

    Recipe::

        last_token = hookline.edits.steer(vector, 2.0, index=(slice(None), -1))
        with hookline.patch(model, {"layers.5": last_token}):
            model(x)

    One edit can be used for many sites, models and patches. To write one of your own, give ``patch`` a function.
    """

    def __init__(self, word: str, index: IndexLike | None = None) -> None:
        self.word = word
        """What it is called in reports and errors."""
        self.index = None if index is None else Index.parse(index)
        """The part of the activation that it is for; None for all of it."""

    def __repr__(self) -> str:
        options = [self.options(), "" if self.index is None else f"index={self.index}"]
        return f"{self.word}({', '.join(filter(None, options))})"

    def for_part(self, index: IndexLike | None) -> Edit:
        """The same edit for a part of the activation, unless it has one of its own."""
        if index is None or self.index is not None:
            return self
        twin = copy.copy(self)
        twin.index = Index.parse(index)
        return twin

    def bound(self, names: Mapping[str, Sequence[str]], *, inputs: bool) -> Edit:
        """The edit with all that it needs for the sites of these names, each with every name its module has."""
        return self

    def attached(self, root: ForwardCounter) -> None:
        """Take note of what counts the calls of the sites that the edit was put on."""

    def apply(self, x: Tensor, site: Site) -> Tensor:
        """The activation, edited."""
        if self.index is None:
            return self.change(x, x, site)
        return self.index.put(x, self.change(self.index.part(x, place_of(site)), x, site))

    def change(self, part: Tensor, x: Tensor, site: Site) -> Tensor:
        """What the part of the activation ``x`` becomes."""
        raise NotImplementedError

    def options(self) -> str:
        """What it was made with, as a user would write it."""
        return ""

    def misfit(self, what: str, part: Tensor, x: Tensor, site: Site, remedy: str) -> NoReturn:
        """Raise: the edit does not fit that part of ``x``."""
        found = f"has shape {shape_of(x)}"
        if self.index is not None:
            found += f", of which index={self.index.text} takes {shape_of(part)}"
        misfit(f"{self.word}() {what}", place_of(site), found, remedy)

    def check_real(self, x: Tensor, site: Site) -> None:
        """Raise unless fractions can be put into the activation."""
        if not (x.is_floating_point() or x.is_complex()):
            misfit(f"{self.word}() is for real numbers", place_of(site), f"is of {dtype_name(x.dtype)}", _WHOLE)


_WHOLE = "Choose a site behind the embedding, or use ablate(), replace() or a function."


def broadcasts(value: Tensor, part: Tensor) -> bool:
    """Whether one tensor fits into the other, without making it larger."""
    if value.dim() > part.dim():
        return False
    offset = part.dim() - value.dim()
    return all(size in (1, part.shape[offset + dim]) for dim, size in enumerate(value.shape))


@_torch.constant_while_tracing
def dtype_name(dtype: torch.dtype) -> str:
    """``int64``."""
    return str(dtype).removeprefix("torch.")
