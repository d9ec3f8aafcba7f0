"""Edit activations: by values that the user gives (ablate, scale, steer, replace), or by those of another run (swap,
mean_ablate); and put edits on sites, for as long as a block lasts.

Users call `patch` with a mapping from targets to edits (``hookline.edits``) or functions. It binds each edit to its
sites, and attaches them as hooks by `hookline.sites`, all or none: if one cannot be attached, those before it are
removed again. The hooks `_EditOutput` and `_EditInput` call ``apply`` with the main tensor of a site. ``steer`` of
factories/steering.py uses the same arithmetic and errors, factories/exporting.py `find_main_input`. A part of an
activation is what ``index=`` names (`EditIndex`).

Change together: `_tensors_of` and `_tensor_of` read `Cache`, `Captured` and `CapturedCall` of capturing.py by the names
of their attributes. `EditIndex` makes tensors of the numbers, places and masks that `parse_index` (index.py) returns,
with a case for each; heads are dimension 1 (head of sites/attention.py). `_mean_of` knows a place inside of attention
by the ":" in its name (sites/roles.py).

No activation may be changed in place. Containers on the way to a tensor are copied, as a module may keep the dict it
returns, and its caller the one it passes. What runs in a call can be traced into a compiled graph. So it must not wait
for a number of a tensor, and raises its own errors through `misfit`, which is `constant_while_tracing`
(sites/_torch.py).

A new edit is a maker (like `scale`) with its function (like `_scaled`), and a name in `_MAKERS`, in both lists of
hookline/edits.py, in ``FUNCTIONS`` of tests/test_public_names.py, in ``EDITS`` of test_patch_edits.py and
test_patch_compiled.py (tests/observe/patch), and in docs/tour.md; docs/roles.md lists those with ``head=``. One that is
given a cache is made by `_edit_from_cache` with a function for `Edit.recorded`; it is tested in test_patch_caches.py.

    >>> last = EditIndex((slice(None), -1))
    >>> last.put(torch.zeros(2, 3), torch.ones(2))
    tensor([[0., 0., 1.],
            [0., 0., 1.]])
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from hookline.error_policy import warn_user
from hookline.errors import HookReturnError, HookSignatureError, KindError, NoMatchError, OptionError, TargetError
from hookline.messages import counted, nearest_names, type_name
from hookline.observe.host_values import unit_axis
from hookline.observe.index import GIVE_ROWS, TokenAxes, index_text, parse_index
from hookline.sites import _torch
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.attention import AttentionPart
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import Kind
from hookline.sites.roles import Layers, with_role
from hookline.sites.signature import HookTraits, check_call, hook_name
from hookline.sites.targets import check_model, choose, describe, named_modules
from hookline.tree import main_tensor, put_in

if TYPE_CHECKING:
    from torch import nn

    from hookline.hook_types import Scope, Target
    from hookline.sites.hook_at_site import Site
    from hookline.sites.targets import Named

# -- where an edit is made -------------------------------------------------------------------------------------------

_USUAL_INPUT: Final = "hidden_states"
"""The name that transformers give the input of a block. A mask, also a tensor of real numbers, may come before it."""
_ATTACH: Final = "Choose a module with tensors there, or write a hook that knows the structure (hookline.attach)."


class EditedPlace(NamedTuple):
    """Where an edit is made. Stands in for a `Site`, which takes 7 calls to make, if the edit asks for none."""

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
    side = "input" if site.kind is Kind.FORWARD_PRE else "output"
    return f"the {side} of {site.name!r}" if site.name else f"the {side} of the model"


def shape_of(x: Tensor) -> str:
    """Return the shape in words."""
    # In compiled code a size may be a symbol: `operator.index` has the compiler put its number there.
    sizes = [str(operator.index(size)) for size in x.shape]
    return f"({', '.join(sizes)}{',' if x.dim() == 1 else ''})"


def main_output(output: Any, where: str) -> Tensor:
    """Return the main tensor of an output; raise if it has none."""
    main = main_tensor(output)
    if main is None:
        misfit("An edit changes a tensor", where, f"is {_kind_of(type(output))} with none in it", _ATTACH)
    return main


def find_main_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the main tensor of the positional arguments, else ``hidden_states``, else that of the keyword ones."""
    main = main_tensor(args)
    if main is None and _USUAL_INPUT in kwargs:
        main = main_tensor(kwargs[_USUAL_INPUT])
    return main_tensor(kwargs) if main is None else main


def rebuilt(value: Any, old: Tensor, new: Tensor, where: str) -> Any:
    """Return the same structure with ``new`` for every ``old``; containers that hold no ``old`` are not copied."""
    if torch.compiler.is_compiling():  # the compiler cannot trace the handling of errors
        return put_in(value, old, new)[0]
    try:
        return put_in(value, old, new)[0]
    except Exception as error:  # the methods of a class may raise anything
        found = f"has a structure of which no copy can be made ({error})"
        misfit("An edit puts its tensor into a copy of what is around it", where, found, _ATTACH)


