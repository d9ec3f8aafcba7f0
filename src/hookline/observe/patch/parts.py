"""Find the part of an activation that an edit changes, and put another one in its place.

The hooks of ``patch`` ask for the main tensor of an output or of inputs, edits for the part of it that ``index=`` says.
All of it is called eager and traced by the compiler. Containers on the way to the tensor are copied, never changed: a
module may keep the dict it returns, and its caller the one it passes.

    >>> import torch
    >>> last = EditIndex((slice(None), -1))
    >>> last.put(torch.zeros(2, 3), torch.ones(2))
    tensor([[0., 0., 1.],
            [0., 0., 1.]])
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HookReturnError, OptionError
from hookline.observe.index import index_text, parse_index
from hookline.sites import _torch
from hookline.sites.kinds import Kind
from hookline.tree import main_tensor, put_in

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

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
    if torch.compiler.is_compiling():  # which cannot follow the handling of errors
        return put_in(value, old, new)[0]
    try:
        return put_in(value, old, new)[0]
    except Exception as error:  # the methods of a class may raise anything
        found = f"has a structure of which no copy can be made ({error})"
        misfit("An edit puts its tensor into a copy of what is around it", where, found, _ATTACH)


# -- index= ----------------------------------------------------------------------------------------------------------

# Between brackets torch would read a number that comes as a tensor, and wait for it.
_INDEX: Final[Callable[..., Tensor]] = torch.ops.aten.index.Tensor
_INDEX_PUT: Final[Callable[..., Tensor]] = torch.ops.aten.index_put_.default

IndexLike: TypeAlias = "int | slice | EllipsisType | Tensor | list[Any] | tuple[Any, ...]"
"""What goes between the brackets of a tensor, but for None: numbers, slices, ``...``, masks, lists of places."""
_INSIDE: Final = "Count from the end (-1 is the last), or leave dimensions out of index=."
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
        return self.on(x, x.dtype)

    def on(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the device of ``x``, in its own dtype or in ``dtype``."""
        tensor = self.tensor
        dtype = tensor.dtype if dtype is None else dtype
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

    def __init__(self, given: Any) -> None:
        self.text = index_text(given)
        """As it was given."""
        self.items: list[Any] = []
        """Numbers, slices, ``...``, and places held as tensors."""
        self.masks: list[tuple[int, tuple[int, ...]]] = []
        """For each mask, the dimension it begins at and the shape that the activation has to have from there."""
        self.calls = 0
        """How often a part was asked for, outside of compiled code."""
        self.selects = False
        """Whether there was anything in one of these parts."""
        with torch.inference_mode(False):  # what is kept may serve in training later
            for item in parse_index(given):
                self._add(item)
            if self.items.count(Ellipsis) > 1:
                raise OptionError(f"index={self.text} has more than one '...'.")
            # To the compiler a number is a constant, and each position would need another graph: there, numbers are
            # looked up as tensors.
            self.letters = "".join(map(_letter, self.items))
            """A letter for each item: n for a number, p for places, s for a slice, "." for ``...``."""
            self.has_numbers = "n" in self.letters and "p" not in self.letters
            """Whether numbers can be looked up as tensors."""
            lettered = list(zip(self.letters, self.items, strict=True))
            self.slices = tuple(slice(None) if letter == "n" else item for letter, item in lettered)
            """The index without its numbers."""
            self.numbers = [GivenTensor(torch.tensor(item)) if letter == "n" else None for letter, item in lettered]
            """The numbers as tensors; None for other items."""

    def _add(self, item: Any) -> None:
        if not isinstance(item, Tensor):
            self.items.append(item)
        elif item.dtype != torch.bool:
            self.items.append(GivenTensor(item))
        elif Ellipsis in self.items:
            raise OptionError(f"index={self.text} has a mask behind '...': write a slice for each dimension before.")
        else:
            # The places of a mask are known now. Left to the call, they would be a size that depends on data, which
            # costs a wait on a GPU, and which no compiled graph can hold.
            self.masks.append((len(self.items), tuple(item.shape)))
            self.items += [GivenTensor(places) for places in item.nonzero(as_tuple=True)]

    def part(self, x: Tensor, where: str) -> Tensor:
        """Return that part of the tensor, which is the one at ``where``; torch's own errors in compiled code."""
        for start, shape in self.masks:
            for offset, size in enumerate(shape):
                if x.dim() < start + len(shape) or x.shape[start + offset] != size:
                    misfit(f"index={self.text} has a mask of shape {shape}", where, f"has shape {shape_of(x)}", _MASKED)
        if torch.compiler.is_compiling():
            return _INDEX(x[self.slices], self._numbers_on(x)) if self.has_numbers else x[self._on(x)]
        try:
            part = x[self._on(x)]
        except (IndexError, TypeError, ValueError) as error:
            misfit(f"index={self.text} does not fit ({error})", where, f"has shape {shape_of(x)}", _INSIDE)
        self.calls += 1
        self.selects = self.selects or part.numel() > 0
        return part

    def put(self, x: Tensor, part: Tensor) -> Tensor:
        """Return a copy of the tensor with another part; the rest, and its gradients, are untouched."""
        new = x.clone()
        if self.has_numbers and torch.compiler.is_compiling():
            _INDEX_PUT(new[self.slices], self._numbers_on(x), part)
        else:
            new[self._on(x)] = part
        return new

    def _on(self, x: Tensor) -> tuple[Any, ...]:
        lettered = zip(self.letters, self.items, strict=True)
        return tuple([item.on(x) if letter == "p" else item for letter, item in lettered])

    def _numbers_on(self, x: Tensor) -> list[Tensor | None]:
        """Return for each dimension of ``x`` its number, if it has one."""
        found: list[Tensor | None] = []
        for letter, number in zip(self.letters, self.numbers, strict=True):
            if letter == ".":
                found += [None] * (x.dim() - len(self.letters) + 1)
            else:
                found.append(None if number is None else number.on(x))
        return found

    def __repr__(self) -> str:
        return self.text


def _letter(item: Any) -> str:
    if isinstance(item, GivenTensor):
        return "p"
    return "." if item is Ellipsis else "s" if isinstance(item, slice) else "n"
