"""The hooks that autograd calls for us: taps on tensors, aliases that hold back, gates, the end of a backward pass.

Takes calls from ``gradients`` and tells them, in the backward pass, which gradient has come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.sites.gradients.call_gradients import GradientCall
    from hookline.sites.gradients.gradient_names import Place

__all__ = ["Tap", "accumulator", "at_end_of", "behind", "end_of", "join", "pass_gate", "tap"]

_Use: TypeAlias = "tuple[GradientCall, int, torch.Size | None]"
"""A call, the place of the tensor in it, and the shape it has there, if that is not its own."""


class Tap:
    """The one tensor hook on a tensor that passes between modules.

    It has to be one: torch runs the hooks of a tensor in the order they came, which is the order of the
    forward, and would have a module's ``backward_pre`` before the ``backward`` of the module that used its
    output.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs: list[tuple[GradientCall, int]] = []
        """Calls that take the tensor in, and its place there."""
        self.outputs: list[_Use] = []
        """Calls that give it out; of a module and its last child, the child comes first."""

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        given = grad
        for call, index in reversed(self.inputs):
            grad = call.take_turn(index, grad)
        for call, index, shape in reversed(self.outputs):
            if shape is None or grad is None:
                grad = call.take_output(index, grad)
            else:
                seen = grad.view(shape) if grad.is_contiguous() else grad.reshape(shape)
                new = call.take_output(index, seen)
                if new is not seen and new is not None:
                    grad = new.reshape(grad.shape)
        return None if grad is given else grad


def tap(tensor: Tensor, node: Any) -> Tap:
    """The tap on a tensor that ``node`` made; kept with that node, so that it goes when the graph does."""
    key = _TAP, tensor.output_nr
    metadata: dict[Any, Any] = node.metadata
    found: Tap | None = metadata.get(key)
    if found is None:
        found = metadata[key] = Tap()
        _torch.hook_tensor(tensor, found)
    return found


_TAP: Final = "hookline.tap"


def behind(tensor: Tensor) -> tuple[Tensor, torch.Size | None]:
    """Where to tap a tensor so that an in-place operation on it does no harm: the tensor it is a reshape of.

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


class _Gate(torch.autograd.Function):
    """Several outputs that pass one node, so that their gradients are all known before one goes on.

    What comes out shares memory and version with what went in but is no view of it, so that in-place
    operations behind it stay legal and are still noticed where they spoil a saved tensor.
    """

    @staticmethod
    def forward(ctx: Any, call: GradientCall, places: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places = call, places
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: GradientCall = ctx.call
        for place, grad in zip(ctx.places, grads, strict=True):
            call.collect_output(place, grad)
        return None, None, *call.pass_gate(ctx.places, grads)


def pass_gate(call: GradientCall, members: list[Place]) -> dict[int, Tensor]:
    """What comes out of the gate in place of each member, by its id."""
    if _torch.in_transform():
        return {}
    places = [place for place, _ in members]
    passed = _Gate.apply(call, places, *(tensor for _, tensor in members))  # type: ignore[no-untyped-call]
    return {id(tensor): twin for (_, tensor), twin in zip(members, passed, strict=True)}


_Collect: TypeAlias = Callable[[int, Tensor | None], None]
_Release: TypeAlias = Callable[[int, Tensor | None], Tensor | None]
_TensorHook: TypeAlias = Callable[[Tensor], Tensor | None]


def join(members: list[Place], collect: _Collect, release: _Release) -> dict[int, Tensor]:
    """Aliases, by the id of the tensor, such that every gradient is collected before the first is released."""
    aliases = {
        index: _alias(tensor) for index, tensor in members if tensor.layout is torch.strided and not tensor.is_nested
    }
    # A parameter that a transform of torch.func was not told of goes in as it is.
    members = [(index, tensor) for index, tensor in members if index in aliases and aliases[index].grad_fn is not None]
    earlier = [aliases[index] for index, _ in members]
    if len(members) == 1:
        _torch.hook_tensor(earlier[0], _collect_and_release(members[0][0], collect, release))
        return {id(members[0][1]): earlier[0]}
    later = [_alias(alias) for alias in earlier]
    for (index, _), releasing, collecting in zip(members, earlier, later, strict=True):
        _torch.hook_tensor(releasing, _release(index, release))
        _torch.hook_tensor(collecting, _collect(index, collect))
    return {id(tensor): alias for (_, tensor), alias in zip(members, later, strict=True)}


def _alias(tensor: Tensor) -> Tensor:
    # The gradient of a leaf's view_as is a new tensor on the same memory, which the leaf would take for its
    # own .grad and change under whoever kept it; alias hands it on as it is.
    alias: Tensor = torch.ops.aten.alias.default(tensor) if tensor.grad_fn is None else tensor.view_as(tensor)
    return alias


def accumulator(leaf: Tensor) -> Any:
    """The node that accumulates into a leaf; None for kinds of tensor that cannot be asked (sparse, nested).

    Inside a transform of ``torch.func`` a parameter that the transform was not told of has none either.
    """
    if leaf.layout is not torch.strided or leaf.is_nested:
        return None
    # What get_gradient_edge does, at a third of its price: the calls that ask have gradients enabled.
    node: Any = leaf.view_as(leaf).grad_fn
    return None if node is None else node.next_functions[0][0]


def _collect_and_release(index: int, collect: _Collect, release: _Release) -> _TensorHook:
    def hook(grad: Tensor) -> Tensor | None:
        collect(index, grad)
        new = release(index, grad)
        return None if new is grad else new

    return hook


def _collect(index: int, collect: _Collect) -> _TensorHook:
    def hook(grad: Tensor) -> None:
        collect(index, grad)

    return hook


def _release(index: int, release: _Release) -> _TensorHook:
    def hook(grad: Tensor) -> Tensor | None:
        new = release(index, grad)
        return None if new is grad else new

    return hook


class _EndOfBackward:
    """The calls that took part in one backward pass; what has not fired when it ends, fires then."""

    __slots__ = ("__weakref__", "calls", "latest")

    def __init__(self) -> None:
        self.calls: list[GradientCall] = []
        self.latest: Tensor | None = None
        """For a backward pass that is traced: what the hooks that fired last gave out, for the next to take in."""

    def __call__(self) -> None:
        # In the order autograd would have reached them: the last that began comes first.
        late = [call for call in self.calls if not call.done]
        self.calls.clear()
        for call in sorted(late, key=lambda call: call.order, reverse=True):
            call.fire_post()


# The engine holds the values, so a pass that raises leaves nothing here.
_ENDS: Final[weakref.WeakValueDictionary[int, _EndOfBackward]] = weakref.WeakValueDictionary()


class _Latest:
    """The end that was asked for last: within one pass, the dictionary is asked once."""

    task = -1
    end: Callable[[], _EndOfBackward | None] = staticmethod(lambda: None)


def at_end_of(task: int) -> list[GradientCall]:
    """The calls that take part in a backward pass, to add one to."""
    return end_of(task).calls


def end_of(task: int) -> _EndOfBackward:
    """What is kept until the end of a backward pass."""
    if task == _Latest.task:
        latest = _Latest.end()
        if latest is not None:
            return latest
    end = _ENDS.get(task)
    if end is None:
        end = _ENDS[task] = _EndOfBackward()
        _torch.queue_end_of_backward(end)
    _Latest.task, _Latest.end = task, weakref.ref(end)
    return end