# -- index= ----------------------------------------------------------------------------------------------------------

# With ``x[number]``, torch would read a number that is a tensor, and wait for the device; these operators do not.
_INDEX: Final[Callable[..., Tensor]] = torch.ops.aten.index.Tensor
_INDEX_PUT: Final[Callable[..., Tensor]] = torch.ops.aten.index_put_.default

IndexLike: TypeAlias = "int | slice | EllipsisType | Tensor | list[Any] | tuple[Any, ...]"
"""What goes between the brackets of a tensor, but for None: numbers, slices, ``...``, masks, lists of places."""
_HEADS: Final = "Count from the end (-1 is the last), or choose others."
_INSIDE: Final = "Count from the end (-1 is the last), or leave dimensions out of index=."
_MASKED: Final = "A mask has the sizes of the dimensions that it stands for; give places (a list) where they change."


class GivenTensor:
    """A given tensor, converted once for each device and dtype, and at each use where a gradient has to flow."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        """As it was given; training it, or changing it in place, has an effect."""
        self.converted: dict[tuple[torch.device, torch.dtype], tuple[int, Tensor]] = {}
        """For each device and dtype that was asked for: which version of the tensor was converted, and the result."""

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
    """Return whether a tensor that is made now may be kept for later calls.

    Not while ``x`` is a fake tensor, nor inside a transform, nor while a CUDA graph is recorded.
    """
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

    def __init__(self, given: Any, head: Heads = None) -> None:
        self.text = index_text(given)
        """As it was given."""
        self.items: list[Any] = []
        """Numbers, slices, ``...``, and places held as tensors."""
        self.masks: list[tuple[int, tuple[int, ...]]] = []
        """For each mask, the dimension it begins at and the shape that the activation has to have from there."""
        self.head = head
        """The heads of attention that it names, which only places inside of it have."""
        self.calls = 0
        """How often a part was asked for, outside of compiled code."""
        self.selects = False
        """Whether any of these parts had a number in it; if none had, `Patch.remove` warns."""
        with torch.inference_mode(False):  # what is kept may serve in training later
            for item in parse_index(given):
                self._add(item)
            if self.items.count(Ellipsis) > 1:
                raise OptionError(f"index={self.text} has more than one '...'.")
            # To the compiler a number in an index is a constant, and each position would need another graph. So
            # compiled code takes the slices first, and then looks the numbers up as tensors.
            self.numbers = [GivenTensor(torch.tensor(item)) if isinstance(item, int) else None for item in self.items]
            """The numbers as tensors; None for other items."""
            self.slices = tuple(slice(None) if isinstance(item, int) else item for item in self.items)
            """The index without its numbers."""
            has_places = any(isinstance(item, GivenTensor) for item in self.items)
            self.has_numbers = any(self.numbers) and not has_places
            """Whether numbers can be looked up as tensors; not together with places, which torch would combine."""

    def _add(self, item: Any) -> None:
        if not isinstance(item, Tensor):
            self.items.append(item)
        elif item.dtype != torch.bool:
            self.items.append(GivenTensor(item))
        elif Ellipsis in self.items:
            raise OptionError(f"index={self.text} has a mask behind '...': write a slice for each dimension before.")
        else:
            # The places of a mask are computed now. In the call, their number would be a size that depends on data:
            # that waits for a GPU, and no compiled graph can hold it.
            self.masks.append((len(self.items), tuple(item.shape)))
            self.items += [GivenTensor(places) for places in item.nonzero(as_tuple=True)]

    def part(self, x: Tensor, where: str) -> Tensor:
        """Return that part of ``x``, the tensor at ``where``; compiled code raises torch's error for a wrong index."""
        for start, shape in self.masks:
            if tuple(x.shape[start : start + len(shape)]) != shape:
                misfit(f"index={self.text} has a mask of shape {shape}", where, f"has shape {shape_of(x)}", _MASKED)
        if torch.compiler.is_compiling():
            return _INDEX(x[self.slices], self._numbers_on(x)) if self.has_numbers else x[self._on(x)]
        try:
            part = x[self._on(x)]
        except (IndexError, TypeError, ValueError) as error:
            if self.head is not None:
                misfit(f"head={self.head}", where, f"has {x.shape[1]} heads, 0 to {x.shape[1] - 1}", _HEADS)
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
        return tuple([item.on(x) if isinstance(item, GivenTensor) else item for item in self.items])

    def _numbers_on(self, x: Tensor) -> list[Tensor | None]:
        """Return for each dimension of ``x`` its number, if it has one."""
        found: list[Tensor | None] = []
        for item, number in zip(self.slices, self.numbers, strict=True):
            if item is Ellipsis:
                found += [None] * (x.dim() - len(self.slices) + 1)
            else:
                found.append(None if number is None else number.on(x))
        return found

    def __repr__(self) -> str:
        return self.text


