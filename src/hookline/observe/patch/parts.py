"""Find the part of an activation that an edit changes, and put another one in its place.

The hooks of ``patch`` ask for the main tensor of an output or of inputs, edits for the part of it that ``index=`` says.
All of it is called eager and traced by the compiler. Containers on the way to the tensor are copied, never changed: a
module may keep the dict it returns, and its caller the one it passes.

    >>> import torch
    >>> last = EditIndex.parse((slice(None), -1))
    >>> last.put(torch.zeros(2, 3), torch.ones(2))
    tensor([[0., 0., 1.],
            [0., 0., 1.]])
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HookReturnError, OptionError
from hookline.observe.index_grammar import plain_item, text_of
from hookline.sites import _torch
from hookline.sites.kinds import Kind
from hookline.tree import children, inside, main_tensor, twin_of

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = [
    "EditIndex", "EditedPlace", "GivenTensor", "IndexLike", "Where", "as_tensor", "find_main_input", "main_input",
    "main_output", "misfit", "rebuilt", "shape_of", "site_text",
]  # fmt: skip

_USUAL_INPUT: Final = "hidden_states"
"""The name that transformers give the input of a block. A mask, also a tensor of real numbers, may come before it."""
_FORWARD_PRE: Final = Kind.FORWARD_PRE
_ATTACH: Final = "Choose a module with tensors there, or write a hook that knows the structure (hookline.attach)."


class EditedPlace(NamedTuple):
    """Where an edit is made; in the place of a `Site` for edits that do not ask when: to make one takes 7 calls."""

    name: str
    """The dotted name of the module."""
    kind: Kind
    """The kind of the hook that edits."""


Where: TypeAlias = "Site | EditedPlace"


@_torch.constant_while_tracing  # so that the compiler passes on the message, and not just that something was raised
def misfit(what: str, where: str, found: str, remedy: str) -> NoReturn:
    """Raise: ``what`` does not fit the activation at ``where``, which is as ``found``."""
    raise HookReturnError(f"{what}, but {where} {found}. {remedy}")


def site_text(site: Where) -> str:
    """Return, for messages, which activation an edit at ``site`` changes: "the output of 'layers.0'"."""
    side = "input" if site.kind is _FORWARD_PRE else "output"
    return f"the {side} of {site.name!r}" if site.name else f"the {side} of the model"


def shape_of(x: Tensor) -> str:
    """Return the shape in words; in compiled code, ask for sizes that the graph keeps open."""
    sizes = [str(operator.index(size)) for size in x.shape]
    return f"({', '.join(sizes)}{',' if x.dim() == 1 else ''})"


def main_output(output: Any, where: str) -> Tensor:
    """Return the main tensor of an output; raise if it has none."""
    main = main_tensor(output)
    if main is None:
        misfit("An edit changes a tensor", where, _found(type(output)), _ATTACH)
    return main


def main_input(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Tensor:
    """Return the main tensor of the arguments; raise if they have none."""
    main = find_main_input(args, kwargs)
    if main is None:
        misfit("An edit changes a tensor", where, "has none in it", _ATTACH)
    return main


def find_main_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the main tensor of the positional arguments, else ``hidden_states``, else that of the keyword ones."""
    main = main_tensor(args)
    if main is None and _USUAL_INPUT in kwargs:
        main = main_tensor(kwargs[_USUAL_INPUT])
    return main_tensor(kwargs) if main is None else main


@_torch.constant_while_tracing
def _found(cls: type) -> str:
    return f"is a {cls.__name__} with none in it"


def rebuilt(value: Any, old: Tensor, new: Tensor, where: str) -> Any:
    """Return the same structure with ``new`` for every ``old``; containers that hold no ``old`` are not copied."""
    return _rebuilt(value, old, new, where, ())[0]


def _rebuilt(value: Any, old: Tensor, new: Tensor, where: str, above: tuple[int, ...]) -> tuple[Any, bool]:
    """Return the structure, and whether it is another one, which the compiler cannot always tell by ``is``.

    ``above`` are the containers it is in: one that contains itself ends there.
    """
    if isinstance(value, Tensor):
        return (new, True) if value is old else (value, False)
    parts = children(value)
    if parts is None or (within := inside(value, above)) is None:
        return value, False
    changed = False
    items: dict[Any, Any] = {}
    for key, part in parts:
        items[key], differs = _rebuilt(part, old, new, where, within)
        changed = changed or differs
    if not changed:
        return value, False
    if torch.compiler.is_compiling():  # which cannot follow the handling of errors
        return twin_of(value, items), True
    try:
        return twin_of(value, items), True
    except Exception as error:  # the methods of a class may raise anything
        found = f"has a {type(value).__name__}, of which none can be made ({error})"
        misfit("An edit puts its tensor into a copy of what is around it", where, found, _ATTACH)


