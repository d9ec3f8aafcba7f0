"""Gradients of a module's inputs and outputs, seen or edited, without disturbing anything else.

Takes a module's call from the ports (`enter` before it, `leave` after it), hands gradients to the
``backward_pre`` and ``backward`` hooks of its table when autograd comes by.

Three facts of autograd carry this file. It runs ready nodes in falling order of their sequence number, and
accumulates into leaves at once; so when the producer of an input has its turn, everything the module made
has run and its parameters have their gradients. A tensor hook fires when that tensor's gradient is complete.
And contributions to a tensor are summed in the order in which its users run, so an extra node that gathers
some of them first changes the rounding of that sum.

Hence two ways to the gradients of the inputs, chosen per call:

*watched* (no hook can return a value): the nodes through which the module reaches each input are found by
walking its part of the graph, and hooks on them collect what they send; the input's producer gives the
signal to fire. Nothing is added to the graph, so the run is the same to the last bit.

*edited*: each input goes in as an alias (``x.view_as(x)``) whose tensor hook sees, and may replace, this
module's own share. In-place operations stay legal. Where the same tensor is used twice or more inside the
module and again after it, the sum is formed in another order than without the hook (docs/sources.md).

Where several tensors have to be known before one may pass, each gets two aliases: the ones made later run
first and collect, the ones made earlier run after all of them, fire, and let the result through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

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

__all__ = ["Carrier", "GradientCall"]


class Carrier(dict[str, Any]):
    """The keyword arguments of one call, with its `GradientCall` in tow from pre-hook to post-hook.

    torch hands the same object to both, so no stack has to be kept, and none is left behind by a forward
    that raises. The graph nodes of the inputs travel here too and not in the call: the call hangs on hooks of
    those very nodes, and the collector cannot see such a ring.
    """

    __slots__ = ("call", "edges")

    call: GradientCall
    edges: _Edges


class GradientCall:
    """One call of a module, as its graph remembers it."""

    __slots__ = (
        "_done",
        "_first_node",
        "_grad_inputs",
        "_grad_outputs",
        "_input_names",
        "_module",
        "_moments",
        "_order",
        "_output_names",
        "_pre_done",
        "_table",
        "_task",
    )

    def __init__(self, table: Table, module: nn.Module) -> None:
        self._table = table
        self._module = module
        self._order = next_order()
        self._moments = table.gradient_moments()
        self._first_node = _torch.sequence_number()
        self._input_names: list[str] = []
        self._output_names: list[str] = []
        self._task = -1
        self._pre_done = self._done = True
        self._grad_outputs: list[Tensor | None] = []
        self._grad_inputs: list[Tensor | None] = []

    @property
    def order(self) -> int:
        """When the call began, on the clock of ``entry.next_order``."""
        return self._order

    # -- around the forward ------------------------------------------------------------------------------

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Carrier]:
        """Remember the inputs; the arguments for the module to go on with."""
        self._input_names, tensors = _slots(args, kwargs)
        edges: _Edges = {}
        aliased: list[tuple[int, Tensor]] = []
        for index, tensor in _distinct(tensors):
            # A leaf's accumulator runs before the module is through, so it cannot give the signal to fire.
            if tensor.grad_fn is None or self._table.edits_gradients:
                aliased.append((index, tensor))
            else:
                edges[tensor.grad_fn, tensor.output_nr] = index
                _tap(tensor).inputs.append(self)
        if aliased:
            aliases = _join(aliased, self._collect_input, self._release_input)
            edges.update({(alias.grad_fn, alias.output_nr): _ALIASED for alias in aliases.values()})
            args, kwargs = tree.replace(args, _swap(aliases)), tree.replace(kwargs, _swap(aliases))
        carrier = Carrier(kwargs)
        carrier.call, carrier.edges = self, edges
        return args, carrier

    def leave(self, output: Any, edges: _Edges) -> Any:
        """Watch the outputs; the output to go on with."""
        tensors: list[Tensor | None]
        if isinstance(output, Tensor):
            self._output_names, tensors = [""], [output]
        elif isinstance(output, tuple | list):
            self._output_names, tensors = _slots(output, {})
        else:
            self._output_names, tensors = _slots((), {"": output})
        members = list(_distinct(tensors))
        if not members:
            return output
        index, first = members[0]
        # An output that is an input, or a leaf, has other users: its own hook would report theirs too.
        if len(members) == 1 and first.grad_fn is not None and (first.grad_fn, first.output_nr) not in edges:
            _tap(first).outputs.append((self, index))
            aliases = {}
        else:
            aliases = _join(members, self._collect_output, self._release_output)
        self._watch(edges, [aliases.get(id(tensor), tensor).grad_fn for _, tensor in members])
        return tree.replace(output, _swap(aliases)) if aliases else output

    def _watch(self, edges: _Edges, roots: list[Any]) -> None:
        """Hook the nodes of this call that lead straight to a watched input."""
        if all(index == _ALIASED for index in edges.values()):
            return
        first = self._first_node
        seen: set[Any] = set()
        todo = [node for node in roots if _torch.made_since(node, first)]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            hits = []
            for slot, edge in enumerate(node.next_functions):
                if edge in edges:
                    hits.append((slot, edges[edge]))
                elif edge[0] is not None and edge[0] not in seen and _torch.made_since(edge[0], first):
                    todo.append(edge[0])
            hits = [(slot, index) for slot, index in hits if index != _ALIASED]
            if hits:
                node.register_hook(self._collector(hits))

    def _collector(self, hits: list[tuple[int, int]]) -> Callable[[Grads, Grads], None]:
        def collect(grad_inputs: Grads, grad_outputs: Grads) -> None:
            if self._is_running():
                for slot, index in hits:
                    self._collect_input(index, grad_inputs[slot])

        return collect

    # -- in the backward pass, in this order -------------------------------------------------------------

    def _collect_output(self, index: int, grad: Tensor | None) -> None:
        task = _torch.graph_task_id()
        if task != self._task:  # the first gradient in this backward pass
            self._task = task
            self._pre_done = self._done = False
            self._grad_outputs = [None] * len(self._output_names)
            self._grad_inputs = [None] * len(self._input_names)
            _at_end_of(task).append(self)
        self._grad_outputs[index] = grad

    def _release_output(self, index: int) -> Tensor | None:
        if not self._pre_done:
            self._pre_done = True
            grads = self._fire(Kind.BACKWARD_PRE, tuple(self._grad_outputs), ())
            self._grad_outputs = list(grads)
        return self._grad_outputs[index]

    def _collect_input(self, index: int, grad: Tensor | None) -> None:
        if grad is not None and self._is_running():
            so_far = self._grad_inputs[index]
            self._grad_inputs[index] = grad if so_far is None else so_far + grad

    def _release_input(self, index: int) -> Tensor | None:
        self.fire_post()
        grad, self._grad_inputs[index] = self._grad_inputs[index], None
        return grad

    def take_output(self, index: int, grad: Tensor | None) -> Tensor | None:
        """The gradient of the one output has come; the gradient to go on with."""
        self._collect_output(index, grad)
        return self._release_output(index)

    def take_turn(self) -> None:
        """The producer of a watched input has its turn, so everything this call made has run."""
        if self._is_running():
            self.fire_post()

    def fire_post(self) -> None:
        """Everything this call gets in this backward pass is there: its inputs' and its parameters' gradients."""
        if self._done:
            return
        self._done = True
        outputs, self._grad_outputs = tuple(self._grad_outputs), []
        grads = self._fire(Kind.BACKWARD, tuple(self._grad_inputs), (outputs,))
        # Kept only until the aliases have let them through; a watched call has none.
        self._grad_inputs = list(grads)

    def forget(self) -> None:
        """The backward pass is over."""
        self._grad_inputs = []
        self._grad_outputs = []

    def _is_running(self) -> bool:
        return not self._done and self._task == _torch.graph_task_id()

    def _fire(self, kind: Kind, grads: Grads, more: tuple[Grads, ...]) -> Grads:
        """Call the live hooks of that kind that were on when this call began; the gradients as edited."""
        for entry in self._table.lane(kind):
            attachment = entry.attachment
            if attachment.order > self._order:
                continue
            entry.count()
            if entry.simple:
                result = entry.hook(self._module, grads, *more)
            else:
                result = entry.call(self._module, (grads, *more), self._site(entry))
            if result is not None and attachment.phase is Phase.EDIT:
                grads = _checked(result, grads, entry)
        return grads

    def _site(self, entry: Entry) -> Site:
        step, call = self._moments.get(entry.root, (-1, 0))
        return Site(
            entry.name,
            self._module,
            entry.attachment.kind,
            call,
            step,
            inputs=tuple(self._input_names),
            outputs=tuple(self._output_names),
        )


_Edges: TypeAlias = dict[tuple[Any, int], int]
"""From the graph edge of an input tensor (its node and which output of it) to its place in ``grad_input``."""

_ALIASED: Final = -1
"""The place of an input that goes in as an alias, which looks after itself."""


def _distinct(tensors: list[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
    """The tensors that gradients will come for, each once, with its place."""
    seen: set[int] = set()
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            yield index, tensor


def _slots(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[str], list[Tensor | None]]:
    """Names and tensors in the order gradients are handed over.

    A positional value is one slot even if it is no tensor, as in torch; of containers and keyword arguments
    only the tensors count.
    """
    names: list[str] = []
    tensors: list[Tensor | None] = []
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            names.append(str(index))
            tensors.append(value)
            continue
        found = [(path, leaf) for path, leaf in tree.leaves(value, str(index)) if isinstance(leaf, Tensor)]
        names += [path for path, _ in found] or [str(index)]
        tensors += [leaf for _, leaf in found] or [None]
    for key, value in kwargs.items():
        for path, leaf in tree.leaves(value, key):
            if isinstance(leaf, Tensor):
                names.append(path)
                tensors.append(leaf)
    return names, tensors


class _Tap:
    """The one tensor hook on a tensor that passes between modules.

    It has to be one: torch runs the hooks of a tensor in the order they came, which is the order of the
    forward, and would have a module's ``backward_pre`` before the ``backward`` of the module that used its
    output.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs: list[GradientCall] = []
        """Calls that take the tensor in."""
        self.outputs: list[tuple[GradientCall, int]] = []
        """Calls whose only output it is; of a module and its last child, the child comes first."""

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        given = grad
        for call in reversed(self.inputs):
            call.take_turn()
        for call, index in reversed(self.outputs):
            grad = call.take_output(index, grad)
        return None if grad is given else grad


