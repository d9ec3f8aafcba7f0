"""Watch or edit the gradients of a module's inputs and outputs, without disturbing anything else.

The slots of a module (``module_hooks``) and `FunctionHooks` make a `GradientCall` for each call: `enter` before it,
`leave` after it. Its base `BackwardCall` fires the hooks in the backward pass.

The third user is ``compiled_gradients._TracedCall``, a subclass that runs `enter` and `leave` on fake tensors, with
``module=None``, while the compiler traces. So nothing here may read a value of a tensor, or need a module. Its hooks
know only what the text of `plan_of` says: add every attribute of `GradientHooks` that you read here to `plan_of` and to
``_TracedHooks``, or compiled code takes the default of the class, without an error.

``_torch._WIRING`` lists this module by name, so that the torch functions called here fire no hooks on functions: call
them for the gradients only here and in ``backward_call``.

Three facts of autograd carry this file. It runs ready nodes in falling order of their sequence number, and accumulates
into leaves at once. So when the producer of an input runs, everything the module made has run and its parameters have
their gradients. A tensor hook fires when that tensor's gradient is complete, for the version of the tensor it was put
on. And contributions to a tensor are summed in the order in which its users run, so an extra node that gathers some of
them first may change the rounding of that sum.

*Outputs* are tapped: one tensor hook on each. An in-place operation takes a view out of the graph, so of an output that
is a plain reshape (a Linear's, say) the tensor behind it is tapped. Where a tap would report too much or too little (an
output that is used inside the module as well, another kind of view, several outputs whose gradients may be edited
together), the outputs pass a node of ours, the gate. It gets the sum of what the users behind it send, which autograd
adds up first anyway, so nothing is rounded otherwise (unless somebody holds the tensor from before the gate:
docs/sources.md).

*Inputs, watched* (no hook can return a value): the nodes through which the module reaches each input are found by
walking its part of the graph, and hooks on them collect what they send; the input's producer gives the signal to fire.
Nothing is added to the graph, so the run is the same to the last bit. (Layers of torch's own that read their one input
once, such as Linear, take an alias in: that is cheaper, and one term regroups no sum.)

*Inputs, edited*: all pass a gate on their way in. It is reached when everything inside has run, sees this module's own
share of each gradient, and lets through what the hooks return. Where one tensor is used twice or more inside the module
and again after it, the sum is formed in another order than without the hook (docs/sources.md).

A module that returns its input has no node of its own. Watched, it reports everything that comes to that tensor; only
behind a gate does it have a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline import tree
from hookline.errors import UnhookableError
from hookline.sites import _torch
from hookline.sites.gradients.backward_call import (
    BackwardCall,
    Began,
    IndexedTensor,
    Tap,
    ViewInput,
    accumulator,
    as_arguments,
    behind,
    distinct,
    gradient_places,
    pass_gate,
    takes_views,
    tap,
    thread,
)
from hookline.sites.hook_at_site import FunctionSite

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.gradients.backward_call import ViewPart


class CallState(dict[str, Any]):
    """The keyword arguments of one call, with its `GradientCall`, from our pre-hook to our forward hook.

    torch hands the same object to both, so no stack is needed, and a forward that raises leaves nothing behind. The
    graph nodes of the inputs are kept here and not in the call: hooks of those nodes hold the call, and the garbage
    collector cannot see such a cycle.
    """

    call: GradientCall
    edges: _torch.Edges
    """The graph nodes that the gradients of the inputs go to: by node and number of its output, the input's index."""
    leaves: tuple[IndexedTensor, ...] = ()
    """The inputs that are leaves."""
    views: tuple[ViewInput, ...] = ()
    """The inputs that are views of a computed tensor, as they went in."""
    gated = False
    """Whether the inputs passed a gate."""
    watches = False
    """Whether the gradients of the inputs were to be watched when the call began."""
    swapped: tuple[tree.Swapped, ...] = ()
    """Where a tensor from behind the gate stands in a list or dict of the caller's."""

    def index_of(self, tensor: Tensor) -> int:
        """Return the index of the input that ``tensor`` is, as it went in; -1 for none."""
        if tensor.grad_fn is None:
            return next((index for index, leaf in self.leaves if leaf is tensor), -1)
        return self.edges.get(tensor.grad_fn, {}).get(tensor.output_nr, -1)