# -- index= ----------------------------------------------------------------------------------------------------------

# Between brackets torch would read a number that comes as a tensor, and wait for it.
_INDEX: Final[Callable[..., Tensor]] = torch.ops.aten.index.Tensor
_INDEX_PUT: Final[Callable[..., Tensor]] = torch.ops.aten.index_put_.default

IndexLike: TypeAlias = "int | slice | EllipsisType | Tensor | list[Any] | tuple[Any, ...]"
"""What goes between the brackets of a tensor, but for None: numbers, slices, ``...``, masks, lists of places."""
_SHORTER: Final = "Leave dimensions out of index=, or give the edit to a site with more of them."
_INSIDE: Final = "Count from the end (-1 is the last), or give an index that is inside."
_MASKED: Final = "A mask has the sizes of the dimensions that it stands for; give places (a list) where they change."


class GivenTensor:
    """A given tensor, converted once for each device and dtype, and at each use where a gradient has to flow."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        """As it was given; training it, or changing it in place, has an effect."""
        self.converted: dict[tuple[torch.device, torch.dtype], tuple[int, Tensor]] = {}
        """For each device and dtype that was asked for: which version of the tensor was converted, and the result."""

    def like(self, x: Tensor) -> Tensor:
        """Return the tensor on the device and in the dtype of ``x``."""
        return self._as(x, x.dtype)

    def on(self, x: Tensor) -> Tensor:
        """Return the tensor on the device of ``x``."""
        return self._as(x, self.tensor.dtype)

    def _as(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        tensor = self.tensor
        if tensor.dtype == dtype and tensor.device == x.device:
            return tensor
        # In a compiled graph the conversion is part of it, and fused with what follows. That of a tensor that takes
        # gradients is recorded by autograd.
        if torch.compiler.is_compiling() or tensor.requires_grad or not _is_lasting(x):
            return tensor.to(device=x.device, dtype=dtype)
        version = tensor._version
        kept = self.converted.get((x.device, dtype))
        if kept is None or kept[0] != version:
            with torch.inference_mode(False):  # what is made here may serve in training later
                kept = version, tensor.to(device=x.device, dtype=dtype)
            self.converted[(x.device, dtype)] = kept
        return kept[1]


def _is_lasting(x: Tensor) -> bool:
    """Return whether what is made beside ``x`` may be kept: not with fake tensors, transforms, or CUDA graphs."""
    ordinary = type(x) is Tensor or isinstance(x, torch.nn.Parameter)
    return ordinary and not _torch.in_transform() and not _torch.capturing()


def as_tensor(value: Any, what: str) -> Tensor:
    """Return a given tensor, number, list or array as a tensor that can be used in training."""
    with torch.inference_mode(False):
        if isinstance(value, Tensor):
            return value.clone() if value.is_inference() else value
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(f"{what} has to be a tensor, or numbers to make one of, got {value!r}.") from error


class EditIndex:
    """An index as between the brackets of a tensor, one item per dimension."""

    def __init__(self, text: str, items: list[Any], masks: list[tuple[int, tuple[int, ...]]]) -> None:
        self.text = text
        """As it was given."""
        self.items = items
        """Numbers, slices, ``...``, and places held as tensors."""
        self.masks = masks
        """For each mask, the dimension it begins at and the shape that the activation has to have from there."""
        self.letters = "".join(map(_letter, items))
        """A letter for each item: n for a number, p for places, s for a slice, "." for ``...``."""
        self.num_dims = len(self.letters.replace(".", ""))
        """The number of dimensions it has items for."""
        self.calls = 0
        """How often a part was asked for, outside of compiled code."""
        self.selects = False
        """Whether there was anything in one of these parts, or nothing was meant."""
        # What follows is for the compiler: to it a number is a constant, and each position would need another graph.
        self.has_numbers = "n" in self.letters and "p" not in self.letters
        """Whether numbers can be looked up as tensors."""
        lettered = list(zip(self.letters, items, strict=True))
        self.slices = tuple(slice(None) if letter == "n" else item for letter, item in lettered)
        """The index without its numbers."""
        self.numbers = [GivenTensor(torch.tensor(item)) if letter == "n" else None for letter, item in lettered]
        """The numbers as tensors; None for other items."""

    @classmethod
    def parse(cls, given: Any) -> EditIndex:
        """Return the index for ``given``; raise if it cannot be one."""
        with torch.inference_mode(False):  # what is kept may serve in training later
            return cls._parse(given, text_of(given))

    @classmethod
    def _parse(cls, given: Any, text: str) -> EditIndex:
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
                items += [GivenTensor(places) for places in item.nonzero(as_tuple=True)]
            else:
                items.append(GivenTensor(item))
        if items.count(Ellipsis) > 1:
            raise OptionError(f"index={text} has more than one '...'.")
        return cls(text, items, masks)

    def part(self, x: Tensor, where: str) -> Tensor:
        """Return that part of the tensor, which is the one at ``where``."""
        self._check(x, where)
        if self.has_numbers and torch.compiler.is_compiling():
            return _INDEX(x[self.slices], self._numbers_on(x))
        try:
            part = x[self._on(x)]
            if not torch.compiler.is_compiling():  # where it would be one more thing to guard
                self.calls += 1
                self.selects = self.selects or part.numel() > 0 or self._is_meant_empty()
            return part
        except IndexError as error:
            misfit(f"index={self.text} is outside ({error})", where, f"has shape {shape_of(x)}", _INSIDE)

    def put(self, x: Tensor, part: Tensor) -> Tensor:
        """Return a copy of the tensor with another part; the rest, and its gradients, are untouched."""
        new = x.clone()
        if self.has_numbers and torch.compiler.is_compiling():
            _INDEX_PUT(new[self.slices], self._numbers_on(x), part)
        else:
            new[self._on(x)] = part
        return new

    def _is_meant_empty(self) -> bool:
        """Return whether it selects nothing of any tensor, as ``0:0`` or an empty list."""
        lettered = zip(self.letters, self.items, strict=True)
        return any(
            item.tensor.numel() == 0 if letter == "p" else letter == "s" and not range(*item.indices(sys.maxsize))
            for letter, item in lettered
        )

    def _on(self, x: Tensor) -> tuple[Any, ...]:
        lettered = zip(self.letters, self.items, strict=True)
        return tuple([item.on(x) if letter == "p" else item for letter, item in lettered])

    def _numbers_on(self, x: Tensor) -> list[Tensor | None]:
        """Return for each dimension of ``x`` its number, if it has one."""
        found: list[Tensor | None] = []
        for letter, number in zip(self.letters, self.numbers, strict=True):
            if letter == ".":
                found += [None] * (x.dim() - self.num_dims)
            else:
                found.append(None if number is None else number.on(x))
        return found

    def _check(self, x: Tensor, where: str) -> None:
        """Raise unless the tensor has such a part.

        Contents of tensors are not checked, which would wait for a GPU, nor numbers and slices in compiled code:
        there a number outside of the activation is torch's own error, and an empty slice changes nothing.
        """
        if self.num_dims > x.dim():
            misfit(
                f"index={self.text} speaks of {self.num_dims} dimensions", where, f"has shape {shape_of(x)}", _SHORTER
            )
        dim = 0
        for place, letter in enumerate(self.letters):
            if letter == ".":
                dim = x.dim() - (self.num_dims - dim)
                continue
            if not torch.compiler.is_compiling() and _is_outside(self.items[place], letter, x.shape[dim]):
                misfit(f"index={self.text} is outside of dimension {dim}", where, f"has shape {shape_of(x)}", _INSIDE)
            dim += 1
        for start, shape in self.masks:
            for offset, size in enumerate(shape):
                if x.shape[start + offset] != size:
                    misfit(f"index={self.text} has a mask of shape {shape}", where, f"has shape {shape_of(x)}", _MASKED)

    def __repr__(self) -> str:
        return self.text


def _is_outside(item: Any, letter: str, size: int) -> bool:
    """Return whether a number, or all of a slice, is outside of a dimension.

    A slice that is empty in every dimension, such as ``0:0``, is meant to be so; a mask or a list may be empty as well.
    One with an open end takes what there is, which may be nothing: ``1:`` in the one-token steps of ``generate``.
    """
    if letter == "n":
        return not -size <= item < size
    if letter != "s" or not size or item.start is None or item.stop is None or range(*item.indices(size)):
        return False
    large = size + abs(item.start or 0) + abs(item.stop or 0) + 1
    return bool(range(*item.indices(large)))


def _letter(item: Any) -> str:
    if isinstance(item, GivenTensor):
        return "p"
    return "." if item is Ellipsis else "s" if isinstance(item, slice) else "n"