def _tap(tensor: Tensor) -> _Tap:
    """The tap on a tensor that some node made; kept with that node, so that it goes when the graph does."""
    assert tensor.grad_fn is not None
    key = _TAP, tensor.output_nr
    metadata: dict[Any, Any] = tensor.grad_fn.metadata  # type: ignore[assignment]
    tap: _Tap | None = metadata.get(key)
    if tap is None:
        tap = metadata[key] = _Tap()
        _torch.hook_tensor(tensor, tap)
    return tap


_TAP = "hookline.tap"


def _join(
    members: list[tuple[int, Tensor]],
    collect: Callable[[int, Tensor | None], None],
    release: Callable[[int], Tensor | None],
) -> dict[int, Tensor]:
    """Aliases, by the id of the tensor, such that every gradient is collected before the first is released."""
    if len(members) == 1:
        index, tensor = members[0]
        alias = tensor.view_as(tensor)
        _torch.hook_tensor(alias, _collect_and_release(index, collect, release))
        return {id(tensor): alias}
    earlier = [tensor.view_as(tensor) for _, tensor in members]
    later = [alias.view_as(alias) for alias in earlier]
    for (index, _), releasing, collecting in zip(members, earlier, later, strict=True):
        _torch.hook_tensor(releasing, _release(index, release))
        _torch.hook_tensor(collecting, _collect(index, collect))
    return {id(tensor): alias for (_, tensor), alias in zip(members, later, strict=True)}


