"""Find the tensors of a call that have gradients, and register the hooks that autograd calls for them.

``call_gradients`` and the slots of a module call this: it lists and names tensors, finds the tensor behind a view, and
puts taps, aliases and gates on. In the backward pass these call the `BackwardCall` whose gradient has come, or, for
observers of one output alone, the `OutputCall`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline import tree
from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.hook_at_site import OrderGroup

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


def checked(result: Any, grads: Grads, entry: HookAtSite) -> Grads:
    """Return a hook's return value as gradients, if it fits."""
    if isinstance(result, Tensor) and len(grads) == 1:
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != len(grads):
        got = f"{len(result)}" if isinstance(result, tuple | list) else type_name(result)
        raise _misfit(entry, f"expected a tuple of {len(grads)}, or None, got {got}")
    return tuple(_checked_one(i, new, old, entry) for i, (new, old) in enumerate(zip(result, grads, strict=True)))


def _checked_one(index: int, new: Any, old: Tensor | None, entry: HookAtSite) -> Tensor | None:
    if new is None and old is not None:
        return torch.zeros_like(old)  # cuts the gradient; a tensor hook cannot say "none"
    if new is None:
        return None
    if not isinstance(new, Tensor):
        raise _misfit(entry, f"entry {index} is {type_name(new)}, not a tensor or None")
    if old is None:
        raise _misfit(entry, f"entry {index} got no gradient in this pass, so it cannot be given one")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise _misfit(
            entry,
            f"entry {index} has shape {tuple(new.shape)} and {new.dtype}, the gradient has "
            f"{tuple(old.shape)} and {old.dtype}",
        )
    return new


def _misfit(entry: HookAtSite, what: str) -> HookReturnError:
    attachment = entry.attachment
    return HookReturnError(f"{attachment.kind.value} hook {attachment.name!r} on {entry.name!r}: {what}.")


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
    if leaf.layout is not torch.strided or leaf.is_nested:
        return None
    # What get_gradient_edge does, at a third of its price: the calls that ask have gradients enabled.
    node: Any = leaf.view_as(leaf).grad_fn
    return None if node is None else node.next_functions[0][0]


class Taken:
    """An input as it went in, to tell whether the module has changed it in place."""

    __slots__ = ("index", "node", "output", "shape", "tensor", "version", "window")

    def __init__(
        self, index: int, tensor: Tensor, source: Tensor, shape: torch.Size | None, *, aliased: bool = False
    ) -> None:
        self.index = index
        self.tensor = tensor
        self.shape = shape
        """Its own, if the gradient may come in that of the tensor behind it."""
        self.version = tensor._version
        # In-place on a view replaces its node; the tensor behind it keeps the old one. Where an alias goes in, the
        # tensor itself gets a new node.
        self.node: Any = source.grad_fn if shape is not None or aliased else None
        self.output = source.output_nr
        self.window: Window | None = None
        base = tensor._base
        if shape is None and base is not None and base.grad_fn is not None:
            self.node, self.output, self.window = base.grad_fn, base.output_nr, Window(tensor, base)


class Window:
    """A view that is no reshape: which part of the tensor behind it it shows."""

    __slots__ = ("_behind", "_view")

    def __init__(self, view: Tensor, base: Tensor) -> None:
        self._behind = base.size(), base.stride()
        self._view = view.size(), view.stride(), view.storage_offset() - base.storage_offset()

    def cut(self, grad: Tensor) -> Tensor:
        """Return the view's part of a gradient of the tensor behind it."""
        return self._laid_out(grad).as_strided(*self._view)

    def add(self, grad: Tensor, more: Tensor) -> Tensor:
        """Return that gradient with ``more`` added to the view's part of it."""
        whole = self._laid_out(grad)
        whole.as_strided(*self._view).add_(more)
        return whole

    def _laid_out(self, grad: Tensor) -> Tensor:
        """Return a copy in memory as the tensor itself is, whose offsets then hold."""
        size, stride = self._behind
        return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)


# -- taps on outputs and inputs ------------------------------------------------------------------------------------

Call: TypeAlias = Any
"""A `BackwardCall`, which is above this file."""
_Use: TypeAlias = tuple[Any, Any, torch.Size | None]
"""A `BackwardCall` and the tensor's place there, or an `OutputCall` and the module; the shape there, if not its own."""


class Tap(list[_Use]):
    """The one tensor hook on a tensor that passes between modules: the calls that give the tensor out.

    Of a module and its last child, the child comes first. It has to be one: torch runs the hooks of a tensor in the
    order they came, which is the order of the forward, and would have a module's ``backward_pre`` before the
    ``backward`` of the module that used its output.
    """

    # A list by itself, since one is made for each call of each module that is watched.
    inputs: tuple[tuple[Call, int], ...] = ()
    """Calls that take the tensor in, and its place there."""

    def add_input(self, call: Call, index: int) -> None:
        """Add a call that takes the tensor in."""
        self.inputs += ((call, index),)

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        given = grad
        for call, index in reversed(self.inputs):
            grad = call.reach_producer(index, grad)
        for user, place, shape in reversed(self):
            if shape is None or grad is None:
                grad = user.take_output(place, grad)
            else:
                seen = grad.view(shape) if grad.is_contiguous() else grad.reshape(shape)
                new = user.take_output(place, seen)
                if new is not seen and new is not None:
                    grad = new.reshape(grad.shape)
        return None if grad is given else grad