# -- edits -----------------------------------------------------------------------------------------------------------

_AS_LONG: Final = "Its last dimension has to be as long as that of the activation; those before it may broadcast."
_BROADCAST: Final = "Give a tensor of that shape, or of one that broadcasts to it."
_REAL: Final = "Give a real tensor: torch.view_as_real, or .abs()."
_WHOLE: Final = "Choose a site behind the embedding, or use ablate(), replace() or a function."
_OTHER_RUN: Final = "Patch a run with inputs of the same shape, or give the part that fits to hookline.edits.replace()."


@dataclass(frozen=True, eq=False, repr=False)
class Edit:
    """A change of activations, to be put on sites by ``patch``.

    Recipe::

        last_token = hookline.edits.steer(vector, 2.0, index=(slice(None), -1))
        with hookline.patch(model, {"layers.5": last_token}):
            model(x)

    One edit can be used for many sites, models and patches. To write one of your own, give ``patch`` a function.
    """

    word: str
    """Its name in reports and errors."""
    change: Callable[..., Tensor]
    """Returns what a part becomes: ``change(edit, part, whole activation, site, *given)``."""
    given: list[Any]
    """What the user gave, in a list: in a closure, or in a tuple of numbers, the compiler would make a graph for each
    number."""
    index: EditIndex | None = None
    """The part of the activation that it changes; None for all of it."""
    options: str = ""
    """What was given, as a user would write it."""
    wants_site: bool = False
    """Whether it has to get a `Site`, which has the number of the call; others get an `EditedPlace`."""
    recorded: Recorded | None = None
    """For an edit that was given a cache, as ``given[0]``; None for other edits."""
    axes: TokenAxes | None = None
    """Finds modules where the second item of the index would be no token; None if it has none."""

    def __repr__(self) -> str:
        options = [self.options, "" if self.index is None else f"index={self.index}"]
        return f"{self.word}({', '.join(filter(None, options))})"

    def bound(self, model: nn.Module, chosen: Sequence[Named], *, inputs: bool) -> dict[str, Edit]:
        """Return for each of the ``chosen`` modules of ``model``, or for their ``inputs``, the edit that it gets."""
        by_head = self.index is not None and self.index.head is not None
        wrong = next((name for name, module in chosen if by_head and not isinstance(module, AttentionPart)), None)
        if wrong is not None:
            raise OptionError(f"{wrong!r} has no heads: head= is for places inside of attention, such as role='z'.")
        axes = None if self.index is None or by_head else TokenAxes.checking(model, self.index.items)
        edit = self if axes is None else dataclasses.replace(self, axes=axes)
        if self.recorded is None:
            return {name: edit for name, _ in chosen}
        # A cache may have a shared module under another name.
        spellings: dict[int, list[str]] = {id(module): [name] for name, module in chosen}
        for name, module in named_modules(model):
            spellings.get(id(module), []).append(name)
        bound = {}
        for name, module in chosen:
            found = _tensors_of(self.given[0], spellings[id(module)], inputs=inputs, word=self.word)
            bound[name] = dataclasses.replace(edit, given=[GivenTensor(self.recorded(found, name)), *self.given[1:]])
        return bound

    def apply(self, x: Tensor, site: Where) -> Tensor:
        """Return the activation, edited."""
        if self.index is None:
            return self.change(self, x, x, site, *self.given)
        if self.axes is not None and (fault := self.axes.fault(site.name, x)):
            misfit(f"index={self.index.text} names axes", site_text(site), f"of shape {shape_of(x)} {fault}", GIVE_ROWS)
        part = self.index.part(x, site_text(site))
        return self.index.put(x, self.change(self, part, x, site, *self.given))

    # -- for the functions that change -------------------------------------------------------------------

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
            found = f"is of {_dtype_name(x.dtype)}"
            misfit(f"{self.word}() was given complex numbers", site_text(site), found, _REAL)
        return given.on(x, x.dtype)

    def factor(self, k: float | GivenTensor, part: Tensor, x: Tensor, site: Where) -> float | Tensor:
        """Return a factor that fits the part."""
        return self.fitted(k, "factor", part, x, site, _BROADCAST) if isinstance(k, GivenTensor) else k

    def fitted(self, given: GivenTensor, noun: str, part: Tensor, x: Tensor, site: Where, remedy: str) -> Tensor:
        """Return a given tensor as `converted` does; raise unless it broadcasts to the part."""
        value = self.converted(given, x, site)
        if not _broadcasts(value, part):
            self.misfit(f"was given a {noun} of shape {shape_of(value)}", part, x, site, remedy)
        return value


