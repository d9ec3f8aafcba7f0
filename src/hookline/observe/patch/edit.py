"""Define what all edits share: a name, the part of the activation they change, and how they are applied to it.

`given_edits`, `recorded_edits` and functions of users (`patch`) say what becomes of that part; the hooks of ``patch``
call ``apply`` with the main tensor of a site.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import torch
from torch import Tensor

from hookline.observe.patch.edit_index import EditIndex, GivenTensor, IndexLike
from hookline.observe.patch.edited_tensor import Where, misfit, shape_of, site_text
from hookline.observe.token_axes import GIVE_ROWS, TokenAxes, axes_for
from hookline.sites import _torch
from hookline.tables import Table

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.hook_at_site import ForwardCounter

__all__ = ["BROADCAST", "Edit", "broadcasts"]

BROADCAST: Final = "Give a tensor of that shape, or of one that broadcasts to it."
_REAL: Final = "Give a real tensor: torch.view_as_real, or .abs()."
_WHOLE: Final = "Choose a site behind the embedding, or use ablate(), replace() or a function."


class Edit:
    """A change of activations, to be put on sites by ``patch``.

    Recipe::

        last_token = hookline.edits.steer(vector, 2.0, index=(slice(None), -1))
        with hookline.patch(model, {"layers.5": last_token}):
            model(x)

    One edit can be used for many sites, models and patches. To write one of your own, give ``patch`` a function.
    """

    needs_moment = False
    """Whether it has to be given a `Site`, with the number of the call; a place will do for others."""
    axes: TokenAxes | None = None
    """Tells where the index cannot mean tokens; None if it names no axis after the first."""

    def __init__(self, word: str, index: IndexLike | None = None) -> None:
        self.word = word
        """Its name in reports and errors."""
        self.index = None if index is None else EditIndex.parse(index)
        """The part of the activation that it changes; None for all of it."""

    def __repr__(self) -> str:
        options = [self.options(), "" if self.index is None else f"index={self.index}"]
        return f"{self.word}({', '.join(filter(None, options))})"

    def _repr_html_(self) -> str:
        part = "all" if self.index is None else self.index.text
        return Table(("edit", "with", "part of the activation"), [(self.word, self.options() or "–", part)]).html()

    def for_part(self, index: IndexLike | None) -> Edit:
        """Return the same edit for a part of the activation, unless it has one of its own."""
        if index is None or self.index is not None:
            return self
        twin = copy.copy(self)
        twin.index = EditIndex.parse(index)
        return twin

    def for_model(self, model: nn.Module) -> Edit:
        """Return the edit as it is put on ``model``, whose roles say what the axes are that its index names."""
        axes = None if self.index is None else axes_for(model, self.index.items)
        if axes is None:
            return self
        twin = copy.copy(self)
        twin.axes = axes
        return twin

    def bound(self, names: Mapping[str, Sequence[str]], *, inputs: bool) -> Edit:
        """Return the edit with all that it needs for the sites of ``names``, each with every name its module has."""
        return self

    def attached(self, counter: ForwardCounter) -> None:
        """Keep what counts the forwards of the model that the edit was put on."""

    def apply(self, x: Tensor, site: Where) -> Tensor:
        """Return the activation, edited."""
        if self.index is None:
            return self.change(x, x, site)
        if self.axes is not None and (fault := self.axes.fault(site.name, x)):
            misfit(f"index={self.index.text} names axes", site_text(site), f"of shape {shape_of(x)} {fault}", GIVE_ROWS)
        return self.index.put(x, self.change(self.index.part(x, site_text(site)), x, site))

    def change(self, part: Tensor, x: Tensor, site: Where) -> Tensor:
        """Return what the part of the activation ``x`` becomes."""
        raise NotImplementedError

    def options(self) -> str:
        """Return its options as a user would write them."""
        return ""

    def misfit(self, what: str, part: Tensor, x: Tensor, site: Where, remedy: str) -> NoReturn:
        """Raise: the edit does not fit that part of ``x``."""
        found = f"has shape {shape_of(x)}"
        if self.index is not None:
            found += f", of which index={self.index.text} takes {shape_of(part)}"
        misfit(f"{self.word}() {what}", site_text(site), found, remedy)

    def check_real(self, x: Tensor, site: Where) -> None:
        """Raise unless fractions can be put into the activation."""
        if not (x.is_floating_point() or x.is_complex()):
            misfit(f"{self.word}() is for real numbers", site_text(site), f"is of {_dtype_name(x.dtype)}", _WHOLE)

    def converted(self, given: GivenTensor, x: Tensor, site: Where) -> Tensor:
        """Return a given tensor in the dtype of ``x``, unless that would cut something off its numbers."""
        tensor = given.tensor
        if tensor.is_floating_point() or tensor.is_complex():
            self.check_real(x, site)
        if tensor.is_complex() and not x.is_complex():
            misfit(
                f"{self.word}() was given complex numbers",
                site_text(site),
                f"is of {_dtype_name(x.dtype)}",
                _REAL,
            )
        return given.like(x)


def broadcasts(value: Tensor, part: Tensor) -> bool:
    """Return whether ``value`` broadcasts to ``part``, without making it larger."""
    if value.dim() > part.dim():
        return False
    offset = part.dim() - value.dim()
    return all(size in (1, part.shape[offset + dim]) for dim, size in enumerate(value.shape))


@_torch.constant_while_tracing
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
