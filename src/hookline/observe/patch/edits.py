"""The edits that ``patch`` takes, beside functions: what becomes of an activation.

Made by users; `patch` binds each to its sites, `hooks` applies it there. Nothing is changed in place, and all of it
can be traced into a compiled graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.observe.patch.cache_lookup import check_cache, mean_of, tensors_of
from hookline.observe.patch.edit import Edit, broadcasts, dtype_name
from hookline.observe.patch.fit import Held, as_tensor
from hookline.observe.patch.misfits import misfit, place_of, shape_of
from hookline.observe.patch.swap_calls import Turns

if TYPE_CHECKING:
    from hookline.observe.patch.edit_index import IndexLike
    from hookline.sites.modules.forward_counter import ForwardCounter
    from hookline.sites.site import Site

__all__ = ["Edit", "ablate", "mean_ablate", "replace", "scale", "steer", "swap"]


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

    def change(self, part: Tensor, x: Tensor, site: Site) -> Tensor:
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
    def __init__(self, k: float | Held, index: IndexLike | None) -> None:
        super().__init__("scale", index)
        self.k = k

    def change(self, part: Tensor, x: Tensor, site: Site) -> Tensor:
        self.check_real(x, site)
        if not isinstance(self.k, Held):
            return part * self.k
        return part * _fitting_factor(self, self.k, part, x, site)

    def options(self) -> str:
        return repr(self.k) if not isinstance(self.k, Held) else _shown(self.k.tensor)


def _factor(k: Any, what: str) -> float | Held:
    """A factor as it was given; a whole number as another, since the compiler takes those for constants."""
    return float(k) if isinstance(k, int | float) else Held(as_tensor(k, what))


def _fitting_factor(edit: Edit, k: Held, part: Tensor, x: Tensor, site: Site) -> Tensor:
    factor = _converted(edit, k, x, site)
    if not broadcasts(factor, part):
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
    held = Held(as_tensor(vector, "The vector of steer()"))
    return _Steer(held, _factor(k, "k= of steer()"), index)


class _Steer(Edit):
    def __init__(self, vector: Held, k: float | Held, index: IndexLike | None) -> None:
        super().__init__("steer", index)
        self.vector = vector
        self.k = k

    def change(self, part: Tensor, x: Tensor, site: Site) -> Tensor:
        self.check_real(x, site)
        vector = _converted(self, self.vector, x, site)
        # By one number along the last dimension it would broadcast too, and be another edit than the one that is meant.
        if not broadcasts(vector, part) or vector.shape[-1:] != part.shape[-1:]:
            remedy = "Its last dimension has to be as long as that of the activation; those before it may broadcast."
            self.misfit(f"was given a vector of shape {shape_of(vector)}", part, x, site, remedy)
        # Not torch.add(part, vector, alpha=k): to the compiler alpha is a constant, and each k needs another graph.
        k = _fitting_factor(self, self.k, part, x, site) if isinstance(self.k, Held) else self.k
        return part + vector * k

    def options(self) -> str:
        k = _shown(self.k.tensor) if isinstance(self.k, Held) else repr(self.k)
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
    return _Replace(Held(as_tensor(tensor, "The tensor of replace()")), index)


class _Replace(Edit):
    def __init__(self, value: Held, index: IndexLike | None) -> None:
        super().__init__("replace", index)
        self.value = value

    def change(self, part: Tensor, x: Tensor, site: Site) -> Tensor:
        value = _converted(self, self.value, x, site)
        if not broadcasts(value, part):
            self.misfit(f"was given a tensor of shape {shape_of(value)}", part, x, site, _BROADCAST)
        return value.expand(part.shape).clone()  # what comes next may change it in place

    def options(self) -> str:
        return _shown(self.value.tensor)


def swap(cache: Mapping[str, Any], *, index: IndexLike | None = None) -> Edit:
    """Put the activation that the same site had in another run in the place of this one's.

    Recipe::

        with hookline.capture(model, "layers.#") as cache:
            model(clean)
        with hookline.patch(model, {"layers.3": hookline.edits.swap(cache, index=(slice(None), 5))}):
            model(corrupted)

    Args:
        cache: What ``capture`` gave, or a dict from module names to tensors. It is read when the patch is put on. Of a
            module that was called several times in a forward, each call gets its own (not in compiled code, which does
            not know which call it is). Gradients flow into what was captured with its graph: capture under
            ``torch.no_grad()`` if they are not to.
        index: The part of the activation to swap, in both runs; all of it by default. If the cache holds nothing but
            such a part, it is taken as it is. Shapes have to agree, but for a batch of one in the cache.
    """
    check_cache(cache, "swap")
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
        dims: The dimensions to average over. By default all but that of the units: the last one, of images (four or
            five dimensions) the second. ``dims=0`` keeps one mean for each position.
        index: The part of the activation to ablate; all of it by default.
    """
    check_cache(cache, "mean_ablate")
    return _Mean(cache, (dims,) if isinstance(dims, int) else dims, index)