def _broadcasts(value: Tensor, part: Tensor) -> bool:
    """Return whether ``value`` broadcasts to ``part``, without making it larger."""
    sizes = zip(reversed(value.shape), reversed(part.shape), strict=False)
    return value.dim() <= part.dim() and all(size in (1, whole) for size, whole in sizes)


@_torch.constant_while_tracing
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Heads: TypeAlias = int | Sequence[int] | None
"""One head of attention, or several; None for all."""


def _edit(index: IndexLike | None, head: Heads, word: str, change: Any, given: list[Any], shown: str) -> Edit:
    """Return an edit of the part that ``index``, or ``head``, says."""
    if head is not None:
        if index is not None:
            raise OptionError("Give head= or index=, which may name heads too: (batch, heads, tokens, width).")
        index = slice(None), head if isinstance(head, int) else list(head)
    return Edit(word, change, given, None if index is None else EditIndex(index, head), shown)


# -- given values ----------------------------------------------------------------------------------------------------


def ablate(value: float = 0.0, *, index: IndexLike | None = None, head: Heads = None) -> Edit:
    """Put zeros, or another number, in the place of an activation.

    Recipe::

        with hookline.patch(model, {"layers.3.mlp": hookline.edits.ablate()}):
            model(x)

    Args:
        value: The number.
        index: The part of the activation to ablate, as between the brackets of a tensor; all of it by default.
        head: The head of attention to ablate, or several, at places inside of attention: ``role="z"``, ``"pattern"``.
    """
    if not isinstance(value, int | float):
        raise OptionError(
            f"ablate() takes a number, got {type_name(value)}. For tensors there is hookline.edits.replace()."
        )
    is_whole = value == value // 1  # False for NaN and infinity
    return _edit(index, head, "ablate", _ablated, [float(value), is_whole], repr(value) if value else "")


def _ablated(edit: Edit, part: Tensor, x: Tensor, site: Where, value: float, is_whole: bool) -> Tensor:
    if torch.compiler.is_compiling() and (x.is_floating_point() or x.is_complex()):
        # To the compiler the value of torch.full_like is a constant, and each one needs another graph.
        return torch.zeros_like(part) + value
    if not is_whole:
        edit.check_real(x, site)
    return torch.full_like(part, value)


def scale(k: float | Tensor, *, index: IndexLike | None = None, head: Heads = None) -> Edit:
    """Multiply an activation.

    Recipe::

        with hookline.patch(model, {"layers.#.attn": hookline.edits.scale(0.5)}):
            model(x)

    Args:
        k: The factor; a tensor is one per unit, or of any shape that broadcasts, and may be trained.
        index: The part of the activation to scale; all of it by default.
        head: The head of attention to scale, or several, at places inside of attention: ``role="z"``, ``"pattern"``.
    """
    factor = _factor(k, "The factor of scale()")
    return _edit(index, head, "scale", _scaled, [factor], _shown(factor))


def _scaled(edit: Edit, part: Tensor, x: Tensor, site: Where, k: float | GivenTensor) -> Tensor:
    edit.check_real(x, site)
    return part * edit.factor(k, part, x, site)


def steer(vector: Tensor, k: float | Tensor = 1.0, *, index: IndexLike | None = None, head: Heads = None) -> Edit:
    """Add ``k`` times a vector to an activation, along its last dimension.

    Recipe::

        with hookline.patch(model, {"layers.5": hookline.edits.steer(direction, 4.0, index=(slice(None), -1))}):
            model.generate(ids)

    Args:
        vector: As long as the last dimension of the activation, or of the part that ``index`` says; or a tensor of more
            dimensions, with that as its last, which broadcasts. In any dtype, on any device (compiled code converts it
            in each call: there, give it on the model's device). If it takes gradients it can be trained:
            ``optimizer.step()`` counts at the next call.
        k: How much of it; a tensor broadcasts to the activation, ``(batch, 1, 1)`` being one for each sample of three
            dimensions.
        index: The part of the activation to steer; all of it by default.
        head: The head of attention to steer, or several, at places inside of attention: ``role="z"``, ``"pattern"``.
    """
    given = GivenTensor(as_tensor(vector, "The vector of steer()"))
    factor = _factor(k, "k= of steer()")
    return _edit(index, head, "steer", _steered, [given, factor], f"{_shown(given)}, {_shown(factor)}")


