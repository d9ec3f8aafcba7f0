"""Gradients of a module's inputs and outputs, seen or edited, without disturbing anything else.

Takes a module's call from the ports (`GradientCall.enter` before it, `leave` after it), hands gradients to the
``backward_pre`` and ``backward`` hooks of its table when autograd comes by.

Three facts of autograd carry this file. It runs ready nodes in falling order of their sequence number, and
accumulates into leaves at once; so when the producer of an input has its turn, everything the module made
has run and its parameters have their gradients. A tensor hook fires when that tensor's gradient is complete,
for the version of the tensor it was put on. And contributions to a tensor are summed in the order in which
its users run, so an extra node that gathers some of them first may change the rounding of that sum.

*Outputs* are tapped: one tensor hook on each. An in-place operation takes a view out of the graph, so of an
output that is a plain reshape (a Linear's, say) the tensor behind it is tapped. Where a tap would tell too
much or too little (an output that is used inside the module as well, another kind of view, several outputs
whose gradients may be edited together), the output passes a node of ours, the `_Gate`. What comes to it are
the last users of the tensor, which autograd adds up first anyway, so nothing is rounded otherwise.

*Inputs, watched* (no hook can return a value): the nodes through which the module reaches each input are found
by walking its part of the graph, and hooks on them collect what they send; the input's producer gives the
signal to fire. Nothing is added to the graph, so the run is the same to the last bit.

*Inputs, edited*: each goes in as an alias whose tensor hook sees, and may replace, this module's own share.
Several inputs get two aliases each: the ones made later run first and collect, the ones made earlier run after
all of them, fire, and let the result through. Where one tensor is used twice or more inside the module and
again after it, the sum is formed in another order than without the hook (docs/sources.md).

A module that hands its input back has no node of its own. Watched, it reports what comes to that tensor, from
whomever; only edited does it get an alias, and with it a share of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hookline.errors import HookReturnError
from hookline.sites import _torch, tree
from hookline.sites.entry import Phase, next_order
from hookline.sites.kinds import Kind
from hookline.sites.site import Site

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.entry import Entry
    from hookline.sites.table import Table
    from hookline.types import Grads

__all__ = ["Carrier", "CarrierArgs", "GradientCall"]

_EDIT: Final = Phase.EDIT  # looking an enum member up by its class costs 0.2 µs
_BACKWARD_PRE: Final = Kind.BACKWARD_PRE
_BACKWARD: Final = Kind.BACKWARD

_Member: TypeAlias = tuple[int, Tensor]
"""A tensor with its place in ``grad_input`` or ``grad_output``."""


class Carrier(dict[str, Any]):
    """The keyword arguments of one call, with its `GradientCall` in tow from pre-hook to post-hook.

    torch hands the same object to both, so no stack has to be kept, and none is left behind by a forward
    that raises. The graph nodes of the inputs travel here too and not in the call: the call hangs on hooks of
    those very nodes, and the collector cannot see such a ring.
    """

    __slots__ = ("aliases", "call", "edges", "swapped", "taken")

    def __init__(self, kwargs: Mapping[str, Any], call: GradientCall) -> None:
        super().__init__(kwargs)
        self.call = call
        self.edges: _torch.Edges = {}
        """Where the graph leads to an input as it went in, and its place in ``grad_input``."""
        self.aliases = False
        """Whether aliases of the inputs went in."""
        self.taken: list[_Taken] = []
        """The inputs as they went in."""
        self.swapped: list[tree.Swapped] = []
        """Where an alias stands in a list or dict of the caller's."""

    def place_of(self, tensor: Tensor) -> int:
        """Which input the tensor is, handed back as it went in; -1 for none."""
        if tensor.grad_fn is None:
            return next((taken.index for taken in self.taken if taken.tensor is tensor), -1)
        outputs = self.edges.get(tensor.grad_fn)
        return -1 if outputs is None else outputs.get(tensor.output_nr, -1)


