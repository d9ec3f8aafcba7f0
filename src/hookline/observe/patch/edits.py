"""Edit activations: by values that the user gives (ablate, scale, steer, replace), or by those of another run (swap,
mean_ablate).

Users reach these as ``hookline.edits``; ``patch`` binds each edit to its sites, and its hooks call ``apply`` with the
main tensor of a site. Nothing is changed in place, and all of it can be traced into a compiled graph: edits are classes
whose numbers are attributes, since the compiler would make a graph for each function.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor

from hookline.errors import NoMatchError, OptionError
from hookline.messages import nearest_names, type_name
from hookline.observe.host_values import unit_axis
from hookline.observe.patch.parts import (
    EditIndex,
    GivenTensor,
    IndexLike,
    Where,
    as_tensor,
    find_main_input,
    misfit,
    shape_of,
    site_text,
)
from hookline.observe.token_axes import GIVE_ROWS, TokenAxes, axes_for
from hookline.sites import _torch
from hookline.sites.hook_at_site import NO_MODEL
from hookline.sites.site_info import Site
from hookline.sites.targets import named_modules
from hookline.tables import Table
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.hook_at_site import ForwardCounter
    from hookline.sites.targets import Named

__all__ = ["Edit", "ablate", "mean_ablate", "replace", "scale", "steer", "swap"]

_BROADCAST: Final = "Give a tensor of that shape, or of one that broadcasts to it."
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

    def bound(self, model: nn.Module, chosen: Sequence[Named], *, inputs: bool) -> Edit:
        """Return the edit with all that it needs for the ``chosen`` modules of ``model``, or for their ``inputs``."""
        axes = None if self.index is None else axes_for(model, self.index.items)
        if axes is None:
            return self
        twin = copy.copy(self)
        twin.axes = axes  # what they are, the roles of the model say
        return twin

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


def _broadcasts(value: Tensor, part: Tensor) -> bool:
    """Return whether ``value`` broadcasts to ``part``, without making it larger."""
    if value.dim() > part.dim():
        return False
    offset = part.dim() - value.dim()
    return all(size in (1, part.shape[offset + dim]) for dim, size in enumerate(value.shape))


@_torch.constant_while_tracing
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- given values ----------------------------------------------------------------------------------------------------


def ablate(value: float = 0.0, *, index: IndexLike | None = None) -> Edit:
    """Put zeros, or another number, in the place of an activation.

    Recipe::

        with hookline.patch(model, {"layers.3.mlp": hookline.edits.ablate()}):
            model(x)

    Args:
        value: The number.
        index: The part of the activation to ablate, as between the brackets of a tensor; all of it by default.
    """
    if not isinstance(value, int | float):
        raise OptionError(
            f"ablate() takes a number, got {type_name(value)}. For tensors there is hookline.edits.replace()."
        )
    return _Ablate(value, index)


class _Ablate(Edit):
    def __init__(self, value: float, index: IndexLike | None) -> None:
        super().__init__("ablate", index)
        self.given = value
        self.value = float(value)
        self.whole = value == value // 1  # not so for nan and inf
        """Whether it can be put among whole numbers."""

    def change(self, part: Tensor, x: Tensor, site: Where) -> Tensor:
        if torch.compiler.is_compiling() and (x.is_floating_point() or x.is_complex()):
            # To the compiler the value of torch.full_like is a constant, and each one needs another graph.
            return torch.zeros_like(part) + self.value
        if not self.whole:
            self.check_real(x, site)
        return torch.full_like(part, self.given)

    def options(self) -> str:
        return repr(self.given) if self.given else ""


def scale(k: float | Tensor, *, index: IndexLike | None = None) -> Edit:
    """Multiply an activation.

    Recipe::

        with hookline.patch(model, {"layers.#.attn": hookline.edits.scale(0.5)}):
            model(x)

    Args:
        k: The factor; a tensor is one per unit, or of any shape that broadcasts, and may be trained.
        index: The part of the activation to scale; all of it by default.
    """
    return _Scale(_factor(k, "The factor of scale()"), index)


class _Scale(Edit):
    def __init__(self, k: float | GivenTensor, index: IndexLike | None) -> None:
        super().__init__("scale", index)
        self.k = k

    def change(self, part: Tensor, x: Tensor, site: Where) -> Tensor:
        self.check_real(x, site)
        if not isinstance(self.k, GivenTensor):
            return part * self.k
        return part * _fitting_factor(self, self.k, part, x, site)

    def options(self) -> str:
        return repr(self.k) if not isinstance(self.k, GivenTensor) else _shown(self.k.tensor)


def _factor(k: Any, what: str) -> float | GivenTensor:
    """Return a factor as it was given; a whole number as a float, since the compiler takes those for constants."""
    return float(k) if isinstance(k, int | float) else GivenTensor(as_tensor(k, what))


def _fitting_factor(edit: Edit, k: GivenTensor, part: Tensor, x: Tensor, site: Where) -> Tensor:
    factor = edit.converted(k, x, site)
    if not _broadcasts(factor, part):
        edit.misfit(f"was given a factor of shape {shape_of(factor)}", part, x, site, _BROADCAST)
    return factor


def steer(vector: Tensor, k: float | Tensor = 1.0, *, index: IndexLike | None = None) -> Edit:
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
    """
    given = GivenTensor(as_tensor(vector, "The vector of steer()"))
    return _Steer(given, _factor(k, "k= of steer()"), index)