def _steered(edit: Edit, part: Tensor, x: Tensor, site: Where, given: GivenTensor, k: float | GivenTensor) -> Tensor:
    edit.check_real(x, site)
    vector = edit.fitted(given, "vector", part, x, site, _AS_LONG)
    # A vector of one number would broadcast along the last dimension too, which is not what the user means.
    if vector.shape[-1:] != part.shape[-1:]:
        edit.misfit(f"was given a vector of shape {shape_of(vector)}", part, x, site, _AS_LONG)
    # Not torch.add(part, vector, alpha=k): to the compiler alpha is a constant, and each k needs another graph.
    return part + vector * edit.factor(k, part, x, site)


def replace(tensor: Tensor | float, *, index: IndexLike | None = None, head: Heads = None) -> Edit:
    """Put a tensor in the place of an activation.

    Recipe::

        clean = cache["layers.3"].output[:, 7]
        with hookline.patch(model, {"layers.3": hookline.edits.replace(clean, index=(slice(None), 5))}):
            model(x)

    Args:
        tensor: Of the shape of what it replaces, or of one that broadcasts to it. Gradients flow into it if it takes
            them, and no longer into what it replaces.
        index: The part of the activation to replace; all of it by default.
        head: The head of attention to replace, or several, at places inside of attention: ``role="z"``, ``"pattern"``.
    """
    given = GivenTensor(as_tensor(tensor, "The tensor of replace()"))
    return _edit(index, head, "replace", _replaced, [given], _shown(given))


def _replaced(edit: Edit, part: Tensor, x: Tensor, site: Where, given: GivenTensor) -> Tensor:
    value = edit.fitted(given, "tensor", part, x, site, _BROADCAST)
    return value.expand(part.shape).clone()  # what comes next may change it in place


def _factor(k: Any, what: str) -> float | GivenTensor:
    """Return a factor as it was given; a whole number as a float, since to the compiler an int is a constant."""
    return float(k) if isinstance(k, int | float) else GivenTensor(as_tensor(k, what))


def _shown(given: float | GivenTensor) -> str:
    return repr(given) if not isinstance(given, GivenTensor) else f"<tensor of shape {tuple(given.tensor.shape)}>"


# -- another run -----------------------------------------------------------------------------------------------------

Recorded: TypeAlias = Callable[[list[Tensor], str], Tensor]
"""Returns what is given in the place of a cache, from its tensors of a module and the name of that."""
Fits: TypeAlias = Callable[[Tensor, Tensor], bool]
"""Tells whether a tensor of the cache can replace a part of an activation."""


def swap(cache: Mapping[str, Any], *, index: IndexLike | None = None, head: Heads = None) -> Edit:
    """Put the activation that the same site had in another run in the place of this one's.

    Recipe::

        with hookline.capture(model, "layers.#") as cache:
            model(clean)
        with hookline.patch(model, {"layers.3": hookline.edits.swap(cache, index=(slice(None), 5))}):
            model(corrupted)

    Args:
        cache: What ``capture`` gave of one call of each module, or a dict from module names to tensors. It is read when
            the patch is put on. Gradients flow into what was captured with its graph: capture under
            ``torch.no_grad()`` if they are not to.
        index: The part of the activation to swap, in both runs; all of it by default. If the cache holds nothing but
            such a part, it is taken as it is. Shapes have to agree, but for a batch of one in the cache.
        head: The head of attention to swap, or several, at places inside of attention: ``role="z"``, ``"pattern"``.
    """
    return _edit_from_cache(cache, index, head, "swap", _is_as_large, _only_one)


def mean_ablate(cache: Mapping[str, Any], *, index: IndexLike | None = None, head: Heads = None) -> Edit:
    """Put the mean of what a site gave in other runs in the place of its activation.

    Recipe::

        with hookline.capture(model, "layers.#.mlp") as cache:
            model(many_prompts)
        with hookline.patch(model, {"layers.3.mlp": hookline.edits.mean_ablate(cache)}):
            model(x)

    Args:
        cache: What ``capture`` gave, or a dict from module names to tensors. The mean is taken when the patch is put
            on, over all calls, in float32 or better; no gradients flow into it. It is one number for each unit: of the
            last dimension, of images (four dimensions or more) the second. For another mean there is `replace`.
        index: The part of the activation to ablate; all of it by default.
        head: The head of attention to ablate, or several, at places inside of attention: ``role="z"``, ``"pattern"``.
    """
    return _edit_from_cache(cache, index, head, "mean_ablate", _broadcasts, _mean_of)


def _edit_from_cache(
    cache: Any, index: IndexLike | None, head: Heads, word: str, fits: Fits, recorded: Recorded
) -> Edit:
    """Return an edit that puts back what ``recorded`` makes of the tensors in ``cache``, where that ``fits``."""
    if not isinstance(cache, Mapping):
        raise OptionError(
            f"{word}() takes the cache of a hookline.capture, or a dict from module names to tensors, got "
            f"{type_name(cache)}. For one tensor there is hookline.edits.replace()."
        )
    edit = _edit(index, head, word, _put_back, [cache, fits], "cache")
    return dataclasses.replace(edit, recorded=recorded)


