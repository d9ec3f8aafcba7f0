"""Find the tensors of a call that have gradients, and have autograd tell when these come.

``call_gradients`` calls this: it lists and names tensors, puts a `Tap` on a tensor to observe it, and lets tensors pass
a gate where their gradients are edited together. In the backward pass both call the `BackwardCall` whose gradient has
come; for observers of one output alone, a tap calls the `OutputCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hookline import tree
from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.hook_at_site import HookAtSite

# -- the tensors of a call -----------------------------------------------------------------------------------------

IndexedTensor: TypeAlias = tuple[int, Tensor]
"""A tensor with its index in ``grad_input`` or ``grad_output``."""

_NOTHING: Final[tuple[Any, ...]] = ()


def as_arguments(output: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return an output in the shape of arguments: the items of a tuple or list count like positional ones."""
    if isinstance(output, tuple | list):
        return output, {}
    return _NOTHING, {"": output}


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    """Return the tensors whose gradients are handed over, in order.

    A positional value has one place even if it is no tensor, as in torch; of containers and keyword arguments
    only the tensors count.
    """
    found: list[Tensor | None] = []
    for value in args:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += _inside(value) or [None]
    for value in kwargs.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            found += _inside(value)
    return found


def _inside(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what `tensors` gives."""
    names: list[str] = []
    for index, value in enumerate(args):
        inside = [path for path, leaf in tree.leaves(value, str(index)) if isinstance(leaf, Tensor)]
        names += inside or [str(index)]
    for key, value in kwargs.items():
        names += [path for path, leaf in tree.leaves(value, key) if isinstance(leaf, Tensor)]
    return tuple(names)


def is_flat(output: Any) -> bool:
    """Return whether all tensors of an output are the output, or stand in its tuple: torch sees no others."""
    items = output if isinstance(output, tuple) else (output,)
    return all(isinstance(item, Tensor) or not _inside(item) for item in items)


def distinct(tensors: list[Any]) -> list[IndexedTensor]:
    """Return the tensors that gradients will come for, each once, with its place."""
    if len(tensors) == 1:
        only = tensors[0]
        return [(0, only)] if only is not None and only.requires_grad else []
    seen: dict[int, IndexedTensor] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad:
            seen.setdefault(id(tensor), (index, tensor))
    return list(seen.values())


# -- what hooks return --------------------------------------------------------------------------------------------


def checked(result: Any, grads: Grads, entry: HookAtSite) -> Grads:
    """Return the gradients of a call as a hook has returned them, if they fit; zeros for a None that cuts one off.

    A tensor hook cannot say "none", so nothing else cuts a gradient off everywhere.
    """
    new = fitting_all(result, grads, entry)
    return tuple(
        torch.zeros_like(old) if one is None and old is not None else one for one, old in zip(new, grads, strict=True)
    )


def fitting_all(new: Any, old: Grads, entry: HookAtSite) -> Grads:
    """Return several gradients that a hook has returned, if they can stand in for the old ones; None stays."""
    if isinstance(new, Tensor) and len(old) == 1:
        new = (new,)
    if not isinstance(new, tuple | list) or len(new) != len(old):
        got = f"{len(new)} values" if isinstance(new, tuple | list) else type_name(new)
        raise _misfit(entry, f"expected None or a tuple of {len(old)}, got {got}")
    pairs = enumerate(zip(new, old, strict=True))
    return tuple(None if one is None else fitting(one, was, entry, f"entry {index}") for index, (one, was) in pairs)


def fitting(new: Any, old: Tensor | None, entry: HookAtSite, what: str = "the return value") -> Tensor:
    """Return a gradient that a hook has returned, if it can stand in for the old one."""
    if not isinstance(new, Tensor):
        raise _misfit(entry, f"{what} is {type_name(new)}, not a tensor or None")
    if old is None:
        raise _misfit(entry, f"{what} is for a gradient that did not come in this pass (None), so it cannot be given")
    if _looks(new) != _looks(old):
        raise _misfit(entry, f"{what} is {_looks(new)}, the gradient is {_looks(old)}")
    return new


def _looks(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f", {tensor.layout}"
    return f"{tuple(tensor.shape)}, {tensor.dtype}{layout}, on {tensor.device}"


def _misfit(entry: HookAtSite, what: str) -> HookReturnError:
    attachment = entry.attachment
    return HookReturnError(f"{attachment.kind.value} hook {attachment.name!r} on {entry.name!r}: {what}.")


# -- taps: gradients that are observed, and edits of one output ----------------------------------------------------

Call: TypeAlias = Any
"""A `BackwardCall`, which is above this file."""
_Output: TypeAlias = tuple[Any, Any, torch.Size | None]
"""A `BackwardCall` or `OutputCall`, the tensor's place there, and its shape there, if not its own."""


class Tap(list[_Output]):
    """The one tensor hook on a tensor that passes between modules: the calls that give the tensor out.

    Of a module and its last child, the child comes first. It has to be one: torch runs the hooks of a tensor in the
    order they came, which is the order of the forward, and would have a module's ``backward_pre`` before the
    ``backward`` of the module that used its output.
    """

    # A list by itself, since one is made for each call of each module that is watched.
    inputs: tuple[tuple[Call, int, torch.Size | None], ...] = ()
    """Calls that take the tensor in, its place there, and its shape there, if not its own."""

    def add_input(self, call: Call, index: int, shape: torch.Size | None = None) -> None:
        """Add a call that takes the tensor in."""
        self.inputs += ((call, index, shape),)

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        given = grad
        for call, index, shape in reversed(self.inputs):
            grad = call.reach_producer(index, grad, shape)
        for call, place, shape in reversed(self):
            if shape is None or grad is None:
                grad = call.take_output(place, grad)
                continue
            seen = grad.view(shape) if grad.is_contiguous() else grad.reshape(shape)
            new = call.take_output(place, seen)
            if new is not seen and new is not None:
                grad = new.reshape(grad.shape)
        return None if grad is given else grad


def tap(tensor: Tensor, node: Any) -> Tap:
    """Return the tap on a tensor that ``node`` made; kept with that node, so that it goes when the graph does."""
    return _torch.only_hook(tensor, node, Tap)


def behind(tensor: Tensor) -> tuple[Tensor, torch.Size | None]:
    """Return where to tap a tensor so that an in-place operation on it does no harm: the tensor it is a reshape of.

    With it comes the shape of the reshape; a tensor that shows nothing else, or not all of it in order, is itself.
    """
    base = tensor._base
    if (
        base is None
        or base.grad_fn is None
        or tensor.numel() != base.numel()
        or not tensor.is_contiguous()
        or not base.is_contiguous()
    ):
        return tensor, None
    return base, tensor.shape


def accumulator(leaf: Tensor) -> Any:
    """Return the node that accumulates into a leaf; None for kinds of tensor that cannot be asked (sparse, nested).

    Inside a transform of ``torch.func`` a parameter that the transform was not told of has none either.
    """
    if not takes_views(leaf):
        return None
    # What get_gradient_edge does, at a third of its price: the calls that ask have gradients enabled.
    node: Any = leaf.view_as(leaf).grad_fn
    return None if node is None else node.next_functions[0][0]


def takes_views(tensor: Tensor) -> bool:
    """Return whether there are views of a tensor of this kind."""
    return tensor.layout is torch.strided and not tensor.is_nested


class ViewPart(NamedTuple):
    """Which part of the tensor behind it an input shows that is a view."""

    place: int
    """The index of the input."""
    base: tuple[torch.Size, tuple[int, ...]]
    """Size and strides of the tensor behind it."""
    view: tuple[torch.Size, tuple[int, ...], int]
    """Size, strides and offset of the view in that."""

    def cut(self, grad: Tensor) -> Tensor:
        """Return the view's part of a gradient of the tensor behind it."""
        size, stride = self.base
        if grad.stride() != stride:
            grad = torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        view_size, view_stride, offset = self.view
        return grad.as_strided(view_size, view_stride, grad.storage_offset() + offset)


class ViewInput(NamedTuple):
    """An input that is a view, as it went in: an in-place operation on it takes its node out of the graph.

    What the module sends to it then comes to the tensor behind it, whose node stays.
    """

    tensor: Tensor
    version: int
    node: Any
    output: int
    """Which output of the node the tensor behind it is."""
    part: ViewPart

    @classmethod
    def of(cls, index: int, view: Tensor, base: Tensor) -> ViewInput:
        """Return how the input is now."""
        place = view.size(), view.stride(), int(view.storage_offset() - base.storage_offset())
        part = ViewPart(index, (base.size(), base.stride()), place)
        return cls(view, view._version, base.grad_fn, base.output_nr, part)

    def is_changed(self) -> bool:
        """Return whether an in-place operation has changed it, or what shares its memory."""
        return self.tensor._version != self.version


# -- the gate: gradients that are edited together ------------------------------------------------------------------

_Take: TypeAlias = Callable[[list[int], "Grads"], "Grads"]
"""`BackwardCall.take_inputs` or ``take_outputs``."""


class HooklineGate(torch.autograd.Function):
    """Several tensors that pass one node, so that their gradients are all known before one goes on.

    Inputs go in as views, as with torch's full backward hook: to change one in place, past the caller's tensor, is an
    error of torch's that has this name in it. Outputs share memory and version with what went in but are no views, so
    that in-place operations behind the gate stay legal and are still noticed where they spoil a saved tensor.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(take: _Take, places: list[int], views: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) if views else tensor.detach() for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.take, ctx.places, ctx.views, *tensors = inputs
        ctx.layouts = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.take(ctx.places, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent
            for tangent, (shape, dtype, device) in zip(tangents[3:], ctx.layouts, strict=True)
        ]
        return tuple(tangent.view_as(tangent) if ctx.views else tangent.clone() for tangent in given)


def pass_gate(take: _Take, members: list[IndexedTensor], *, views: bool) -> dict[int, Tensor]:
    """Return what comes out of a gate in place of each member, by its id."""
    places = [place for place, _ in members]
    passed = HooklineGate.apply(take, places, views, *(tensor for _, tensor in members))  # type: ignore[no-untyped-call]
    return {id(tensor): twin for (_, tensor), twin in zip(members, passed, strict=True)}