class GradientCall(BackwardCall):
    """One call of a module or function whose gradients are watched.

    The common case (one tensor in, one out, watched) has a path of its own in `enter` and `leave`.
    """

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], CallState]:
        """Remember the inputs; return the arguments for the module to go on with."""
        hooks = self._hooks
        state = CallState(kwargs)
        state.call = self
        state.edges = {}
        state.watches = hooks.watches_inputs
        if len(args) == 1 and not kwargs and not hooks.edits_gradients:
            only = args[0]
            node = only.grad_fn if isinstance(only, Tensor) else None
            if node is not None:
                if hooks.uses_input_once and state.watches and not only.is_nested:
                    # An alias in the place of the one user is the cheapest tap, and regroups no sum.
                    self._takes_alias = True
                    alias = only.view_as(only)
                    tap(alias, alias.grad_fn).add_input(self, 0)
                    return (alias,), state
                self._watch_input(0, only, state)
                return args, state
            if isinstance(only, Tensor) and not only.requires_grad:
                return args, state
        return self._enter_any(args, kwargs, state)

    def _enter_any(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: CallState
    ) -> tuple[tuple[Any, ...], CallState]:
        hooks = self._hooks
        found = gradient_places(args, kwargs)
        self._num_inputs = len(found)
        if hooks.told:
            self._input_names = tuple([name for name, _ in found])
        members = distinct(found)
        gated = [member for member in members if takes_views(member[1])] if hooks.edits_gradients else []
        if gated:
            return self._enter_gate(gated, args, state), state
        for index, tensor in members:
            if tensor.grad_fn is not None:
                self._watch_input(index, tensor, state)
                continue
            state.leaves += ((index, tensor),)
            node = accumulator(tensor)
            if node is not None:
                state.edges[node] = {0: index}
        return args, state

    def _watch_input(self, index: int, tensor: Tensor, state: CallState) -> None:
        """Note one computed input; have its producer tell when it runs next."""
        state.edges.setdefault(tensor.grad_fn, {})[tensor.output_nr] = index
        source, shape, base = tensor, None, tensor._base
        if base is not None and base.grad_fn is not None:
            state.views += (ViewInput.of(index, tensor, base),)
            if Tap not in (tensor._backward_hooks or ()):  # a tensor with a tap, from the gate of a call around this
                source, shape = behind(tensor)
        if state.watches:
            tap(source, source.grad_fn).add_input(self, index, shape)

    def _enter_gate(self, members: list[IndexedTensor], args: tuple[Any, ...], state: CallState) -> tuple[Any, ...]:
        """Let the inputs pass a gate; return the arguments as they come out of it."""
        self._check_editable()
        state.gated = True
        passed = pass_gate(self.take_inputs, members, views=True)
        for index, tensor in members:
            twin = passed[id(tensor)]
            if twin.grad_fn is None:  # a transform of torch.func that differentiates forward
                continue
            state.edges.setdefault(twin.grad_fn, {})[twin.output_nr] = index
            # Empty, for calls inside, which otherwise would tap the tensor behind the twin, and fire too late.
            tap(twin, twin.grad_fn)
        swapped: list[tree.Swapped] = []
        new_args: tuple[Any, ...] = tree.replace(args, _swap(passed), swapped)
        state.update(tree.replace(dict(state), _swap(passed), swapped))
        state.swapped = tuple(swapped)
        return new_args

    def _check_editable(self) -> None:
        """Raise for a module or function that changes its input in place, if its name or ``inplace`` says so.

        Torch allows no in-place change of what comes out of a gate.
        """
        module: Any = self._module
        if type(module) is FunctionSite:
            name, in_place = module.name, module.name.endswith("_") and not module.name.endswith("__")
        else:
            name, in_place = type(module).__name__, getattr(module, "inplace", False) is True
        if in_place:
            hook = next(entry for entry in self._hooks.backward if entry.attachment.may_edit)
            raise UnhookableError(
                f"backward hook {hook.attachment.name!r} on {hook.name!r} may return other gradients, but {name} "
                "changes its input in place, where none can be exchanged; attach with observe=True, or use the one "
                "that writes elsewhere (inplace=False)."
            )

    def enter_afterwards(self, began: Began | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallState:
        """Return the state of a call whose forward is over, and for which `enter` was not called before it.

        The last forward slot (``module_hooks``) calls this where hooks observe outputs alone, and `tap_output` was not
        enough; then ``began`` says how the call began. It also does where the state is lost, since a pre-hook behind
        ours has made new keyword arguments: then no inputs are known.
        """
        if began is None or began[0] != thread() or not self._hooks.observes_outputs:
            return self.enter((), {})[1]
        _, self.order, self._first_node = began
        state = self.enter(args, dict(kwargs))[1]
        # An input that was changed in place has a node of this call by now.
        for node in [node for node in state.edges if _torch.made_since(node, self._first_node)]:
            del state.edges[node]
        return state

    # -- after the forward -------------------------------------------------------------------------------

    def leave(self, output: Any, state: CallState) -> Any:
        """Watch the outputs; return the output to go on with."""
        tree.swap_back(state.swapped)  # into the caller's containers
        if isinstance(output, Tensor) and self._leave_one(output, state):
            return output
        return self._leave_any(output, state)

    def _leave_one(self, output: Tensor, state: CallState) -> bool:
        """Watch the one output, in the common case: it was made in this call, and no input was changed in place.

        Return whether nothing is left to do: the output is watched, or has no gradient. Otherwise `_leave_any` does it.
        """
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
        if any(view.is_changed() for view in state.views):
            return False
        tap(source, source.grad_fn).append((self, 0, shape))
        if state.edges and self._hooks.watches_inputs and not state.gated:
            for boundary, hits in _torch.boundary([node], state.edges, self._first_node):
                boundary.register_hook(self._collector(hits, {}))
        return True

    def _leave_any(self, output: Any, state: CallState) -> Any:
        found = gradient_places(*as_arguments(output))
        members = distinct(found)
        if len(members) > 1:
            # An input handed back beside other outputs is not of this module's making, and is left alone.
            members = [member for member in members if state.index_of(member[1]) < 0] or members
        if not members:
            return output
        self._num_outputs = len(found)
        if self._hooks.told:
            self._output_names = tuple([name for name, _ in found])
        inside = self._watch_inside(members, state)
        if len(members) > 1 and (self._hooks.edits_outputs or state.index_of(members[0][1]) >= 0):
            passed = pass_gate(self.take_outputs, members, views=False)
        else:
            passed = self._tap_outputs(members, state, inside)
        return tree.replace(output, _swap(passed)) if passed else output

    def _watch_inside(self, members: list[IndexedTensor], state: CallState) -> set[int]:
        """Hook the nodes of this call that lead straight to a watched input.

        Return the indices of the outputs that are used inside the call as well. ``edges`` give `_torch.boundary` one
        number for each place: for an input its index, for a changed view a number of ``parts`` (both 0 or more), and
        for an output ``~index``, which is negative.
        """
        edges: _torch.Edges = {}
        parts: dict[int, ViewPart] = {}
        if self._hooks.watches_inputs and not state.gated:
            edges = {node: dict(outputs) for node, outputs in state.edges.items()}
            parts = self._follow_views(state, edges)
        if len(members) > 1:
            for index, tensor in members:
                edges.setdefault(tensor.grad_fn, {}).setdefault(tensor.output_nr, ~index)
        roots = [tensor.grad_fn for _, tensor in members if _torch.made_since(tensor.grad_fn, self._first_node)]
        inside: set[int] = set()
        for node, hits in _torch.boundary(roots, edges, self._first_node):
            inside.update(~number for _, number in hits if number < 0)
            inputs = [hit for hit in hits if hit[1] >= 0]
            if inputs:
                node.register_hook(self._collector(inputs, parts))
        return inside

    def _follow_views(self, state: CallState, edges: _torch.Edges) -> dict[int, ViewPart]:
        """Add the bases of views that the call has changed in place to ``edges``, under numbers of their own.

        Return the part that each number stands for. Where several inputs share a base (one node and output number),
        only the first is followed.
        """
        parts: dict[int, ViewPart] = {}
        for view in state.views:
            outputs = edges.setdefault(view.node, {})
            if view.is_changed() and view.output not in outputs:
                number = outputs[view.output] = self._num_inputs + view.part.place
                parts[number] = view.part
                view.node.register_prehook(self._reach_view)
        return parts

    def _reach_view(self, grads: Grads) -> None:
        """Fire ``backward``, since the node that made the base of an input runs next."""
        if self._task == _torch.graph_task_id():
            self.fire_post()

    def _tap_outputs(self, members: list[IndexedTensor], state: CallState, inside: set[int]) -> dict[int, Tensor]:
        """Hook each output; return the tensors that have to go out in place of outputs, by id."""
        passed: dict[int, Tensor] = {}
        gated: list[IndexedTensor] = []
        nodes: list[tuple[int, int]] = []
        for index, tensor in members:
            place = state.index_of(tensor)
            source, shape = tensor, None
            if tensor.grad_fn is None:
                source = tensor.view_as(tensor)
                if source.grad_fn is None:  # a parameter that a transform of torch.func was not told of
                    continue
                passed[id(tensor)] = source
                if place >= 0:  # a leaf handed back: the alias leads straight to the input
                    node: Any = source.grad_fn
                    node.register_hook(self._collector([(0, place)], {}))
            elif place >= 0 and not state.gated:
                self._returned = place, index
                if not state.watches:
                    tap(tensor, tensor.grad_fn).add_input(self, place)
                return passed
            elif type(self._module) is FunctionSite and any(view.tensor is tensor for view in state.views):
                pass  # changed in place: the caller goes on using the tensor itself, so a twin would not reach it
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
            passed.update(pass_gate(self.take_outputs, gated, views=False))
        if nodes:
            # Autograd comes last to the node that was made first; then all gradients there will be have come.
            last = min(nodes)[0]
            self._last_outputs = frozenset(index for number, index in nodes if number == last)
        return passed

    def _collector(self, hits: list[tuple[int, int]], parts: dict[int, ViewPart]) -> Callable[[Grads, Grads], None]:
        """Return a hook of a node that collects what the node sends to the inputs.

        Each of ``hits`` is a slot of the gradients that it sends, and the index of an input or a number of ``parts``.
        """

        def collect(grad_inputs: Grads, grad_outputs: Grads) -> None:
            for slot, number in hits:
                grad, part = grad_inputs[slot], parts.get(number)
                if part is None or grad is None:
                    self.collect_input(number, grad)
                else:
                    self.collect_input(part.place, part.cut(grad))

        return collect


def _swap(passed: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that gives the twin of a tensor, by its id, and a tensor without one itself."""
    return lambda tensor: passed.get(id(tensor), tensor)
