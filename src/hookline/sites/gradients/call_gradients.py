"""Watch or edit the gradients of a module's inputs and outputs, without disturbing anything else.

The slots of a module and the hooks of a function make a `GradientCall` for each call: `enter` before it, `leave` after
it. `BackwardCall` fires the hooks in the backward pass.

Three facts of autograd carry this file. It runs ready nodes in falling order of their sequence number, and accumulates
into leaves at once. So when the producer of an input runs, everything the module made has run and its parameters have
their gradients. A tensor hook fires when that tensor's gradient is complete, for the version of the tensor it was put
on. And contributions to a tensor are summed in the order in which its users run, so an extra node that gathers some of
them first may change the rounding of that sum.

*Outputs* are tapped: one tensor hook on each. An in-place operation takes a view out of the graph, so of an output that
is a plain reshape (a Linear's, say) the tensor behind it is tapped. Where a tap would report too much or too little (an
output that is used inside the module as well, another kind of view, several outputs whose gradients may be edited
together), the output passes a node of ours, the `_Gate`. The last users of the tensor come to it, which autograd adds
up first anyway, so nothing is rounded otherwise (unless somebody holds the tensor from before the gate:
docs/sources.md).

*Inputs, watched* (no hook can return a value): the nodes through which the module reaches each input are found by
walking its part of the graph, and hooks on them collect what they send; the input's producer gives the signal to fire.
Nothing is added to the graph, so the run is the same to the last bit. (Layers of torch's own that read their one input
once, such as Linear, take an alias in: that is cheaper, and one term regroups no sum.)

*Inputs, edited*: each goes in as an alias whose tensor hook sees, and may replace, this module's own share. Several
inputs get two aliases each: the ones made later run first and collect, the ones made earlier run after all of them,
fire, and let the result through. Where one tensor is used twice or more inside the module and again after it, the sum
is formed in another order than without the hook (docs/sources.md).

A module that returns its input has no node of its own. Watched, it reports everything that comes to that tensor; only
edited does it get an alias, and with it a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from torch import Tensor

from hookline import tree
from hookline.sites import _torch
from hookline.sites.functions.function_site import FunctionSite
from hookline.sites.gradients.backward_call import BackwardCall, Began, thread
from hookline.sites.gradients.tensor_taps import (
    IndexedTensor,
    Taken,
    accumulator,
    as_arguments,
    behind,
    distinct,
    join,
    names,
    pass_gate,
    tap,
    tensors,
)

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.gradients.tensor_taps import Window

_NO_CUTS: Final[dict[int, Any]] = {}


class CallState(dict[str, Any]):
    """The keyword arguments of one call, with its `GradientCall`, from our pre-hook to our forward hook.

    torch hands the same object to both, so no stack is needed, and a forward that raises leaves nothing behind. The
    graph nodes of the inputs are kept here and not in the call: hooks of those nodes hold the call, and the garbage
    collector cannot see such a cycle.
    """

    call: GradientCall
    edges: _torch.Edges
    """The graph nodes that lead to an input as it went in, with its index in ``grad_input``."""
    aliases = False
    """Whether aliases of the inputs went in."""
    watches = False
    """Whether the gradients of the inputs were to be watched when the call began."""
    taken: tuple[Taken, ...] = ()
    """Inputs that could be changed in place unnoticed, or be leaves, as they went in."""
    swapped: tuple[tree.Swapped, ...] = ()
    """Where an alias stands in a list or dict of the caller's."""
    given: frozenset[int] = frozenset()
    """The ids of all inputs, where there are several."""

    def changed(self) -> list[Taken]:
        """Return the inputs that were changed in place.

        A change of a tensor shows in its views too. So a view is left out whose base is an input as well, and so is the
        second of two views of one tensor (``x[0] = y``).
        """
        found: dict[int, Taken] = {}
        for taken in self.taken:
            base = taken.tensor._base
            if taken.tensor._version != taken.version and id(base) not in self.given:
                found.setdefault(id(taken) if base is None else id(base), taken)
        return list(found.values())

    def was_taken(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is one of the noted inputs."""
        return any(taken.tensor is tensor for taken in self.taken)

    def index_of(self, tensor: Tensor) -> int:
        """Return the index of the input that ``tensor`` is, as it went in; -1 for none."""
        if tensor.grad_fn is None:
            return next((taken.index for taken in self.taken if taken.tensor is tensor), -1)
        outputs = self.edges.get(tensor.grad_fn)
        return -1 if outputs is None else outputs.get(tensor.output_nr, -1)


class CallStateArgs(tuple[Any, ...]):
    """Positional arguments with a `CallState`, for a call whose keyword arguments cannot be exchanged.

    Where torch puts its own backward hooks around the call, it makes another tuple of this type, item by item; that one
    takes the state over.
    """

    state: CallState | None = None

    def __new__(cls, *items: Any) -> Self:
        new = super().__new__(cls, items)
        before = _torch.variable_of_caller("args", 1)
        if isinstance(before, CallStateArgs):
            new.state = before.state
        return new


class GradientCall(BackwardCall):
    """One call of a module or function whose gradients are watched.

    The common case (one tensor in, one out, watched) has a path of its own in `enter` and `leave`.
    """

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], CallState]:
        """Remember the inputs; return the arguments for the module to go on with."""
        hooks = self._hooks
        state = CallState(kwargs)
        state.call = self
        state.watches = hooks.watches_inputs
        if len(args) == 1 and not kwargs and not hooks.edits_gradients:
            only = args[0]
            if isinstance(only, Tensor):
                node = only.grad_fn
                if node is None and not only.requires_grad:
                    state.edges = {}
                    return args, state
                if hooks.uses_input_once and hooks.watches_inputs and node is not None and not only.is_nested:
                    # An alias in the place of the one user is the cheapest tap, and regroups no sum.
                    state.edges = {}
                    alias = only.view_as(only)
                    _torch.hook_tensor(alias, self._take_input)
                    return (alias,), state
                if node is not None:
                    state.edges = {node: {only.output_nr: 0}}
                    if only._base is not None:
                        only, shape = behind(only)
                        node = only.grad_fn
                        state.taken = (Taken(0, args[0], only, shape),)
                    if hooks.watches_inputs:
                        tap(only, node).add_input(self, 0)
                    return args, state
        return self._enter_any(args, kwargs, state)

    def _enter_any(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: CallState
    ) -> tuple[tuple[Any, ...], CallState]:
        hooks = self._hooks
        found = tensors(args, kwargs)
        members = distinct(found)
        state.given = frozenset(id(tensor) for _, tensor in members)
        self._num_inputs = len(found)
        if hooks.tells_sites:
            self._input_names = names(args, kwargs)
        edges: _torch.Edges = {}
        state.edges = edges
        for index, tensor in members:
            node = tensor.grad_fn
            source, shape = behind(tensor)
            if node is None or tensor._base is not None or hooks.edits_gradients:
                state.taken += (Taken(index, tensor, source, shape, aliased=hooks.edits_gradients),)
            if node is None:
                node = accumulator(tensor)
            elif hooks.watches_inputs:
                tap(source, source.grad_fn).add_input(self, index)
            if node is not None and not hooks.edits_gradients:
                edges.setdefault(node, {})[tensor.output_nr] = index
        if hooks.edits_gradients and members:
            return self._enter_aliases(members, args, kwargs, state), state
        return args, state

    def _enter_aliases(
        self, members: list[IndexedTensor], args: tuple[Any, ...], kwargs: dict[str, Any], state: CallState
    ) -> tuple[Any, ...]:
        """Replace the inputs by aliases; return the arguments with these."""
        self._edits_inputs = state.aliases = True
        aliases = join(members, self._collect_input, self._release_input)
        for index, tensor in members:
            alias = aliases.get(id(tensor), tensor)
            if alias.grad_fn is not None:
                state.edges.setdefault(alias.grad_fn, {})[alias.output_nr] = index
        swapped: list[tree.Swapped] = []
        new_args: tuple[Any, ...] = tree.replace(args, _swap(aliases), swapped)
        state.update(tree.replace(kwargs, _swap(aliases), swapped))
        state.swapped = tuple(swapped)
        return new_args

    def enter_late(self, began: Began | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallState:
        """Return the state of a call that is over, and has none.

        Its hooks observe outputs alone, and a tap was not enough; or its inputs are lost, since a pre-hook behind ours
        has made new keyword arguments.
        """
        if began is None or began[0] != thread() or not self._hooks.observes_outputs:
            return self.enter((), {})[1]
        _, self.order, self._first_node = began
        state = self.enter(args, dict(kwargs))[1]
        # An input that was changed in place has a node of this call by now.
        changed = [node for node in state.edges if _torch.made_since(node, self._first_node)]
        for node in changed:
            del state.edges[node]
        return state

    # -- after the forward -------------------------------------------------------------------------------

    def leave(self, output: Any, state: CallState) -> Any:
        """Watch the outputs; return the output to go on with."""
        if isinstance(output, Tensor) and not state.aliases and self._leave_one(output, state):
            return output
        return self._leave_any(output, state)

    def _leave_one(self, output: Tensor, state: CallState) -> bool:
        """Watch one output that was made here, of unchanged inputs; return whether this was such a case."""
        node = output.grad_fn
        if node is None or node in state.edges:
            return node is None and not output.requires_grad
        source, shape = output, None
        if output._base is not None:
            source, shape = behind(output)
            if shape is None or not _torch.made_since(source.grad_fn, self._first_node):
                return False
        elif not _torch.made_since(node, self._first_node):
            return False
        for taken in state.taken:
            if taken.tensor._version != taken.version:
                return False
        tap(source, source.grad_fn).append((self, 0, shape))
        if state.edges and self._hooks.watches_inputs:
            for boundary, hits in _torch.boundary([node], state.edges, self._first_node):
                boundary.register_hook(self._collector(hits))
        return True

    def _leave_any(self, output: Any, state: CallState) -> Any:
        tree.swap_back(state.swapped)
        args, kwargs = as_arguments(output)
        found = tensors(args, kwargs)
        members = distinct(found)
        if len(members) > 1:
            # An input handed back beside other outputs is not of this module's making, and is left alone.
            members = [member for member in members if state.index_of(member[1]) < 0] or members
        if not members:
            return output
        self._num_outputs = len(found)
        if self._hooks.tells_sites:
            self._output_names = names(args, kwargs)
        # The gradients of inputs that are reshapes come in the shape of the tensor behind them.
        shapes = {taken.index: taken.shape for taken in state.taken if taken.shape is not None}
        self._shapes = shapes or None
        if self._hooks.watches_inputs:
            for taken in state.changed():
                self._follow(taken, state)
        inside = self._watch(members, state)
        if len(members) > 1 and (self._hooks.edits_outputs or state.index_of(members[0][1]) >= 0):
            passed = pass_gate(self, members)
        else:
            passed = self._tap_outputs(members, state, inside)
        return tree.replace(output, _swap(passed)) if passed else output

    def _follow(self, taken: Taken, state: CallState) -> None:
        """Find the gradient of an input as it was before the module changed it in place."""
        if state.aliases:
            self._lost_aliases |= {taken.index}
            if taken.node is not None:
                self._followed |= {taken.index}
        if taken.node is not None:
            state.edges.setdefault(taken.node, {})[taken.output] = taken.index
        if taken.window is not None:
            self._windows = {**(self._windows or {}), taken.index: taken.window}
            taken.node.register_prehook(self._hook_behind_window(taken.index, taken.output))

    def _watch(self, members: list[IndexedTensor], state: CallState) -> set[int]:
        """Hook the nodes of this call that lead straight to a watched input.

        Return the indices of the outputs that are used inside the call as well.
        """
        edges = state.edges if self._hooks.watches_inputs else {}
        if state.aliases:  # these tell by themselves, but for those that are out of the graph
            lost = {taken.node for taken in state.taken if taken.index in self._lost_aliases}
            edges = {node: outputs for node, outputs in edges.items() if node in lost}
        if len(members) > 1:
            edges = {node: dict(outputs) for node, outputs in edges.items()}
            for index, tensor in members:
                edges.setdefault(tensor.grad_fn, {}).setdefault(tensor.output_nr, ~index)
        roots = [tensor.grad_fn for _, tensor in members if _torch.made_since(tensor.grad_fn, self._first_node)]
        followed = [taken for taken in state.taken if taken.index in (self._windows or {})]
        windows = {(taken.node, taken.output): taken.window for taken in followed}
        inside: set[int] = set()
        for node, hits in _torch.boundary(roots, edges, self._first_node):
            inside.update(~number for _, number in hits if number < 0)
            inputs = [hit for hit in hits if hit[1] >= 0]
            if inputs:
                cuts = {slot: windows.get(node.next_functions[slot]) for slot, _ in inputs} if windows else {}
                node.register_hook(self._collector(inputs, cuts))
        return inside

    def _tap_outputs(self, members: list[IndexedTensor], state: CallState, inside: set[int]) -> dict[int, Tensor]:
        """Hook each output; return the tensors that have to go out in place of outputs, by id."""
        passed: dict[int, Tensor] = {}
        gated: list[IndexedTensor] = []
        nodes: list[tuple[int, int]] = []
        for index, tensor in members:
            place = state.index_of(tensor)
            source, shape = tensor, None
            if tensor.grad_fn is None or (place >= 0 and state.aliases):
                source = tensor.view_as(tensor)
                if source.grad_fn is None:  # a parameter that a transform of torch.func was not told of
                    continue
                passed[id(tensor)] = source
                if place >= 0:
                    self._back = place, index
                    self._lost_aliases |= {place}
                    if not state.aliases:  # a leaf handed back: the alias leads straight to the input
                        node: Any = source.grad_fn
                        node.register_hook(self._collector([(0, place)]))
            elif place >= 0:
                self._back = place, index
                if not state.watches:
                    tap(tensor, tensor.grad_fn).add_input(self, place)
                return passed
            elif type(self._module) is FunctionSite and state.was_taken(tensor):
                pass  # changed in place: its caller goes on with the tensor itself, whatever comes back from here
            elif index in inside:
                gated.append((index, tensor))
                continue
            elif tensor._base is not None and _torch.made_since(tensor._base.grad_fn, self._first_node):
                source, shape = behind(tensor)
                if shape is None:
                    gated.append((index, tensor))
                    continue
            tap(source, source.grad_fn).append((self, index, shape))
            if len(members) > 1:
                nodes.append((_torch.sequence_number_of(source.grad_fn), index))
        if gated:
            passed.update(pass_gate(self, gated))
        if nodes:
            # Autograd comes last to the node that was made first; then all gradients there will be have come.
            last = min(nodes)[0]
            self._last_outputs = frozenset(index for number, index in nodes if number == last)
        return passed

    def _collector(
        self, hits: list[tuple[int, int]], cuts: dict[int, Window | None] = _NO_CUTS
    ) -> Callable[[Grads, Grads], None]:
        """Return a hook that collects what a node sends; ``cuts`` has the windows of views, by slot."""

        if len(hits) == 1 and not cuts:  # most nodes
            ((only_slot, only_index),) = hits

            def collect_one(grad_inputs: Grads, grad_outputs: Grads) -> None:
                self._collect_input(only_index, grad_inputs[only_slot])

            return collect_one

        def collect(grad_inputs: Grads, grad_outputs: Grads) -> None:
            for slot, index in hits:
                grad, window = grad_inputs[slot], cuts.get(slot)
                self._collect_input(index, grad if grad is None or window is None else window.cut(grad))

        return collect


def _swap(aliases: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: aliases.get(id(tensor), tensor)