class _Steer(Edit):
    def __init__(self, vector: GivenTensor, k: float | GivenTensor, index: IndexLike | None) -> None:
        super().__init__("steer", index)
        self.vector = vector
        self.k = k

    def change(self, part: Tensor, x: Tensor, site: Where) -> Tensor:
        self.check_real(x, site)
        vector = self.converted(self.vector, x, site)
        # By one number along the last dimension it would broadcast too, and be another edit than the one that is meant.
        if not _broadcasts(vector, part) or vector.shape[-1:] != part.shape[-1:]:
            remedy = "Its last dimension has to be as long as that of the activation; those before it may broadcast."
            self.misfit(f"was given a vector of shape {shape_of(vector)}", part, x, site, remedy)
        # Not torch.add(part, vector, alpha=k): to the compiler alpha is a constant, and each k needs another graph.
        k = _fitting_factor(self, self.k, part, x, site) if isinstance(self.k, GivenTensor) else self.k
        return part + vector * k

    def options(self) -> str:
        k = _shown(self.k.tensor) if isinstance(self.k, GivenTensor) else repr(self.k)
        return f"{_shown(self.vector.tensor)}, {k}"


def replace(tensor: Tensor | float, *, index: IndexLike | None = None) -> Edit:
    """Put a tensor in the place of an activation.

    Recipe::

        clean = cache["layers.3"].output[:, 7]
        with hookline.patch(model, {"layers.3": hookline.edits.replace(clean, index=(slice(None), 5))}):
            model(x)

    Args:
        tensor: Of the shape of what it replaces, or of one that broadcasts to it. Gradients flow into it if it takes
            them, and no longer into what it replaces.
        index: The part of the activation to replace; all of it by default.
    """
    return _Replace(GivenTensor(as_tensor(tensor, "The tensor of replace()")), index)


class _Replace(Edit):
    def __init__(self, value: GivenTensor, index: IndexLike | None) -> None:
        super().__init__("replace", index)
        self.value = value

    def change(self, part: Tensor, x: Tensor, site: Where) -> Tensor:
        value = self.converted(self.value, x, site)
        if not _broadcasts(value, part):
            self.misfit(f"was given a tensor of shape {shape_of(value)}", part, x, site, _BROADCAST)
        return value.expand(part.shape).clone()  # what comes next may change it in place

    def options(self) -> str:
        return _shown(self.value.tensor)


def _shown(tensor: Tensor) -> str:
    return f"<tensor of shape {tuple(tensor.shape)}>"


# -- another run -----------------------------------------------------------------------------------------------------

_ONE_CALL: Final = "Give the one that is meant: hookline.edits.replace(cache[name].calls[0].output)."


def swap(cache: Mapping[str, Any], *, index: IndexLike | None = None) -> Edit:
    """Put the activation that the same site had in another run in the place of this one's.

    Recipe::

        with hookline.capture(model, "layers.#") as cache:
            model(clean)
        with hookline.patch(model, {"layers.3": hookline.edits.swap(cache, index=(slice(None), 5))}):
            model(corrupted)

    Args:
        cache: What ``capture`` gave, or a dict from module names to tensors. It is read when the patch is put on. Of a
            module that was called several times in a forward, each call gets its own; not in compiled code, nor where
            parts are called without the model: which call it is is not known there. Gradients flow into what was
            captured with its graph: capture under ``torch.no_grad()`` if they are not to.
        index: The part of the activation to swap, in both runs; all of it by default. If the cache holds nothing but
            such a part, it is taken as it is. Shapes have to agree, but for a batch of one in the cache.
    """
    _check_cache(cache, "swap")
    return _Recorded("swap", cache, index)