def _put_back(edit: Edit, part: Tensor, x: Tensor, site: Where, given: GivenTensor, fits: Fits) -> Tensor:
    value = edit.converted(given, x, site)
    if edit.index is not None and value.dim() == x.dim() and fits(value, x):  # the cache has the whole activation
        value = edit.index.part(value.expand(x.shape), site_text(site))
    if not fits(value, part):
        edit.misfit(f"has a tensor of shape {shape_of(value)} from the other run", part, x, site, _OTHER_RUN)
    return value.expand(part.shape).clone()  # what comes next may change it in place


def _is_as_large(value: Tensor, part: Tensor) -> bool:
    """Return whether ``value`` has the shape of what it replaces; one sample may serve a whole batch."""
    return value.dim() == part.dim() and value.shape[1:] == part.shape[1:] and _broadcasts(value, part)


# -- the activations of the other run ------------------------------------------------------------------------


def _tensors_of(cache: Mapping[str, Any], names: Sequence[str], *, inputs: bool, word: str) -> list[Tensor]:
    """Return the tensors of a module in the cache, call by call; ``names`` are all that it has, its own first."""
    name = next((name for name in names if name in cache), None)
    if name is None:
        known = [str(key) for key in cache]
        near = nearest_names(names[0], known)
        hint = f"nearest: {', '.join(map(repr, near))}" if near else "it is empty"
        raise NoMatchError(
            f"{word}() is to edit {names[0]!r}, which is not in the cache of {len(known)} names; {hint}. "
            "Capture the sites that are patched, through the same model."
        )
    record = cache[name]
    tensors = [_tensor_of(call, inputs=inputs) for call in getattr(record, "calls", (record,))]
    found = [as_tensor(tensor, word) for tensor in tensors if tensor is not None]
    if len(found) < len(tensors) or not found:
        side = "input" if inputs else "output"
        raise OptionError(f"{word}() found no tensor in the cache for the {side} of {names[0]!r}.")
    return found


def _only_one(found: list[Tensor], name: str) -> Tensor:
    if len(found) > 1:
        raise OptionError(
            f"swap() puts back one call of {name!r}, and the cache holds {len(found)}. Clear it before the one that "
            "is meant (cache.clear()), use hookline.edits.replace(cache[name].calls[i].tensor), or, where one forward "
            "calls the module several times, a function: lambda x, *, site: cache[name].calls[site.call].tensor."
        )
    return found[0]


def _tensor_of(call: Any, *, inputs: bool) -> Tensor | None:
    """Return the main tensor of a captured call, or of another value of the mapping."""
    if isinstance(call, Tensor) or not hasattr(call, "name"):
        return main_tensor(call)
    return find_main_input(call.inputs, call.kwargs) if inputs else main_tensor(call.output)


def _mean_of(tensors: list[Tensor], name: str) -> Tensor:
    """Return the mean over all calls, and over all dimensions but that of the units; these stay, of size 1."""
    first = tensors[0]
    if ":" in name:  # inside of attention, (batch, heads, tokens, width): one for each head; in vLLM without a batch
        over = [0, 2] if first.dim() > 3 else [0]
    else:
        over = [dim for dim in range(first.dim()) if dim != unit_axis(first)]
    if len({tuple(1 if dim in over else size for dim, size in enumerate(tensor.shape)) for tensor in tensors}) > 1:
        shapes = ", ".join(shape_of(tensor) for tensor in tensors[:4])
        raise OptionError(f"mean_ablate() cannot average the calls of {name!r}, whose units differ: {shapes}.")
    count = sum(math.prod(tensor.shape[dim] for dim in over) for tensor in tensors)
    if not count:
        raise OptionError(f"mean_ablate() has nothing to average for {name!r}: the cache holds empty tensors.")
    with torch.inference_mode(False), torch.no_grad():
        total = torch.zeros((), device=first.device)
        for tensor in tensors:
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=False)
            total = total + (wide.sum(over, keepdim=True) if over else wide)
        return total / count


# -- functions as edits ----------------------------------------------------------------------------------------------

_MAKERS: Final = (ablate, mean_ablate, replace, scale, steer, swap)
_CALLED_AS: Final = "edit(activation), with site= where it declares a keyword-only site"
_RETURN: Final = "Return the new tensor, or the one that was given to leave it as it is."
_SAME: Final = "Return a tensor of the shape that was given, or use hookline.attach, whose hooks may return anything."