_TensorHook = Callable[[Tensor], "Tensor | None"]


def _collect_and_release(index: int, collect: Any, release: Any) -> _TensorHook:
    def hook(grad: Tensor) -> Tensor | None:
        collect(index, grad)
        new: Tensor | None = release(index)
        return None if new is grad else new

    return hook


def _collect(index: int, collect: Any) -> _TensorHook:
    def hook(grad: Tensor) -> None:
        collect(index, grad)

    return hook


def _release(index: int, release: Any) -> _TensorHook:
    def hook(grad: Tensor) -> Tensor | None:
        new: Tensor | None = release(index)
        return None if new is grad else new

    return hook


def _swap(aliases: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: aliases.get(id(tensor), tensor)


def _checked(result: Any, grads: Grads, entry: Entry) -> Grads:
    """A hook's return value as gradients, if it fits."""
    if isinstance(result, Tensor) and len(grads) == 1:
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != len(grads):
        got = f"{len(result)}" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
        raise _misfit(entry, f"expected a tuple of {len(grads)}, or None, got {got}")
    return tuple(_checked_one(i, new, old, entry) for i, (new, old) in enumerate(zip(result, grads, strict=True)))


def _checked_one(index: int, new: Any, old: Tensor | None, entry: Entry) -> Tensor | None:
    if new is None or new is old:
        return old if new is old or old is None else torch.zeros_like(old)  # None cuts the gradient
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


class _EndOfBackward:
    """The calls that took part in one backward pass; what has not fired when it ends, fires then."""

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls: list[GradientCall] = []

    def __call__(self) -> None:
        # In the order autograd would have reached them: the last that began comes first.
        for call in sorted(self.calls, key=lambda call: call.order, reverse=True):
            call.fire_post()
            call.forget()


# The engine holds the values, so a pass that raises leaves nothing here.
_ENDS: WeakValueDictionary[int, _EndOfBackward] = WeakValueDictionary()


def _at_end_of(task: int) -> list[GradientCall]:
    end = _ENDS.get(task)
    if end is None:
        end = _ENDS[task] = _EndOfBackward()
        _torch.queue_end_of_backward(end)
    return end.calls