def tap(tensor: Tensor, node: Any) -> Tap:
    """Return the tap on a tensor that ``node`` made; kept with that node, so that it goes when the graph does."""
    return _torch.only_hook(tensor, node, Tap)


# -- gates and aliases: gradients that may be edited ---------------------------------------------------------------


class _Gate(torch.autograd.Function):
    """Several outputs that pass one node, so that their gradients are all known before one goes on.

    What comes out shares memory and version with what went in but is no view of it, so that in-place
    operations behind it stay legal and are still noticed where they spoil a saved tensor.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, places: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places = call, places
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: Call = ctx.call
        for place, grad in zip(ctx.places, grads, strict=True):
            call.collect_output(place, grad)
        return None, None, *call.pass_gate(ctx.places, grads)


def pass_gate(call: Call, members: list[IndexedTensor]) -> dict[int, Tensor]:
    """Return what comes out of the gate in place of each member, by its id."""
    if _torch.in_transform():
        return {}
    places = [place for place, _ in members]
    passed = _Gate.apply(call, places, *(tensor for _, tensor in members))  # type: ignore[no-untyped-call]
    return {id(tensor): twin for (_, tensor), twin in zip(members, passed, strict=True)}


_Collect: TypeAlias = Callable[[int, Tensor | None], None]
_Release: TypeAlias = Callable[[int, Tensor | None], Tensor | None]
_TensorHook: TypeAlias = Callable[[Tensor], Tensor | None]


def join(members: list[IndexedTensor], collect: _Collect, release: _Release) -> dict[int, Tensor]:
    """Return aliases, by the id of the tensor, such that every gradient is collected before the first is released."""
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


# -- beside torch's own backward hooks -----------------------------------------------------------------------------


def run_before_torch(call: Call, hooks: Any, output: Any, index_of: Callable[[Tensor], int]) -> None:
    """Let torch's ``hooks`` (its ``BackwardHook`` of one call) run the ``backward_pre`` hooks of ``call`` too.

    torch wraps the outputs of such a call in a node of its own *after* all forward hooks, so its hooks would come
    before everything that we put on the outputs. It also keeps a list of pre-hooks for that one call: ours go in there,
    edits before the hooks of others, observers after them.

    ``output`` is what the module has made. torch sees the tensors that are the output or stand in its tuple; if there
    are others, deeper inside, the hooks wait for these and stay where they are, on the outputs.
    """
    items = output if isinstance(output, tuple) else (output,)
    if all(isinstance(item, Tensor) or not _needs_gradient(item) for item in items):
        before_torch = _HooksBeforeTorch(call, _places(items, index_of), len(tensors(*as_arguments(output))))
        hooks.user_pre_hooks = [before_torch.edit, *hooks.user_pre_hooks, before_torch.observe]


class _HooksBeforeTorch:
    """The ``backward_pre`` hooks of one call, as two pre-hooks of torch's."""

    __slots__ = ("_call", "_observers", "_places", "_width")

    def __init__(self, call: Call, places: tuple[int, ...], width: int) -> None:
        self._call = call
        self._places = places
        self._width = width
        self._observers: tuple[HookAtSite, ...] = ()

    def edit(self, module: Any, grads: Grads) -> Grads | None:
        """Begin the pass, run raw observers and edits; return the gradients if one was replaced."""
        self._observers = ()
        if len(grads) != len(self._places):
            return None  # a forward hook behind ours has put another output there
        entries = self._call.begin_before_torch()
        self._observers = tuple(entry for entry in entries if entry.attachment.order_group is OrderGroup.OBSERVE)
        given = self._ours(grads)
        edited = self._call.fire(entries[: len(entries) - len(self._observers)], given, ())
        if edited is given:
            return None
        return tuple(edited[place] if place >= 0 else grad for place, grad in zip(self._places, grads, strict=True))

    def observe(self, module: Any, grads: Grads) -> None:
        """Run the observers that were on when the pass began; everybody has edited by now."""
        observers, self._observers = self._observers, ()
        if observers:
            self._call.fire(observers, self._ours(grads), ())

    def _ours(self, grads: Grads) -> Grads:
        """Return torch's gradients in our places, without those of inputs that were handed back."""
        ours: list[Tensor | None] = [None] * self._width
        for place, grad in zip(self._places, grads, strict=True):
            if place >= 0:
                ours[place] = grad
        return tuple(ours)


def _needs_gradient(item: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in tree.leaves(item))


def _places(items: tuple[Any, ...], index_of: Callable[[Tensor], int]) -> tuple[int, ...]:
    """Return for each item of the output its index in ``grad_output``; -1 for one that the module did not make."""
    wanted = [isinstance(item, Tensor) and item.requires_grad for item in items]
    made = [want and index_of(item) < 0 for item, want in zip(items, wanted, strict=True)]
    shown = made if any(made) else wanted
    ends = itertools.accumulate(len(tensors((item,), {})) for item in items)
    return tuple(end - 1 if show else -1 for end, show in zip(ends, shown, strict=True))