def mean_ablate(
    cache: Mapping[str, Any], *, dims: int | Sequence[int] | None = None, index: IndexLike | None = None
) -> Edit:
    """Put the mean of what a site gave in other runs in the place of its activation.

    Recipe::

        with hookline.capture(model, "layers.#.mlp") as cache:
            model(many_prompts)
        with hookline.patch(model, {"layers.3.mlp": hookline.edits.mean_ablate(cache)}):
            model(x)

    Args:
        cache: What ``capture`` gave, or a dict from module names to tensors. The mean is taken when the patch is put
            on, over all calls, in float32 or better; no gradients flow into it.
        dims: The dimensions to average over. By default all but that of the units: the last one, of images (four
            dimensions or more) the second. ``dims=0`` keeps one mean for each position.
        index: The part of the activation to ablate; all of it by default.
    """
    _check_cache(cache, "mean_ablate")
    return _Mean(cache, (dims,) if isinstance(dims, int) else dims, index)


class _Recorded(Edit):
    """Puts in what was recorded."""

    needs_moment = True
    one_forward = True
    """Whether the cache has to hold a single forward of the model."""

    def __init__(self, word: str, cache: Mapping[str, Any], index: IndexLike | None) -> None:
        super().__init__(word, index)
        self.cache: Mapping[str, Any] | None = cache
        self.values: dict[str, list[GivenTensor]] = {}
        """For each site it is bound to, the tensors to put in, call by call."""
        self.counter = NO_MODEL
        """Counts the forwards of the model, once it was put on one."""

    def bound(self, model: nn.Module, chosen: Sequence[Named], *, inputs: bool) -> Edit:
        assert self.cache is not None
        # A cache may have a shared module under another name.
        spellings: dict[int, list[str]] = {id(module): [name] for name, module in chosen}
        for name, module in named_modules(model):
            spellings.get(id(module), []).append(name)
        twin = copy.copy(self)
        twin.cache = None  # what is not patched need not be kept
        twin.values = {}
        for name, module in chosen:
            found = _tensors_of(
                self.cache, spellings[id(module)], inputs=inputs, word=self.word, one_forward=self.one_forward
            )
            twin.values[name] = [GivenTensor(tensor) for tensor in self.combined(found, name)]
        return Edit.bound(twin, model, chosen, inputs=inputs)

    def combined(self, found: list[Tensor], name: str) -> list[Tensor]:
        """Return what is put in, of what was recorded for a site."""
        return found

    def attached(self, counter: ForwardCounter) -> None:
        self.counter = counter

    def change(self, part: Tensor, x: Tensor, site: Where) -> Tensor:
        values = self.values[site.name]
        assert isinstance(site, Site)
        number = 0 if len(values) == 1 else self._number(site, len(values))
        value = self.converted(values[number], x, site)
        if self.index is not None and value.dim() == x.dim() and self.fits(value, x):
            value = self.index.part(value.expand(x.shape), site_text(site))
        if not self.fits(value, part):
            remedy = (
                "Patch a run with inputs of the same shape, or give the part that fits to hookline.edits.replace()."
            )
            self.misfit(f"has a tensor of shape {shape_of(value)} from the other run", part, x, site, remedy)
        return value.expand(part.shape).clone()  # what comes next may change it in place

    def _number(self, site: Site, num_calls: int) -> int:
        """Return the number of this call of its module, of `num_calls` recorded ones; raise if it is none of them."""
        if torch.compiler.is_compiling():
            why = "is in compiled code, which does not know its call"
        elif site.recompute:
            why = "is repeated by activation checkpointing, in another order"
        elif self.counter.here.by_part:
            why = "is called while the model's own forward is not, so the number of the call is not known"
        elif site.call >= num_calls:
            why = f"comes from call {site.call + 1} of its module in this forward"
        else:
            return site.call
        misfit(f"swap() has {num_calls} calls from the other run", site_text(site), why, _ONE_CALL)

    def fits(self, value: Tensor, part: Tensor) -> bool:
        """Return whether it has the shape of what it replaces; one sample of the other run may serve a whole batch."""
        return value.dim() == part.dim() and value.shape[1:] == part.shape[1:] and _broadcasts(value, part)

    def options(self) -> str:
        return "cache"