def as_edit(given: Any, target: Any) -> Edit:
    """Return an edit as it is, a function as an edit; raise for anything else."""
    if isinstance(given, Edit):
        return given
    is_maker = type(given) is FunctionType and given in _MAKERS
    if not callable(given) or is_maker or isinstance(given, type | Tensor):
        what = f"{given.__name__} without its brackets" if is_maker else type_name(given)
        raise HookSignatureError(
            f"The edit for {describe(target)} is {what}: give an edit (ablate(), scale(0.5), replace(tensor), …), or a "
            "function of the activation."
        )
    why = f"cannot be the edit for {describe(target)}: it is called as {_CALLED_AS}"
    wants_site = check_call(given, ["output"], why, "A hook of module, args and output goes to hookline.attach.")
    return Edit(hook_name(given), _call_function, [given], wants_site=wants_site)


def _call_function(edit: Edit, part: Tensor, x: Tensor, site: Where, function: Callable[..., Any]) -> Tensor:
    new = function(part, site=site) if edit.wants_site else function(part)
    if not isinstance(new, Tensor):
        misfit(f"{edit.word} returned {_kind_of(type(new))}", site_text(site), "is a tensor", _RETURN)
    if new.shape != part.shape:
        edit.misfit(f"returned a tensor of shape {shape_of(new)}", part, x, site, _SAME)
    if new.dtype is part.dtype and new.device == part.device:
        return new
    return new.to(device=part.device, dtype=part.dtype)  # the next layer computes in what it was given before


@_torch.constant_while_tracing
def _kind_of(cls: type) -> str:
    return cls.__name__ if cls is type(None) else f"a {cls.__name__}"


# -- the verb ------------------------------------------------------------------------------------------------------


def patch(
    model: nn.Module,
    edits: Mapping[Any, Edit | Callable[..., Tensor]] | Edit | Callable[..., Tensor],
    *,
    role: str | None = None,
    layer: Layers = None,
    on: str | Kind | None = None,
    index: IndexLike | None = None,
    exclude: Target = None,
    strict: bool = True,
    scope: Scope = "process",
    name: str | None = None,
) -> Patch:
    """Edit what flows through a model.

    Recipe::

        with hookline.patch(
            model, {"layers.3": hookline.edits.ablate(), "layers.5": hookline.edits.steer(vector, 2.0)}
        ):
            model(x)
        with hookline.patch(model, {"layers.#.mlp": lambda activation: activation * 0.5}):
            model(x)

    An edit changes the main tensor of an output: the tensor itself, or the first of real numbers in a tuple, dict or
    ModelOutput, which is copied around the new one. A function is given that tensor, or the part that ``index`` says,
    and returns another of the same shape, or that one; where it declares a keyword-only ``site``, it gets one. What it
    returns goes on through the model, which may change it in place: of a tensor that you keep, return a clone. A module
    (an adapter, an autoencoder) will do as well. Edits of one site are made in the order in which they were attached,
    within a patch in that of the mapping; captures and observers see what comes out of all of them. Gradients flow
    through edits.

    In compiled code an edit is part of the graph, also with ``fullgraph=True``: another vector, factor, value or
    position (a number, or a list of places) needs no graph of its own; another slice or site does (torch makes eight
    for one function, then it stops: raise ``torch._dynamo.config.recompile_limit`` for a sweep over more). With
    ``scope="process"`` every call of the model is edited, whoever makes it; ``"context"``, the calls of this thread or
    task alone, is an error in compiled code, which does not know whose call it is. Activation checkpointing runs parts
    of the model again in the backward pass, which then belongs inside the block too.

    Args:
        model: The model; names are relative to it.
        edits: What to do where: for each target, as ``attach`` takes it (a name, a glob such as ``"layers.#.mlp"``, a
            type, a module), an edit or a function. With ``role``, that edit or function alone.
        role: The role of the modules in a language model, for one edit: ``patch(model, ablate(), role="attn")`` means
            ``{"role:attn": ablate()}``.
        layer: With ``role``, the number of a block, several, or a slice; -1 is the last.
        on: ``"forward"``, if left out, edits outputs, ``"forward_pre"`` inputs: the main tensor of the positional
            arguments, else ``hidden_states``, else that of the keyword arguments.
        index: The part of the activation to edit, as between the brackets of a tensor (``(slice(None), -1)`` is the
            last position), for edits that have none of their own. The rest stays as it is.
        exclude: Modules to leave out.
        strict: Raise if a target matches nothing; with False, warn, and do the others.
        scope: ``"context"``: edit the calls that this thread, or asyncio task, makes, whoever else runs the model.
        name: A name for reports; that of each edit by default.

    Raises:
        NoMatchError: (a KeyError) a target matches no module, or a site is not in the cache; with the nearest names.
        HookReturnError: (a RuntimeError) in the call: a shape does not fit, or there is no tensor to edit.
        HookSignatureError, OptionError, TargetError, KindError: before anything is attached.
    """
    check_model(model, edits)
    kind = Kind.FORWARD if on is None else Kind.parse(on)
    if kind not in (Kind.FORWARD, Kind.FORWARD_PRE):
        raise KindError(f"patch() edits outputs (on='forward') or inputs (on='forward_pre'), not {str(on)!r}.")
    if role is not None or layer is not None:
        edits = _for_role(edits, role, layer)
    if not isinstance(edits, Mapping):
        takes = "a mapping, such as {'layers.3': ablate()}, or one edit with role="
        raise OptionError(f"patch() takes {takes}, got {type_name(edits)}.")
    if not edits:
        raise TargetError("patch() was given no edits: write what to do where, {'layers.3': ablate()}.")
    if scope not in ("process", "context"):
        raise OptionError(f"scope= is 'process' or 'context', got {scope!r}.")
    part, placed, inputs = None if index is None else EditIndex(index), [], kind is Kind.FORWARD_PRE
    wanted = {target: as_edit(given, target) for target, given in edits.items()}
    for target, edit in wanted.items():
        chosen = choose(model, target, exclude, strict=strict)
        if chosen:
            whole = edit if edit.index is not None else dataclasses.replace(edit, index=part)
            placed.append((whole, chosen, whole.bound(model, chosen, inputs=inputs)))
    found, make_hook = Patch(), _EditInput if inputs else _EditOutput
    try:
        for edit, chosen, bound in placed:
            options = AttachOptions(with_kwargs=inputs, name=name or edit.word, scope=scope)
            # The letters are those of ``Attachment.reads`` (sites/hook_at_site.py): a for arguments, k for keyword
            # arguments, o for the output.
            traits = HookTraits(wants_site=edit.wants_site, may_edit=True, reads="ak" if inputs else "o")
            request = new_attachment(make_hook, kind, options, traits=traits)
            request.for_site = {each: make_hook(bound[each], EditedPlace(each, kind)) for each in bound}.__getitem__
            found.add(attach_to_modules(request, model, chosen))
            found.edits.append(edit)
    except BaseException:
        found.remove(quiet=True)
        raise
    return found