class CarrierArgs(tuple[Any, ...]):
    """Positional arguments with a `Carrier`, for a call whose keyword arguments cannot be exchanged."""

    carrier: Carrier


class GradientCall:
    """One call of a module, as its graph remembers it."""

    __slots__ = (
        "_awaited",
        "_back",
        "_edits_inputs",
        "_first_node",
        "_grad_inputs",
        "_grad_outputs",
        "_input_names",
        "_last_outputs",
        "_lost_aliases",
        "_module",
        "_moments",
        "_num_inputs",
        "_num_outputs",
        "_output_names",
        "_pre_done",
        "_shapes",
        "_table",
        "_task",
        "done",
        "order",
    )

    def __init__(self, table: Table, module: nn.Module) -> None:
        self._table = table
        self._module = module
        self._first_node = _torch.sequence_number()
        self._num_inputs = 0
        self._edits_inputs = False
        self._back = -1, -1  # the places of an input and of the output which are the same tensor
        self._lost_aliases = _NONE  # places of inputs whose alias an in-place operation may have taken out
        self._last_outputs: frozenset[int] | None = None  # with several outputs: those whose gradients come last
        self._shapes: dict[int, torch.Size] | None = None  # of inputs that are reshapes and were changed in place
        self._task = -1
        self.done = True
        """Whether there is nothing more to fire in the backward pass that came by last."""
        self.order = next_order()
        """When the call began, on the clock of ``entry.next_order``."""
        if table.tells_sites:
            self._moments = table.gradient_moments()
            self._input_names: tuple[str, ...] = ()
            self._output_names: tuple[str, ...] = ()

    # -- around the forward ------------------------------------------------------------------------------

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Carrier]:
        """Remember the inputs; the arguments for the module to go on with."""
        carrier = Carrier(kwargs, self)
        tensors = _tensors(args, kwargs)
        members = _distinct(tensors)
        self._num_inputs = len(tensors)
        table = self._table
        if table.tells_sites:
            self._input_names = _names(args, kwargs)
        for index, tensor in members:
            node = tensor.grad_fn
            if node is not None and table.watches_inputs:
                _tap(tensor, node).inputs.append((self, index))
            if node is None:
                node = _accumulator(tensor)
            if not table.edits_gradients and node is not None:
                carrier.edges.setdefault(node, {})[tensor.output_nr] = index
                carrier.taken.append(_Taken(index, tensor))
        if table.edits_gradients and members:
            args, named = self._enter_aliases(members, carrier, args, kwargs)
            carrier.update(named)
        return args, carrier

    def _enter_aliases(
        self, members: list[_Member], carrier: Carrier, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have aliases of the inputs go in."""
        self._edits_inputs = carrier.aliases = True
        carrier.taken = [_Taken(index, tensor) for index, tensor in members]
        aliases = _join(members, self._collect_input, self._release_input)
        for index, tensor in members:
            alias = aliases.get(id(tensor), tensor)
            carrier.edges.setdefault(alias.grad_fn, {})[alias.output_nr] = index
        swap = _swap(aliases)
        return tree.replace(args, swap, carrier.swapped), tree.replace(kwargs, swap, carrier.swapped)

    def leave(self, output: Any, carrier: Carrier) -> Any:
        """Watch the outputs; the output to go on with."""
        tree.swap_back(carrier.swapped)
        args, kwargs = _as_arguments(output)
        tensors: list[Tensor | None] = [output] if isinstance(output, Tensor) else _tensors(args, kwargs)
        members = _distinct(tensors)
        # An input handed back beside other outputs is not of this module's making, and is left alone.
        members = [member for member in members if carrier.place_of(member[1]) < 0] or members
        if not members:
            return output
        self._num_outputs = len(tensors)
        if self._table.tells_sites:
            self._output_names = _names(args, kwargs)
        if self._table.watches_inputs:
            for taken in carrier.taken:
                if taken.was_changed():
                    self._follow(taken, carrier)
        inside = self._watch(members, carrier)
        if len(members) > 1 and (self._table.edits_outputs or carrier.place_of(members[0][1]) >= 0):
            passed = _pass_gate(self, members)
        else:
            passed = self._tap_outputs(members, carrier, inside)
        return tree.replace(output, _swap(passed)) if passed else output

    def _follow(self, taken: _Taken, carrier: Carrier) -> None:
        """The module has changed an input in place: find the gradient of what that was before."""
        if carrier.aliases:
            self._lost_aliases |= {taken.index}
        if taken.base_node is not None:
            self._shapes = {**(self._shapes or {}), taken.index: taken.shape}
            carrier.edges.setdefault(taken.base_node, {})[taken.base_output] = taken.index
            taken.base_node.register_prehook(self._base_turn(taken.index, taken.base_output, taken.shape))

    def _watch(self, members: list[_Member], carrier: Carrier) -> set[int]:
        """Hook the nodes of this call that lead straight to a watched input; which outputs are used inside it."""
        watched = self._table.watches_inputs and not carrier.aliases and bool(carrier.edges)
        several = len(members) > 1
        if not watched and not several:
            return set()
        edges = carrier.edges if watched else {}
        if several:
            edges = {node: dict(outputs) for node, outputs in edges.items()}
            for index, tensor in members:
                edges.setdefault(tensor.grad_fn, {}).setdefault(tensor.output_nr, ~index)
        inside: set[int] = set()
        roots = [tensor.grad_fn for _, tensor in members if tensor.grad_fn is not None]
        for node, hits in _torch.boundary(roots, edges, self._first_node):
            inside.update(~number for _, number in hits if number < 0)
            inputs = [hit for hit in hits if hit[1] >= 0]
            if inputs:
                node.register_hook(self._collector(inputs))
        return inside

    def _tap_outputs(self, members: list[_Member], carrier: Carrier, inside: set[int]) -> dict[int, Tensor]:
        """Hook each output where its own gradient is to be had; what has to go out in its place, by id."""
        passed: dict[int, Tensor] = {}
        gated: list[_Member] = []
        nodes: list[tuple[int, int]] = []
        for index, tensor in members:
            place = carrier.place_of(tensor)
            behind, shape = tensor, None
            if tensor.grad_fn is None or (place >= 0 and carrier.aliases):
                behind = passed[id(tensor)] = tensor.view_as(tensor)
                if place >= 0:
                    self._back = place, index
                    self._lost_aliases |= {place}
            elif place >= 0:
                self._back = place, index
                if not self._table.watches_inputs:
                    _tap(tensor, tensor.grad_fn).inputs.append((self, place))
                return passed
            elif index in inside:
                gated.append((index, tensor))
                continue
            elif tensor._base is not None and _torch.made_since(tensor._base.grad_fn, self._first_node):
                if not _is_reshape(tensor, tensor._base):
                    gated.append((index, tensor))
                    continue
                behind, shape = tensor._base, tensor.shape
            node = behind.grad_fn
            _tap(behind, node).outputs.append((self, index, shape))
            nodes.append((_torch.sequence_number_of(node), index))
        if gated:
            passed.update(_pass_gate(self, gated))
        if len(members) > 1 and nodes:
            # Autograd comes last to the node that was made first; then all gradients there will be have come.
            last = min(nodes)[0]
            self._last_outputs = frozenset(index for number, index in nodes if number == last)
        return passed

    def _collector(self, hits: list[tuple[int, int]]) -> Callable[[Grads, Grads], None]:
        def collect(grad_inputs: Grads, grad_outputs: Grads) -> None:
            for slot, index in hits:
                self._collect_input(index, grad_inputs[slot])

        return collect

    def _base_turn(self, index: int, output: int, shape: torch.Size) -> Callable[[Grads], Grads | None]:
        def turn(grads: Grads) -> Grads | None:
            grad = grads[output]
            seen = None if grad is None else grad.reshape(shape)
            new = self.take_turn(index, seen)
            if new is seen or grad is None or new is None:
                return None
            return (*grads[:output], new.reshape(grad.shape), *grads[output + 1 :])

        return turn

    # -- in the backward pass, in this order -------------------------------------------------------------

    def take_output(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The gradient of an output has come; the gradient to go on with."""
        self.collect_output(index, grad)
        if self._last_outputs is None:
            return self.release_outputs()[index]
        self._awaited -= index in self._last_outputs
        if self._awaited == 0:
            self.release_outputs()
        return grad

    def pass_gate(self, places: list[int], grads: Grads) -> Grads:
        """The gradients of all outputs that pass the gate have come; the gradients to go on with."""
        if self._last_outputs is not None:
            return grads  # others are tapped, and come later; then nothing is edited
        outputs = self.release_outputs()
        return tuple(outputs[place] for place in places)

    def collect_output(self, index: int, grad: Tensor | None) -> None:
        """Note the gradient of one output; the first in a backward pass begins it for this call."""
        task = _torch.graph_task_id()
        if task != self._task:
            self._task = task
            self._pre_done = self.done = False
            self._awaited = len(self._last_outputs or ())
            self._grad_outputs: list[Tensor | None] = [None] * self._num_outputs
            self._grad_inputs: list[Tensor | None] = [None] * self._num_inputs
            _at_end_of(task).append(self)
        self._grad_outputs[index] = grad

    def release_outputs(self) -> list[Tensor | None]:
        """All gradients of the outputs are there: fire ``backward_pre``; the gradients to go on with."""
        if not self._pre_done:
            self._pre_done = True
            if self._table.lane(_BACKWARD_PRE):
                self._grad_outputs = list(self._fire(_BACKWARD_PRE, tuple(self._grad_outputs), ()))
        return self._grad_outputs

    def _collect_input(self, index: int, grad: Tensor | None) -> None:
        if grad is not None and not self.done and self._task == _torch.graph_task_id():
            if self._shapes is not None and index in self._shapes:
                grad = grad.reshape(self._shapes[index])
            so_far = self._grad_inputs[index]
            self._grad_inputs[index] = grad if so_far is None else so_far + grad

    def _release_input(self, index: int, grad: Tensor | None) -> Tensor | None:
        if self._task != _torch.graph_task_id():
            return grad  # this backward reached the inputs, but not through the outputs
        self.fire_post()
        grad, self._grad_inputs[index] = self._grad_inputs[index], None
        return grad

    def take_turn(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The producer of an input has its turn, so all that this call made has run; the gradient to go on with."""
        if index == self._back[0] and not (self._edits_inputs and self._task == _torch.graph_task_id()):
            # The input is the output too (and if it had an alias, that is out of the graph).
            grad = self.take_output(self._back[1], grad)
            if self._table.watches_inputs:
                self._grad_inputs[index] = grad
                grad = self.fire_post()[index]
            return grad
        if self.done or self._task != _torch.graph_task_id():
            return grad
        if index not in self._lost_aliases:
            self.fire_post()
            return grad
        if self._grad_inputs[index] is None:
            self._grad_inputs[index] = grad
        return self.fire_post()[index]

    def fire_post(self) -> Grads:
        """Everything this call gets in this backward pass is there, its parameters' gradients included."""
        if self.done:
            return ()
        self.release_outputs()
        self.done = True
        outputs, self._grad_outputs = tuple(self._grad_outputs), []
        inputs, self._grad_inputs = tuple(self._grad_inputs), []
        grads = self._fire(_BACKWARD, inputs, (outputs,))
        if self._edits_inputs:
            self._grad_inputs = list(grads)  # until the aliases have let them through
        return grads

    def _fire(self, kind: Kind, grads: Grads, more: tuple[Grads, ...]) -> Grads:
        """Call the live hooks of that kind that were on when this call began; the gradients as edited."""
        module = self._module
        for entry in self._table.lane(kind):
            attachment = entry.attachment
            if attachment.order > self.order:
                continue
            entry.count()
            if entry.simple:
                result = entry.hook(module, grads, *more)
            else:
                result = entry.call(module, (grads, *more), self._site(entry, module))
            if result is not None and attachment.phase is _EDIT:
                grads = _checked(result, grads, entry)
        return grads

    def _site(self, entry: Entry, module: nn.Module) -> Site | None:
        if not entry.attachment.wants_site:
            return None
        step, call = self._moments.get(entry.root, (-1, 0))
        kind = entry.attachment.kind
        return Site(entry.name, module, kind, call, step, inputs=self._input_names, outputs=self._output_names)


# -- the tensors of a call -------------------------------------------------------------------------------


_NOTHING: Final[tuple[Any, ...]] = ()
_NONE: Final[frozenset[int]] = frozenset()


def _as_arguments(output: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """An output in the shape of arguments: the items of a tuple or list count like positional ones."""
    if isinstance(output, tuple | list):
        return output, {}
    return _NOTHING, {"": output}


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    """The tensors whose gradients are handed over, in order.

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


def _names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what `_tensors` gives."""
    names: list[str] = []
    for index, value in enumerate(args):
        inside = [path for path, leaf in tree.leaves(value, str(index)) if isinstance(leaf, Tensor)]
        names += inside or [str(index)]
    for key, value in kwargs.items():
        names += [path for path, leaf in tree.leaves(value, key) if isinstance(leaf, Tensor)]
    return tuple(names)


def _distinct(tensors: list[Any]) -> list[_Member]:
    """The tensors that gradients will come for, each once, with its place."""
    if len(tensors) == 1:
        only = tensors[0]
        return [(0, only)] if only is not None and only.requires_grad else []
    seen: dict[int, _Member] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad:
            seen.setdefault(id(tensor), (index, tensor))
    return list(seen.values())


class _Taken:
    """An input as it went in: enough to tell whether the module changed it in place, and to find what it was."""

    __slots__ = ("base_node", "base_output", "index", "shape", "tensor", "version")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index = index
        self.tensor = tensor
        self.version = tensor._version
        self.base_node: Any = None
        base = tensor._base
        if base is not None and base.grad_fn is not None and _is_reshape(tensor, base):
            # In-place on a view replaces its node; the tensor behind it keeps the old one.
            self.base_node, self.base_output, self.shape = base.grad_fn, base.output_nr, tensor.shape

    def was_changed(self) -> bool:
        """Whether the module has changed it in place."""
        return self.tensor._version != self.version


def _is_reshape(view: Tensor, base: Tensor) -> bool:
    """Whether a view shows all of its base in the same order."""
    return (
        view.numel() == base.numel()
        and view.is_contiguous()
        and base.is_contiguous()
        and view.storage_offset() == base.storage_offset()
    )


# -- the hooks that autograd calls -----------------------------------------------------------------------


class _Tap:
    """The one tensor hook on a tensor that passes between modules.

    It has to be one: torch runs the hooks of a tensor in the order they came, which is the order of the
    forward, and would have a module's ``backward_pre`` before the ``backward`` of the module that used its
    output.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs: list[tuple[GradientCall, int]] = []
        """Calls that take the tensor in, and its place there."""
        self.outputs: list[tuple[GradientCall, int, torch.Size | None]] = []
        """Calls that give it out, its place and, if not its own, the shape it has there; inner calls first."""

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        given = grad
        for call, index in reversed(self.inputs):
            grad = call.take_turn(index, grad)
        for call, index, shape in reversed(self.outputs):
            if shape is None or grad is None:
                grad = call.take_output(index, grad)
                continue
            seen = grad.reshape(shape)
            new = call.take_output(index, seen)
            if new is not seen and new is not None:
                grad = new.reshape(grad.shape)
        return None if grad is given else grad


def _tap(tensor: Tensor, node: Any) -> _Tap:
    """The tap on a tensor that ``node`` made; kept with that node, so that it goes when the graph does."""
    key = _TAP, tensor.output_nr
    metadata: dict[Any, Any] = node.metadata
    tap: _Tap | None = metadata.get(key)
    if tap is None:
        tap = metadata[key] = _Tap()
        _torch.hook_tensor(tensor, tap)
    return tap


_TAP: Final = "hookline.tap"


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


def _pass_gate(call: GradientCall, members: list[_Member]) -> dict[int, Tensor]:
    """What comes out of the gate in place of each member, by its id."""
    places = [place for place, _ in members]
    passed = _Gate.apply(call, places, *(tensor for _, tensor in members))  # type: ignore[no-untyped-call]
    return {id(tensor): twin for (_, tensor), twin in zip(members, passed, strict=True)}


_TensorHook: TypeAlias = Callable[[Tensor], Tensor | None]
_Collect: TypeAlias = Callable[[int, Tensor | None], None]
_Release: TypeAlias = Callable[[int, Tensor | None], Tensor | None]


def _join(members: list[_Member], collect: _Collect, release: _Release) -> dict[int, Tensor]:
    """Aliases, by the id of the tensor, such that every gradient is collected before the first is released."""
    members = [(index, tensor) for index, tensor in members if tensor.layout is torch.strided and not tensor.is_nested]
    earlier = [_alias(tensor) for _, tensor in members]
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


def _accumulator(leaf: Tensor) -> Any:
    """The node that accumulates into a leaf; None for kinds of tensor that cannot be asked (sparse, nested)."""
    if leaf.layout is not torch.strided or leaf.is_nested:
        return None
    return get_gradient_edge(leaf).node


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


def _swap(aliases: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: aliases.get(id(tensor), tensor)


# -- what hooks return -----------------------------------------------------------------------------------


def _checked(result: Any, grads: Grads, entry: Entry) -> Grads:
    """A hook's return value as gradients, if it fits."""
    if isinstance(result, Tensor) and len(grads) == 1:
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != len(grads):
        got = f"{len(result)}" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
        raise _misfit(entry, f"expected a tuple of {len(grads)}, or None, got {got}")
    return tuple(_checked_one(i, new, old, entry) for i, (new, old) in enumerate(zip(result, grads, strict=True)))


def _checked_one(index: int, new: Any, old: Tensor | None, entry: Entry) -> Tensor | None:
    if new is None and old is not None:
        return torch.zeros_like(old)  # cuts the gradient; a tensor hook cannot say "none"
    if new is None:
        return None
    if not isinstance(new, Tensor):
        raise _misfit(entry, f"entry {index} is a {type(new).__name__}, not a tensor or None")
    if old is None:
        raise _misfit(entry, f"entry {index} got no gradient in this pass, so it cannot be given one")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise _misfit(
            entry,
            f"entry {index} has shape {tuple(new.shape)} and {new.dtype}, the gradient has "
            f"{tuple(old.shape)} and {old.dtype}",
        )
    return new


def _misfit(entry: Entry, what: str) -> HookReturnError:
    attachment = entry.attachment
    return HookReturnError(f"{attachment.kind.value} hook {attachment.name!r} on {entry.name!r}: {what}.")


# -- the end of a backward pass --------------------------------------------------------------------------


class _EndOfBackward:
    """The calls that took part in one backward pass; what has not fired when it ends, fires then."""

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls: list[GradientCall] = []

    def __call__(self) -> None:
        # In the order autograd would have reached them: the last that began comes first.
        late = [call for call in self.calls if not call.done]
        for call in sorted(late, key=lambda call: call.order, reverse=True):
            call.fire_post()


# The engine holds the values, so a pass that raises leaves nothing here.
_ENDS: Final[weakref.WeakValueDictionary[int, _EndOfBackward]] = weakref.WeakValueDictionary()


def _at_end_of(task: int) -> list[GradientCall]:
    end = _ENDS.get(task)
    if end is None:
        end = _ENDS[task] = _EndOfBackward()
        _torch.queue_end_of_backward(end)
    return end.calls
