"""Edit activations by those of another run: swap and mean_ablate.

Users reach these as ``hookline.edits``; ``patch`` binds each to its sites, which looks activations up in a capture's
cache, or in any mapping from module names to tensors, and applies it there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import NoMatchError, OptionError
from hookline.messages import nearest_names
from hookline.observe.host_values import unit_axis
from hookline.observe.patch.edit import Edit, broadcasts
from hookline.observe.patch.edit_index import GivenTensor, as_tensor
from hookline.observe.patch.edited_tensor import Where, find_main_input, misfit, shape_of, site_text
from hookline.sites.hook_at_site import NO_MODEL
from hookline.sites.site_info import Site
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from hookline.observe.patch.edit_index import IndexLike
    from hookline.sites.hook_at_site import ForwardCounter

__all__ = ["mean_ablate", "swap"]

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

    def bound(self, names: Mapping[str, Sequence[str]], *, inputs: bool) -> Edit:
        assert self.cache is not None
        twin = copy.copy(self)
        twin.cache = None  # what is not patched need not be kept
        twin.values = {}
        for name, spellings in names.items():
            found = _tensors_of(self.cache, spellings, inputs=inputs, word=self.word, one_forward=self.one_forward)
            twin.values[name] = [GivenTensor(tensor) for tensor in self.combined(found, name)]
        return twin

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
        return value.dim() == part.dim() and value.shape[1:] == part.shape[1:] and broadcasts(value, part)

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
        return broadcasts(value, part)

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