class _Mean(_Recorded):
    one_forward = False

    def __init__(self, cache: Mapping[str, Any], dims: Sequence[int] | None, index: IndexLike | None) -> None:
        super().__init__("mean_ablate", cache, index)
        self.dims = dims

    def combined(self, found: list[Tensor], name: str) -> list[Tensor]:
        return [_mean_of(found, self.dims, name)]

    def fits(self, value: Tensor, part: Tensor) -> bool:
        return _broadcasts(value, part)

    def options(self) -> str:
        return "cache" if self.dims is None else f"cache, dims={tuple(self.dims)}"


# -- the activations of the other run ------------------------------------------------------------------------


def _check_cache(cache: Any, word: str) -> None:
    """Raise unless names can be looked up in ``cache``."""
    if not isinstance(cache, Mapping):
        raise OptionError(
            f"{word}() takes the cache of a hookline.capture, or a dict from module names to tensors, got a "
            f"{type(cache).__name__}. For one tensor there is hookline.edits.replace()."
        )


def _tensors_of(
    cache: Mapping[str, Any], names: Sequence[str], *, inputs: bool, word: str, one_forward: bool
) -> list[Tensor]:
    """Return the tensors of a module in the cache, call by call; ``names`` are all that it has, its own first."""
    name = next((name for name in names if name in cache), None)
    if name is None:
        raise _not_there(cache, names[0], word)
    record = cache[name]
    calls = getattr(record, "calls", (record,))
    num_forwards = len({getattr(call, "step", 0) for call in calls})
    if one_forward and num_forwards > 1:
        raise OptionError(
            f"{word}() puts back one forward of the model, and the cache holds {num_forwards} for {name!r}. Clear it "
            "before the one that is meant (cache.clear()), or use hookline.edits.replace(cache[name].calls[i].output)."
        )
    tensors = [_tensor_of(call, inputs=inputs) for call in calls]
    found = [as_tensor(tensor, word) for tensor in tensors if tensor is not None]
    if len(found) < len(tensors) or not found:
        side = "input" if inputs else "output"
        raise OptionError(f"{word}() found no tensor in the cache for the {side} of {names[0]!r}.")
    return found


def _tensor_of(call: Any, *, inputs: bool) -> Tensor | None:
    """Return the main tensor of a captured call, or of another value of the mapping."""
    if isinstance(call, Tensor) or not hasattr(call, "name"):
        return main_tensor(call)
    return find_main_input(call.inputs, call.kwargs) if inputs else main_tensor(call.output)


def _not_there(cache: Mapping[str, Any], name: str, word: str) -> NoMatchError:
    names = [str(key) for key in cache]
    near = nearest_names(name, names)
    hint = f"nearest: {', '.join(map(repr, near))}" if near else "it is empty"
    return NoMatchError(
        f"{word}() is to edit {name!r}, which is not in the cache of {len(names)} names; {hint}. "
        "Capture the sites that are patched, through the same model."
    )


def _mean_of(tensors: Sequence[Tensor], dims: Sequence[int] | None, name: str) -> Tensor:
    """Return the mean over all calls and over ``dims``, which stay as dimensions of size 1."""
    first = tensors[0]
    over = _all_but_units(first) if dims is None else _checked_dims(dims, first.dim(), name)
    kept = {(tensor.dim(), *(size for dim, size in enumerate(tensor.shape) if dim not in over)) for tensor in tensors}
    if len(kept) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise OptionError(
            f"mean_ablate(dims={over}) cannot average the {len(tensors)} calls of {name!r}, whose shapes differ in "
            f"other dimensions too: {shapes}. Give all of them in dims=."
        )
    count = sum(math.prod(tensor.shape[dim] for dim in over) for tensor in tensors)
    if not count:
        raise OptionError(f"mean_ablate() has nothing to average for {name!r}: the cache holds empty tensors.")
    with torch.inference_mode(False), torch.no_grad():
        total = torch.zeros((), device=first.device)
        for tensor in tensors:
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=False)
            total = total + (wide.sum(over, keepdim=True) if over else wide)
        return total / count


def _all_but_units(tensor: Tensor) -> tuple[int, ...]:
    """Return every dimension but that of the units: the last, or the channels of images."""
    units = unit_axis(tensor, None)
    return tuple(dim for dim in range(tensor.dim()) if dim != units)


def _checked_dims(dims: Sequence[int], num_dims: int, name: str) -> tuple[int, ...]:
    for dim in dims:
        if not -num_dims <= dim < num_dims:
            raise OptionError(f"mean_ablate(dims={tuple(dims)}): {name!r} has {num_dims} dimensions in the cache.")
    return tuple(sorted({dim % num_dims for dim in dims}))
