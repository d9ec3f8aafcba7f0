"""Gradients of a module's inputs and outputs, seen or edited, without disturbing anything else.

Takes a module's call from the torch_hooks (`GradientCall.enter` before it, `leave` after it), hands gradients to the
``backward_pre`` and ``backward`` hooks of its hooks when autograd comes by.

Three facts of autograd carry this file. It runs ready nodes in falling order of their sequence number, and
accumulates into leaves at once; so when the producer of an input has its turn, everything the module made
has run and its parameters have their gradients. A tensor hook fires when that tensor's gradient is complete,
for the version of the tensor it was put on. And contributions to a tensor are summed in the order in which
its users run, so an extra node that gathers some of them first may change the rounding of that sum.

*Outputs* are tapped: one tensor hook on each. An in-place operation takes a view out of the graph, so of an
output that is a plain reshape (a Linear's, say) the tensor behind it is tapped. Where a tap would tell too
much or too little (an output that is used inside the module as well, another kind of view, several outputs
whose gradients may be edited together), the output passes a node of ours, the `_Gate`. What comes to it are
the last users of the tensor, which autograd adds up first anyway, so nothing is rounded otherwise (unless
somebody holds the tensor from before the gate: docs/sources.md).

*Inputs, watched* (no hook can return a value): the nodes through which the module reaches each input are found
by walking its part of the graph, and hooks on them collect what they send; the input's producer gives the
signal to fire. Nothing is added to the graph, so the run is the same to the last bit. (Layers of torch's own that
read their one input once, such as Linear, take an alias in: that is cheaper, and one term regroups no sum.)

*Inputs, edited*: each goes in as an alias whose tensor hook sees, and may replace, this module's own share.
Several inputs get two aliases each: the ones made later run first and collect, the ones made earlier run after
all of them, fire, and let the result through. Where one tensor is used twice or more inside the module and
again after it, the sum is formed in another order than without the hook (docs/sources.md).

A module that hands its input back has no node of its own. Watched, it reports what comes to that tensor, from
whomever; only edited does it get an alias, and with it a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.sites import _torch, tree
from hookline.sites.functions.function_site import FunctionSite
from hookline.sites.gradients.call_inputs import CallState, Taken
from hookline.sites.gradients.gradient_names import Place, as_arguments, checked, distinct, names, tensors
from hookline.sites.gradients.tensor_taps import accumulator, at_end_of, behind, join, pass_gate, tap
from hookline.sites.hook_at_site import OrderGroup, next_order
from hookline.sites.modules.call_context import open_contexts
from hookline.sites.site import Site

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.gradients.call_inputs import Window
    from hookline.sites.gradients.gradient_hooks import GradientHooks
    from hookline.sites.hook_at_site import HookAtSite

__all__ = ["GradientCall"]

_EDIT: Final = OrderGroup.EDIT  # looking an enum member up by its class costs 0.2 µs
_NONE: Final[frozenset[int]] = frozenset()
_NO_CUTS: Final[dict[int, Any]] = {}


class GradientCall:
    """One call of a module, as its graph remembers it.

    One is made for every call of every module that has gradient hooks, so what a call rarely needs is a
    default of the class, and the common case (one tensor in, one out, watched) has a way of its own.
    """

    functions_too = False
    """Whether gradients of functions are watched in this process, and not of modules alone."""
    _edits_inputs = False
    """Whether aliases of the inputs went in."""
    _back = (-1, -1)
    """The places of an input and of the output which are the same tensor."""
    _lost_aliases = _NONE
    """Places of inputs whose alias an in-place operation may have taken out of the graph."""
    _followed = _NONE
    """Those of them that were changed in place, and whose gradient may come by the alias and past it."""
    _last_outputs: frozenset[int] | None = None
    """With several outputs: those whose gradients come last."""
    _shapes: dict[int, torch.Size] | None = None
    """Of inputs that are reshapes: their gradients may come in the shape of the tensor behind them."""
    _num_inputs = 1
    _num_outputs = 1
    _input_names: tuple[str, ...] = ("0",)
    _output_names: tuple[str, ...] = ("",)
    _grad_outputs: list[Tensor | None]
    _grad_inputs: list[Tensor | None]
    _windows: dict[int, Window] | None = None
    """Of inputs that are other views, and were changed in place: where they are in the tensor behind them."""
    _began: Any = None
    """The clock's mark when the first gradient of several outputs came."""
    _ended: Any = None
    """The clock's mark when the last gradient went to an input."""
    _shares: Grads = ()
    """What came for each input before it was edited."""
    _scopes: frozenset[int] = frozenset()
    """The scopes that were open where the call was made."""
    _task = -1
    """The backward pass that came by last."""
    done = True
    """Whether there is nothing more to fire in it."""
    _before_torch = -1
    """The last backward pass in which ``backward_pre`` came before torch's own hooks of the module."""

    def __init__(self, hooks: GradientHooks, module: Any) -> None:
        self._hooks = hooks
        self._module = module
        self._first_node = _torch.sequence_number()
        self.order = next_order()
        """When the call began, on the clock of ``entry.next_order``."""
        if hooks.tells_sites:
            self._moments = hooks.gradient_moments()
        if hooks.tells_scopes:  # autograd may come by in a thread of its own
            self._scopes = open_contexts()

    # -- before the forward ------------------------------------------------------------------------------

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], CallState]:
        """Remember the inputs; the arguments for the module to go on with."""
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
                        tap(only, node).inputs.append((self, 0))
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
                tap(source, source.grad_fn).inputs.append((self, index))
            if node is not None and not hooks.edits_gradients:
                edges.setdefault(node, {})[tensor.output_nr] = index
        if hooks.edits_gradients and members:
            return self._enter_aliases(members, args, kwargs, state), state
        return args, state

    def _enter_aliases(
        self, members: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any], state: CallState
    ) -> tuple[Any, ...]:
        """Have aliases of the inputs go in."""
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

    # -- after the forward -------------------------------------------------------------------------------

    def leave(self, output: Any, state: CallState) -> Any:
        """Watch the outputs; the output to go on with."""
        if isinstance(output, Tensor) and not state.aliases and self._leave_one(output, state):
            return output
        return self._leave_any(output, state)

    def _leave_one(self, output: Tensor, state: CallState) -> bool:
        """The common case: one output, made here, of inputs that were not changed; whether it is one."""
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
        tap(source, source.grad_fn).outputs.append((self, 0, shape))
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
            members = [member for member in members if state.place_of(member[1]) < 0] or members
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
        if len(members) > 1 and (self._hooks.edits_outputs or state.place_of(members[0][1]) >= 0):
            passed = pass_gate(self, members)
        else:
            passed = self._tap_outputs(members, state, inside)
        return tree.replace(output, _swap(passed)) if passed else output

    def _follow(self, taken: Taken, state: CallState) -> None:
        """The module has changed an input in place: find the gradient of what that was before."""
        if state.aliases:
            self._lost_aliases |= {taken.index}
            if taken.node is not None:
                self._followed |= {taken.index}
        if taken.node is not None:
            state.edges.setdefault(taken.node, {})[taken.output] = taken.index
        if taken.window is not None:
            self._windows = {**(self._windows or {}), taken.index: taken.window}
            taken.node.register_prehook(self._turn_behind_window(taken.index, taken.output))

    def _watch(self, members: list[Place], state: CallState) -> set[int]:
        """Hook the nodes of this call that lead straight to a watched input; which outputs are used inside as well."""
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

    def _tap_outputs(self, members: list[Place], state: CallState, inside: set[int]) -> dict[int, Tensor]:
        """Hook each output where its own gradient is to be had; what has to go out in its place, by id."""
        passed: dict[int, Tensor] = {}
        gated: list[Place] = []
        nodes: list[tuple[int, int]] = []
        for index, tensor in members:
            place = state.place_of(tensor)
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
                    tap(tensor, tensor.grad_fn).inputs.append((self, place))
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
            tap(source, source.grad_fn).outputs.append((self, index, shape))
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
        """Collects what a node sends; ``cuts`` tells where that is for the tensor behind a view of it."""

        def collect(grad_inputs: Grads, grad_outputs: Grads) -> None:
            for slot, index in hits:
                grad, window = grad_inputs[slot], cuts.get(slot)
                self._collect_input(index, grad if grad is None or window is None else window.cut(grad))

        return collect

    # -- in the backward pass, in this order -------------------------------------------------------------

    def take_output(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The gradient of an output has come; the gradient to go on with."""
        task = _torch.graph_task_id()
        if task != self._task and self._num_outputs == 1:  # the common case, in one go
            self._task = task
            # Nothing comes later, so nothing is kept: not the gradient either. (Aliases of inputs, for a hook that has
            # come off since, still have to let gradients through.)
            if not self._hooks.backward and not self._edits_inputs:
                self._pre_done = self.done = True
                self._grad_outputs = [None]
                return self.fire(self._hooks.backward_pre, (grad,), ())[0]
            self._pre_done, self.done = True, False
            self._ended = None
            self._grad_inputs = [None] * self._num_inputs
            at_end_of(task).append(self)
            if self._hooks.backward_pre:
                (grad,) = self.fire(self._hooks.backward_pre, (grad,), ())
            self._grad_outputs = [grad]
            return grad
        self.collect_output(index, grad)
        if self._before_torch == task:
            return grad
        if self._last_outputs is None:
            return self.release_outputs()[index]
        self._awaited -= index in self._last_outputs
        if self._awaited == 0:
            self.release_outputs()
        return grad

    def pass_gate(self, places: list[int], grads: Grads) -> Grads:
        """The gradients of all outputs that pass the gate have come; the gradients to go on with."""
        if self._last_outputs is not None or self._before_torch == self._task:
            return grads  # others are tapped, and come later; then nothing is edited
        outputs = self.release_outputs()
        return tuple(outputs[place] for place in places)

    def collect_output(self, index: int, grad: Tensor | None) -> None:
        """Note the gradient of one output; the first in a backward pass begins it for this call."""
        task = _torch.graph_task_id()
        if task != self._task:
            self._begin(task)
        if not self.done:
            self._grad_outputs[index] = grad

    def _begin(self, task: int) -> None:
        """Begin the backward pass ``task`` for this call."""
        self._task = task
        self._pre_done = self.done = False
        if self._last_outputs is not None:
            self._awaited = len(self._last_outputs)
        if self._hooks.clock is not None:
            self._began, self._ended = self._hooks.clock(), None
        self._grad_outputs = [None] * self._num_outputs
        self._grad_inputs = [None] * self._num_inputs
        at_end_of(task).append(self)

    def begin_before_torch(self) -> tuple[HookAtSite, ...]:
        """Begin the backward pass that is under way, before torch's own hooks; the ``backward_pre`` hooks to run."""
        self._before_torch = _torch.graph_task_id()
        self._begin(self._before_torch)
        self._pre_done = True
        self.done = not self._hooks.backward and not self._edits_inputs  # then no gradient is kept
        return self._hooks.backward_pre

    def release_outputs(self) -> list[Tensor | None]:
        """All gradients of the outputs are there: fire ``backward_pre``; the gradients to go on with."""
        if not self._pre_done:
            self._pre_done = True
            entries = self._hooks.backward_pre
            if entries:
                self._grad_outputs = list(self.fire(entries, tuple(self._grad_outputs), ()))
        return self._grad_outputs

    def _collect_input(self, index: int, grad: Tensor | None) -> None:
        if grad is not None and not self.done and self._task == _torch.graph_task_id():
            if self._shapes is not None and index in self._shapes:
                grad = grad.reshape(self._shapes[index])
            so_far = self._grad_inputs[index]
            self._grad_inputs[index] = grad if so_far is None else so_far + grad
            if self._hooks.clock is not None:
                self._ended = self._hooks.clock()

    def _release_input(self, index: int, grad: Tensor | None) -> Tensor | None:
        if self._task != _torch.graph_task_id():
            return grad  # this backward reached the inputs, but not through the outputs
        self.fire_post()
        if index in self._followed:
            return grad  # the rest comes by another way: the edit is made where both have met
        grad, self._grad_inputs[index] = self._grad_inputs[index], None
        return grad

    def _take_input(self, grad: Tensor) -> None:
        """The gradient of the one input of a layer that uses it once has come, and with it its turn."""
        if not self.done and self._task == _torch.graph_task_id():
            self._grad_inputs[0] = grad
            if self._hooks.clock is not None:
                self._ended = self._hooks.clock()
            self.fire_post()

    def take_turn(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The producer of an input has its turn, so all that this call made has run; the gradient to go on with."""
        running = self._task == _torch.graph_task_id()
        if index == self._back[0] and not (self._edits_inputs and running):
            return self._in_shape(index, grad, self._take_back)
        if running and index in self._lost_aliases and index not in (self._windows or ()):
            return self._in_shape(index, grad, self._take_lost)
        if running and not self.done:
            self.fire_post()
        return grad

    def _take_back(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The input is the output too (and if it had an alias, that is out of the graph)."""
        grad = self.take_output(self._back[1], grad)
        if self._hooks.watches_inputs:
            self._grad_inputs[index] = grad
            grad = self.fire_post()[index]
        return grad

    def _take_lost(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The alias of this input is out of the graph; the edit has to be made on what comes to the tensor itself."""
        if not self.done:
            if self._grad_inputs[index] is None:
                self._grad_inputs[index] = grad
                return self.fire_post()[index]
            self.fire_post()
        new, share = self._grad_inputs[index], self._shares[index]
        if new is share or new is None or share is None or grad is None:
            return grad
        return grad + (new - share)  # others may have used the tensor before it was changed

    def _turn_behind_window(self, index: int, output: int) -> Callable[[Grads], Grads | None]:
        """As `take_turn`, at the producer of the tensor behind a view."""

        def turn(grads: Grads) -> Grads | None:
            if self._task != _torch.graph_task_id():
                return None
            self.fire_post()
            if not self._edits_inputs or self._windows is None:
                return None
            new, share, grad = self._grad_inputs[index], self._shares[index], grads[output]
            if new is share or new is None or share is None or grad is None:
                return None
            return *grads[:output], self._windows[index].add(grad, new - share), *grads[output + 1 :]

        return turn

    def _in_shape(
        self, index: int, grad: Tensor | None, take: Callable[[int, Tensor | None], Tensor | None]
    ) -> Tensor | None:
        """Hand a gradient over in the shape the input had, and take it back in its own."""
        shape = self._shapes.get(index) if self._shapes is not None else None
        if shape is None or grad is None:
            return take(index, grad)
        seen = grad.reshape(shape)
        new = take(index, seen)
        return grad if new is seen or new is None else new.reshape(grad.shape)

    def fire_post(self) -> Grads:
        """Everything this call gets in this backward pass is there, its parameters' gradients included."""
        if self.done:
            return ()
        if not self._pre_done:
            self.release_outputs()
        if GradientCall.functions_too and type(self._module) is not FunctionSite:
            self._fire_functions_inside()
        self.done = True
        outputs, self._grad_outputs = tuple(self._grad_outputs), []
        inputs, self._grad_inputs = tuple(self._grad_inputs), []
        grads = self.fire(self._hooks.backward, inputs, (outputs,))
        if self._edits_inputs:
            self._grad_inputs = list(grads)  # until the aliases have let them through
            self._shares = inputs
        return grads

    def _fire_functions_inside(self) -> None:
        """Functions that take in what the module takes in have their turn with it, or after; they come before it.

        The module may hold the turn itself, by an alias. What the functions wait for is then there as well.
        """
        late: list[GradientCall] = []
        for call in reversed(at_end_of(self._task)):
            if call is self:
                break
            if not call.done and call.order > self.order and type(call._module) is FunctionSite:
                late.append(call)
        for call in sorted(late, key=lambda call: -call.order):
            call.fire_post()

    def fire(self, entries: tuple[HookAtSite, ...], grads: Grads, more: tuple[Grads, ...]) -> Grads:
        """Call those hooks that were on when this call began; the gradients as edited."""
        if (
            type(self._module) is FunctionSite
        ):  # a function's hooks are not taken out of what calls go by, as modules' are
            entries = tuple(entry for entry in entries if not entry.attachment.removed)
        for entry in entries:
            attachment = entry.attachment
            if attachment.order > self.order:
                continue
            if attachment.context is not None and attachment.context not in self._scopes:
                continue
            entry.fired += 1
            entry.last_step = entry.counter.step
            module = self._module
            if type(module) is FunctionSite:
                module = module.seen_from(entry.counter)
            if entry.simple:
                result = entry.hook(module, grads, *more)
            else:
                result = entry.call(module, (grads, *more), self._site(entry))
            if result is not None and attachment.order_group is _EDIT:
                grads = checked(result, grads, entry)
        return grads

    def _site(self, entry: HookAtSite) -> Site | None:
        if not entry.attachment.wants_site:
            return None
        kind = entry.attachment.kind
        fn = self._module
        if isinstance(fn, FunctionSite):
            fn = fn.seen_from(entry.counter)
            owner: Any = fn.owner
            return Site(fn.name, owner, kind, fn.call, fn.step, began=self._began, ended=self._ended)
        step, call = self._moments.get(entry.counter, (-1, 0))
        names = self._input_names, self._output_names
        mode = entry.counter.training_now()
        return Site(entry.name, self._module, kind, call, step, False, *names, self._began, self._ended, mode)


def _swap(aliases: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: aliases.get(id(tensor), tensor)