class Patch(HandleSet):
    """The edits of one ``patch``, one handle for each target.

    Recipe: ``with hookline.patch(model, edits) as patched: ...``, or ``patched.remove()``; ``patched.report()`` says
    how often each was made, and where.
    """

    def __init__(self) -> None:
        super().__init__()
        self.edits: list[Edit] = []
        """The edits that the handles put on, in their order; empty after ``remove()``."""

    def remove(self, *, quiet: bool = False) -> None:
        """Take the edits off; warn, unless ``quiet``, of one that was never made, or that selected nothing."""
        edits, self.edits = self.edits, []
        super().remove(quiet=quiet)
        for edit in edits if not quiet else ():
            if edit.index is not None and edit.index.calls and not edit.index.selects:
                warn_user(
                    f"index={edit.index.text} selected nothing in {counted(edit.index.calls, 'call')}, so the edit "
                    "changed nothing. In generate() with a key-value cache the forward of a new token has one "
                    "position; a function that declares site= can distinguish the forwards by site.step (0 is the "
                    "prompt)."
                )


def _for_role(edits: Any, role: str | None, layer: Layers) -> dict[str, Any]:
    """Return the mapping that means one edit for a role."""
    found = with_role(None, role, layer=layer)
    targets = found if isinstance(found, list) else [found]
    if isinstance(edits, Mapping):
        raise TargetError(
            f"role={role!r} goes with one edit, patch(model, ablate(), role={role!r}); as a key: {targets[0]!r}."
        )
    return dict.fromkeys(targets, edits)


@dataclass(eq=False)
class _EditHook:
    """The hook of an edit at a place; it is called with a site if the edit asks for one."""

    edit: Edit
    place: EditedPlace


class _EditOutput(_EditHook):
    """A forward hook."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any, *, site: Site | None = None) -> Any:
        """Return the output with the edited tensor."""
        where = self.place if site is None else site
        if isinstance(output, Tensor):
            return self.edit.apply(output, where)
        main = main_output(output, site_text(where))
        return rebuilt(output, main, self.edit.apply(main, where), site_text(where))


class _EditInput(_EditHook):
    """A forward pre-hook."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, site: Site | None = None
    ) -> Any:
        """Return the arguments with the edited tensor."""
        where = self.place if site is None else site
        main, text = find_main_input(args, kwargs), site_text(where)
        if main is None:
            misfit("An edit changes a tensor", text, "has none in it", _ATTACH)
        new = self.edit.apply(main, where)
        return rebuilt(args, main, new, text), rebuilt(kwargs, main, new, text)