class _Recorded(Edit):
    """Puts in what was recorded; the mean of it, if it is a `_Mean`."""

    def __init__(self, word: str, cache: Mapping[str, Any], index: IndexLike | None) -> None:
        super().__init__(word, index)
        self.cache: Mapping[str, Any] | None = cache
        self.values: dict[str, list[Held]] = {}
        """For each site it is bound to, the tensors to put in, call by call."""
        self.turns = Turns()

    def bound(self, names: Mapping[str, Sequence[str]], *, inputs: bool) -> Edit:
        assert self.cache is not None
        twin = copy.copy(self)
        twin.cache = None  # what is not patched need not be kept
        twin.values = {}
        twin.turns = Turns()
        for name, spellings in names.items():
            found = tensors_of(
                self.cache, spellings, inputs=inputs, word=self.word, of_one_forward=not isinstance(self, _Mean)
            )
            twin.values[name] = [Held(tensor) for tensor in self.combined(found, name)]
        return twin

    def combined(self, found: list[Tensor], name: str) -> list[Tensor]:
        """What is to be put in, of what was recorded for a site."""
        return found

    def attached(self, root: ForwardCounter) -> None:
        self.turns.root = root

    def change(self, part: Tensor, x: Tensor, site: Site) -> Tensor:
        calls = self.values[site.name]
        value = _converted(self, calls[0 if len(calls) == 1 else self.turns.turn(site, len(calls))], x, site)
        if self.index is not None and value.dim() == x.dim() and self.fits(value, x):
            value = self.index.part(value.expand(x.shape), place_of(site))
        if not self.fits(value, part):
            remedy = (
                "Patch a run with inputs of the same shape, or give the part that fits to hookline.edits.replace()."
            )
            self.misfit(f"has a tensor of shape {shape_of(value)} from the other run", part, x, site, remedy)
        return value.expand(part.shape).clone()  # what comes next may change it in place

    def fits(self, value: Tensor, part: Tensor) -> bool:
        """Whether it is as large as what it replaces; one sample of the other run may serve for a whole batch."""
        return value.dim() == part.dim() and value.shape[1:] == part.shape[1:] and broadcasts(value, part)

    def options(self) -> str:
        return "cache"


class _Mean(_Recorded):
    def __init__(self, cache: Mapping[str, Any], dims: Sequence[int] | None, index: IndexLike | None) -> None:
        super().__init__("mean_ablate", cache, index)
        self.dims = dims

    def combined(self, found: list[Tensor], name: str) -> list[Tensor]:
        return [mean_of(found, self.dims, name)]

    def fits(self, value: Tensor, part: Tensor) -> bool:
        return broadcasts(value, part)

    def options(self) -> str:
        return "cache" if self.dims is None else f"cache, dims={tuple(self.dims)}"


def _converted(edit: Edit, held: Held, x: Tensor, site: Site) -> Tensor:
    """The tensor as the activation has it, unless that would cut something off its numbers."""
    given = held.tensor
    if given.is_floating_point() or given.is_complex():
        edit.check_real(x, site)
    if given.is_complex() and not x.is_complex():
        misfit(f"{edit.word}() was given complex numbers", place_of(site), f"is of {dtype_name(x.dtype)}", _REAL)
    return held.like(x)


_REAL = "Give a real tensor: torch.view_as_real, or .abs()."
_BROADCAST = "Give a tensor of that shape, or of one that broadcasts to it."


def _shown(tensor: Tensor) -> str:
    return f"<tensor of shape {tuple(tensor.shape)}>"
