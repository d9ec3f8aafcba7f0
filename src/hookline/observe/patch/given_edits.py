"""Edit activations by values that the user gives: ablate, scale, steer, replace.

Users reach these as ``hookline.edits``; ``patch`` applies them at sites. Nothing is changed in place, and all of it can
be traced into a compiled graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.observe.patch.edit import BROADCAST, Edit, broadcasts
from hookline.observe.patch.edit_index import GivenTensor, as_tensor
from hookline.observe.patch.edited_tensor import shape_of

if TYPE_CHECKING:
    from hookline.observe.patch.edit_index import IndexLike
    from hookline.observe.patch.edited_tensor import Where

__all__ = ["ablate", "replace", "scale", "steer"]


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
    if not broadcasts(factor, part):
        edit.misfit(f"was given a factor of shape {shape_of(factor)}", part, x, site, BROADCAST)
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
        if not broadcasts(vector, part) or vector.shape[-1:] != part.shape[-1:]:
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
        if not broadcasts(value, part):
            self.misfit(f"was given a tensor of shape {shape_of(value)}", part, x, site, BROADCAST)
        return value.expand(part.shape).clone()  # what comes next may change it in place

    def options(self) -> str:
        return _shown(self.value.tensor)


def _shown(tensor: Tensor) -> str:
    return f"<tensor of shape {tuple(tensor.shape)}>"
