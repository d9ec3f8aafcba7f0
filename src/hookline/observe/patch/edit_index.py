"""Which part of an activation an edit is for: ``index=``, checked when it is given, applied out of place.

Takes what a user would write between brackets; an `Edit` asks it for the part of a tensor, and for the tensor with
another part in its place.

    >>> import torch
    >>> last = Index.parse((slice(None), -1))
    >>> last.put(torch.zeros(2, 3), torch.ones(2))
    tensor([[0., 0., 1.],
            [0., 0., 1.]])
"""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.observe.index_grammar import plain_item, text_of
from hookline.observe.patch.fit import Held
from hookline.observe.patch.misfits import misfit, shape_of

__all__ = ["Index", "IndexLike"]

# Between brackets torch would read a number that comes as a tensor, and wait for it.
_INDEX: Final[Callable[..., Tensor]] = torch.ops.aten.index.Tensor
_INDEX_PUT: Final[Callable[..., Tensor]] = torch.ops.aten.index_put_.default

IndexLike: TypeAlias = "int | slice | EllipsisType | Tensor | list[Any] | tuple[Any, ...]"
"""What goes between the brackets of a tensor, but for None: numbers, slices, ``...``, masks, lists of places."""


class Index:
    """What stands between the brackets, one item per dimension."""

    def __init__(self, text: str, items: list[Any], masks: list[tuple[int, tuple[int, ...]]]) -> None:
        self.text = text
        """As it was given."""
        self.items = items
        """Numbers, slices, ``...``, and places held as tensors."""
        self.masks = masks
        """For each mask, the dimension it begins at and the shape that the activation has to have from there."""
        self.makes = "".join(map(_make, items))
        """What each item is: n for a number, p for places, s for a slice, "." for ``...``."""
        self.num_dims = len(self.makes.replace(".", ""))
        """How many dimensions it speaks of."""
        # What follows is for the compiler: to it a number is a constant, and each position would need another graph.
        self.has_numbers = "n" in self.makes and "p" not in self.makes
        """Whether numbers can be looked up as tensors."""
        self.slices = tuple(slice(None) if make == "n" else item for make, item in zip(self.makes, items, strict=True))
        """The index without its numbers."""
        self.numbers = [
            Held(torch.tensor(item)) if make == "n" else None for make, item in zip(self.makes, items, strict=True)
        ]
        """The numbers as tensors, where the items are some."""

    @classmethod
    def parse(cls, given: Any) -> Index:
        """The index that was meant, or an error that says what cannot be one."""
        with torch.inference_mode(False):  # what is kept may serve in training later
            return cls._parse(given, text_of(given))

    @classmethod
    def _parse(cls, given: Any, text: str) -> Index:
        items: list[Any] = []
        masks: list[tuple[int, tuple[int, ...]]] = []
        for one in given if isinstance(given, tuple) else (given,):
            item = plain_item(one, text)
            if not isinstance(item, Tensor):
                items.append(item)
            elif item.dtype == torch.bool:
                if Ellipsis in items:
                    raise OptionError(f"index={text} has a mask behind '...': write a slice for each dimension before.")
                # The places of a mask are known now. Left to the call, they would be a size that depends on data,
                # which costs a wait on a GPU, and which no compiled graph can hold.
                masks.append((len(items), tuple(item.shape)))
                items += [Held(places) for places in item.nonzero(as_tuple=True)]
            else:
                items.append(Held(item))
        if items.count(Ellipsis) > 1:
            raise OptionError(f"index={text} has more than one '...'.")
        return cls(text, items, masks)

    def part(self, x: Tensor, where: str) -> Tensor:
        """That part of the tensor, which is the one at ``where``."""
        self._check(x, where)
        if self.has_numbers and torch.compiler.is_compiling():
            return _INDEX(x[self.slices], self._numbers_on(x))
        try:
            return x[self._on(x)]
        except IndexError as error:
            misfit(f"index={self.text} is outside ({error})", where, f"has shape {shape_of(x)}", _INSIDE)

    def put(self, x: Tensor, part: Tensor) -> Tensor:
        """A copy of the tensor with something else in that part; the rest, and its gradients, are untouched."""
        new = x.clone()
        if self.has_numbers and torch.compiler.is_compiling():
            _INDEX_PUT(new[self.slices], self._numbers_on(x), part)
        else:
            new[self._on(x)] = part
        return new

    def _on(self, x: Tensor) -> tuple[Any, ...]:
        return tuple([item.on(x) if make == "p" else item for make, item in zip(self.makes, self.items, strict=True)])

    def _numbers_on(self, x: Tensor) -> list[Tensor | None]:
        """For each dimension of ``x`` its number, if it has one."""
        found: list[Tensor | None] = []
        for make, number in zip(self.makes, self.numbers, strict=True):
            if make == ".":
                found += [None] * (x.dim() - self.num_dims)
            else:
                found.append(None if number is None else number.on(x))
        return found

    def _check(self, x: Tensor, where: str) -> None:
        """Raise unless the tensor has such a part.

        What is in tensors is not looked at, which would wait for a GPU, nor numbers and slices in compiled code: there
        a number outside of the activation is torch's own error, and a slice that takes nothing changes nothing.
        """
        if self.num_dims > x.dim():
            misfit(
                f"index={self.text} speaks of {self.num_dims} dimensions", where, f"has shape {shape_of(x)}", _SHORTER
            )
        dim = 0
        for place, make in enumerate(self.makes):
            if make == ".":
                dim = x.dim() - (self.num_dims - dim)
                continue
            if not torch.compiler.is_compiling() and _is_outside(self.items[place], make, x.shape[dim]):
                misfit(f"index={self.text} is outside of dimension {dim}", where, f"has shape {shape_of(x)}", _INSIDE)
            dim += 1
        for start, shape in self.masks:
            for offset, size in enumerate(shape):
                if x.shape[start + offset] != size:
                    misfit(f"index={self.text} has a mask of shape {shape}", where, f"has shape {shape_of(x)}", _MASK)

    def __repr__(self) -> str:
        return self.text


_SHORTER = "Leave dimensions out of index=, or give the edit to a site with more of them."
_INSIDE = "Count from the end (-1 is the last), or give an index that is inside."
_MASK = "A mask has the sizes of the dimensions that it stands for; give places (a list) where they change."


def _is_outside(item: Any, make: str, size: int) -> bool:
    """Whether a number, or all of a slice, is outside of a dimension.

    A slice that is empty in every dimension, such as ``0:0``, is meant to be so; a mask or a list may be empty as well.
    One with an open end takes what there is, which may be nothing: ``1:`` in the one-token steps of ``generate``.
    """
    if make == "n":
        return not -size <= item < size
    if make != "s" or not size or item.start is None or item.stop is None or range(*item.indices(size)):
        return False
    large = size + abs(item.start or 0) + abs(item.stop or 0) + 1
    return bool(range(*item.indices(large)))


def _make(item: Any) -> str:
    if isinstance(item, Held):
        return "p"
    return "." if item is Ellipsis else "s" if isinstance(item, slice) else "n"
