"""Observe and edit the gradients of one call of a module or function, without disturbing anything else.

`ModuleHooks` and `FunctionHooks` derive from `GradientHooks`, which has the hooks as *entries*: each is a `HookAtSite`,
one hook at one site (``hook_at_site``). ``module_hooks`` and ``functions.attach_function`` make a `GradientCall` for
each call: `GradientCall.enter` before it, `GradientCall.leave` after it. These put a `Tap` on a tensor to observe its
gradient, and let several tensors pass a *gate* where their gradients are edited together. In the backward pass autograd
calls taps and gates. They call the `BackwardCall` (the base of `GradientCall`), or the `OutputCall` where all hooks
observe one output; and that calls the users' hooks.

Other files use parts: ``module_hooks`` (`USE_INPUT_ONCE`, `is_flat`, `tap_output`, `CallState`), ``attach_function``
and ``everywhere`` (`CallState`), ``tensors`` (`fitting`, `fitting_all`), and of ``compiled``: ``compiled_gradients``
(`GradientHooks`, `GradientCall`, `end_of`), ``op_runtime`` (`fire_gradients`), ``trace_hooks`` (`gradient_places` and
`as_arguments`, which are traced). What must stay so:

- ``compiled_gradients._TracedCall``, a subclass of `GradientCall`, runs on fake tensors, with ``module=None``, while
  the compiler traces. So `GradientCall` and its bases may not read a value of a tensor, or need a module.
- Its hooks know only what the text of `plan_of` says; all else has the default of `GradientHooks`, without an error.
  Where a `GradientCall` reads an attribute of which the default would be wrong, add that to `plan_of` and
  `_TracedHooks` in ``compiled_gradients``.
- ``_torch.called_by_us`` knows this module by its name (``_torch._WIRING``), so that the torch functions called here
  fire no hooks on functions. Call torch for the gradients of a call in this file only.

Tests: tests/sites/test_gradients.py, test_backward_order.py and test_inert.py; for functions,
test_function_gradients.py and test_gradient_passes.py of tests/sites/functions.

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
That adds no node to the graph, so the run is the same to the last bit. Layers of torch's own that read their one input
once (`USE_INPUT_ONCE`) take an alias in instead: that is cheaper, and one term regroups no sum.

*Inputs, edited*: all pass a gate on their way in. It is reached when everything inside has run, sees this module's own
share of each gradient, and lets through what the hooks return. Where one tensor is used twice or more inside the module
and again after it, the sum is formed in another order than without the hook (docs/sources.md).

A module that returns its input has no node of its own. Watched, it reports everything that comes to that tensor; only
behind a gate does it have a share of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hookline import tree
from hookline.errors import HookReturnError, UnhookableError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.hook_at_site import FunctionSite, HookContainer, Site, open_contexts

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.hook_at_site import ForwardCounter, HookAtSite

USE_INPUT_ONCE: Final = frozenset(
    {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm}
    | {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softmax}
)
"""Classes that read their one input once, and write elsewhere; ``module_hooks`` looks for the exact class."""


Began: TypeAlias = tuple[int, int, int]
"""How a call began: its thread, its number by `next_order`, and the number for the next graph node of the thread."""
Moments: TypeAlias = "dict[ForwardCounter, tuple[int, int]]"
"""Step and number of one call, for each model that hooks were attached through (`ForwardCounter.moment`)."""
_NO_MOMENTS: Final[Moments] = {}
Names: TypeAlias = tuple[str, ...]
"""Which input or output each entry of ``grad_input`` or ``grad_output`` belongs to."""


# -- the tensors of a call -----------------------------------------------------------------------------------------

IndexedTensor: TypeAlias = tuple[int, Tensor]
"""A tensor with its index in ``grad_input`` or ``grad_output``."""


def as_arguments(output: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return an output in the shape of arguments: the items of a tuple or list count like positional ones."""
    if isinstance(output, tuple | list):
        return output, {}
    return (), {"": output}


def gradient_places(
    args: Sequence[Any], kwargs: Mapping[str, Any], takes: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor)
) -> list[tuple[str, Any]]:
    """Return the names of the places whose gradients are handed over, in order, each with its tensor or None.

    A positional value has one place even if it is no tensor, as in torch; of containers and keyword arguments
    only the tensors count. ``takes`` says which values count as tensors. ``trace_hooks`` calls this while tracing: it
    may do only what the compiler can trace.
    """
    found: list[tuple[str, Any]] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        name = str(key)
        if takes(value):
            found.append((name, value))
            continue
        inside = [] if value is None else [(path, leaf) for path, leaf in tree.leaves(value, name) if takes(leaf)]
        found += inside or ([(name, None)] if isinstance(key, int) else [])
    return found


def is_flat(output: Any) -> bool:
    """Return whether torch's own backward hooks see all tensors of an output: it is one, or a tuple with them in it."""
    items = output if isinstance(output, tuple) else (output,)
    return all(isinstance(item, Tensor) or not tree.tensors_of(item) for item in items)


def distinct(found: list[tuple[str, Any]]) -> list[IndexedTensor]:
    """Return the tensors that gradients will come for, each once, with its index."""
    seen: dict[int, IndexedTensor] = {}
    for index, (_, tensor) in enumerate(found):
        if tensor is not None and tensor.requires_grad:
            seen.setdefault(id(tensor), (index, tensor))
    return list(seen.values())


# -- what hooks return --------------------------------------------------------------------------------------------


def checked(result: Any, grads: Grads, entry: HookAtSite) -> Grads:
    """Return the gradients of a call as a hook has returned them, if they fit; zeros for a None that cuts one off.

    A hook of a tensor cannot return "no gradient", so zeros are what cuts one off in every case.
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

_Output: TypeAlias = tuple[Any, Any, torch.Size | None]
"""A `BackwardCall` or `OutputCall`, what its ``take_output`` is to be told first, and the shape of the tensor there, if
not its own. Of a `BackwardCall` that is the index in ``grad_output``; of an `OutputCall` see there."""


class Tap(list[_Output]):
    """The one tensor hook on a tensor that passes between modules; as a list, the calls that give the tensor out.

    A module and its last child give the same tensor out: the child is first in the list. There has to be one hook:
    torch runs the hooks of a tensor in the order they came, which is the order of the forward, and would run a module's
    ``backward_pre`` before the ``backward`` of the module that used its output.
    """

    # It is itself the list, since one is made for each call of each module that is watched, and has to be cheap.
    inputs: tuple[tuple[BackwardCall, int, torch.Size | None], ...] = ()
    """Calls that take the tensor in, its index in their ``grad_input``, and its shape there, if not its own."""

    def add_input(self, call: BackwardCall, index: int, shape: torch.Size | None = None) -> None:
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
    """Return the tensor to tap in place of ``tensor``, so that a later in-place operation on it does no harm.

    For a plain reshape, that is the tensor behind it, and the shape of the reshape comes with it. For any other
    tensor, it is ``tensor`` itself, with None.
    """
    base = tensor._base
    if base is None or base.grad_fn is None or tensor.numel() != base.numel():
        return tensor, None
    is_reshape = tensor.is_contiguous() and base.is_contiguous()
    return (base, tensor.shape) if is_reshape else (tensor, None)


def accumulator(leaf: Tensor) -> Any:
    """Return the node that accumulates into a leaf; None for kinds of tensor that cannot be asked (sparse, nested).

    None too for a parameter inside a transform of ``torch.func`` that does not differentiate by it.
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
    """Of an input that is a view: which part it shows of its base, the tensor behind it."""

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
    """An input that is a view, as it was when the call began.

    An in-place operation on a view takes the node of the view out of the graph. The gradient for the view then comes to
    the node of its base, the tensor behind it; `part` cuts it out there.
    """

    tensor: Tensor
    version: int
    node: Any
    """The node of the base."""
    output: int
    """Which output of that node the base is."""
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
"""`BackwardCall.take_inputs` or ``take_outputs``: of indices and gradients, return the gradients to go on with."""


class HooklineGate(torch.autograd.Function):
    """Several tensors that pass one node, so that all their gradients are known before one of them goes on.

    Users see the name of this class (tests/contract/test_pytorch_gradients.py looks for it): an input of a module
    passes as a view (``views``), as with torch's full backward hook, and where the module changes it in place, torch
    raises an error with this name in it. An output passes as a tensor that shares memory and version with the one
    before the gate but is no view: in-place operations behind the gate stay legal, and torch still notices one that
    spoils a saved tensor.
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


# -- the hooks of a module or function, and their calls -------------------------------------------------------------


class OutputCall:
    """The observers of the gradient of a module's output: one object for all calls, until the observers change."""

    __slots__ = ("entries", "order")

    def __init__(self, entries: tuple[HookAtSite, ...]) -> None:
        self.entries = entries
        """The observers; it is for these alone, and another is made when they change."""
        self.order = max(entry.attachment.order for entry in entries)
        """When the last of them was attached, by `next_order`; a call that began before it takes a `GradientCall`."""

    def take_output(self, place: tuple[Any, Moments], grad: Tensor | None) -> Tensor | None:
        """Fire with the gradient of an output; return it. ``place`` is the module, with the moments of its call."""
        module, moments = place
        for entry in self.entries:
            if not entry.attachment.removed:
                entry.fired += 1
                entry.last_step = entry.counter.step
                if entry.simple:
                    entry.hook(module, (grad,))
                else:
                    entry.hook(module, (grad,), site=gradient_site(entry, module, moments))
        return grad


def tap_output(hooks: GradientHooks, began: Began, module: Any, output: Any) -> bool:
    """Watch the one output of a call with a tap; return False, and do nothing, where that takes a `GradientCall`.

    The forward slot of a module (``module_hooks``) calls this for hooks that only observe outputs.
    """
    call, entries = hooks.output_call, hooks.backward_pre
    if call is None or call.entries is not entries:  # another thread may have changed the hooks, also just now
        if not entries:
            return True
        call = hooks.output_call = OutputCall(entries)
    if call.order > began[1] or began[0] != get_ident() or not isinstance(output, Tensor):
        return False
    node = output.grad_fn
    if node is None:
        if not output.requires_grad:
            hooks.gradient_moments()  # it is one of the calls
        return not output.requires_grad
    shape = None
    if output._base is not None:
        output, shape = behind(output)
        if shape is None:
            return False
        node = output.grad_fn
    if not _torch.made_since(node, began[2]) or _torch.has_backward_hooks(module):
        return False
    _torch.only_hook(output, node, Tap).append((call, (module, hooks.gradient_moments()), shape))
    return True


def gradient_site(entry: HookAtSite, module: Any, moments: Moments, inputs: Names = (), outputs: Names = ("",)) -> Site:
    """Return the site of a gradient hook that fires for a call of a module, or of a function."""
    if isinstance(module, FunctionSite):
        return module.site(entry.attachment.kind)
    step, call = moments.get(entry.counter, (-1, 0))
    counter = entry.counter
    return Site(entry.name, module, entry.attachment.kind, call, step, False, inputs, outputs, counter.training_now())


class GradientHooks(HookContainer):
    """The gradient hooks of one module or function, and what a call has to know of them.

    Compiled calls have `_TracedHooks` of ``compiled_gradients`` in its place: an attribute that they do not set has the
    default below there.
    """

    # Defaults of the class, not set one by one for each of ten thousand modules.
    backward_pre: tuple[HookAtSite, ...] = ()
    backward: tuple[HookAtSite, ...] = ()
    """The live hooks, in the order they run; those in ``backward`` are shown the gradients of inputs."""
    has_gradients = False
    edits_gradients = False
    """Whether a hook may return gradients of inputs, which then pass a gate."""
    edits_outputs = False
    """The same for the gradients of outputs, which pass a gate if there are several."""
    observes_outputs = False
    """Whether all hooks only observe the gradients of outputs, in every context."""
    output_call: OutputCall | None = None
    """What fires them then; made by the first call."""
    uses_input_once = False
    """Whether the module is one of `USE_INPUT_ONCE`."""
    told: tuple[ForwardCounter, ...] = ()
    """The counters of the models whose hooks declare ``site``, and are told step and call."""
    plan = ""
    """What compiled calls have to know of the hooks, in the letters of `plan_of`."""
    entered = -1
    """When the latest call that gradient hooks take part in began, by `next_order`."""
    began: Began | None = None
    """How the call under way began, where all hooks only observe outputs; None when it is over."""
    begins_late = False
    """Whether no pre-hook notes when a call begins: its one forward hook does all (`ModuleHooks`)."""
    calls_seen = 0
    """How often there was a call while there were gradient hooks."""

    def set_gradient_hooks(self, pre: tuple[HookAtSite, ...], post: tuple[HookAtSite, ...]) -> None:
        """Replace the hooks, for the calls that are under way too."""
        self.backward_pre, self.backward = pre, post
        self.has_gradients = bool(pre or post)
        self.edits_outputs = any(map(_may_edit, pre))
        self.edits_gradients = any(map(_may_edit, post))
        only_observe = not any(_edits(entry) or entry.attachment.context is not None for entry in pre)
        self.observes_outputs = bool(pre) and not post and only_observe
        self.output_call = None
        self.told = tuple({entry.counter for entry in (*pre, *post) if entry.attachment.wants_site})

    def gradient_moments(self) -> Moments:
        """Count a call; return its step and number, for each model whose hooks declare ``site``."""
        return {counter: counter.moment(self) for counter in self.told}


def _edits(entry: HookAtSite) -> bool:
    return not entry.attachment.options.observe


def _may_edit(entry: HookAtSite) -> bool:
    return entry.attachment.may_edit and _edits(entry)


class BackwardCall:
    """One call of a module or function, as the backward pass sees it; made as its subclass `GradientCall`.

    One is made for every call of every module that has gradient hooks, so rare attributes are defaults of the class.
    Backward passes may come several times, each with a number of its own (``task``): a pass begins with the gradient of
    an output, fires ``backward_pre`` when those of all outputs are there, and ``backward`` when it reaches the producer
    of an input, or when it ends.
    """

    _takes_alias = False
    """Whether an alias of the one input went in: the gradient at its tap is from this module alone."""
    _returned = (-1, -1)
    """The indices of an input and of the output which are the same tensor."""
    _last_outputs: frozenset[int] | None = None
    """With several outputs: those whose gradients come last. When these are there, ``backward_pre`` fires."""
    _num_inputs = 1
    _num_outputs = 1
    _input_names: Names = ("0",)
    _output_names: Names = ("",)
    moments: Moments = _NO_MOMENTS
    """Filled where a hook asks for its site."""
    _grad_outputs: list[Tensor | None]
    _grad_inputs: list[Tensor | None]
    _task = -1
    """The latest backward pass that reached this call."""
    done = True
    """Whether nothing more is to fire in that pass."""

    def __init__(self, hooks: GradientHooks, module: Any, order: int) -> None:
        self._hooks = hooks
        self._module = module
        self._first_node = _torch.sequence_number()
        self.order = order
        """When the call began, as `next_order` counts."""
        self.contexts = open_contexts()  # autograd may run in a thread of its own
        if hooks.told:
            self.moments = hooks.gradient_moments()

    # -- gradients of outputs ------------------------------------------------------------------------------

    def take_output(self, index: int, grad: Tensor | None) -> Tensor | None:
        """Take the gradient of output ``index``; return the gradient to go on with."""
        task = _torch.graph_task_id()
        if task != self._task:
            self._begin(task)
        if self.done:
            return grad
        self._grad_outputs[index] = grad
        if self._pre_done:
            return grad
        if self._last_outputs is None:
            return self._release_outputs()[index]
        self._awaited -= index in self._last_outputs  # True counts as 1
        if self._awaited == 0:
            self._release_outputs()
        return grad

    def take_outputs(self, indices: list[int], grads: Grads) -> Grads:
        """Take the gradients of all outputs that pass the gate; return the gradients to go on with."""
        task = _torch.graph_task_id()
        if task != self._task:
            self._begin(task)
        if self.done:
            return grads
        for index, grad in zip(indices, grads, strict=True):
            self._grad_outputs[index] = grad
        if self._pre_done or self._last_outputs is not None:
            return grads  # torch has run the hooks; or other outputs are tapped, and come later: no hook edits then
        outputs = self._release_outputs()
        return tuple(outputs[index] for index in indices)

    def _begin(self, task: int) -> None:
        """Begin the backward pass ``task`` for this call."""
        self._task = task
        self._pre_done = self.done = False
        if self._last_outputs is not None:
            self._awaited = len(self._last_outputs)
        self._grad_outputs = [None] * self._num_outputs
        self._grad_inputs = [None] * self._num_inputs
        end_of(task).calls.append(self)

    def _release_outputs(self) -> Sequence[Tensor | None]:
        """Fire ``backward_pre``, since all gradients of outputs are there; return the gradients to go on with."""
        self._pre_done = True
        grads: Sequence[Tensor | None] = self._grad_outputs
        if self._hooks.backward_pre:
            grads = self.fire(self._hooks.backward_pre, tuple(grads), ())
        self.done = not self._hooks.backward  # then nothing comes later, and no gradient is kept
        self._grad_outputs = [] if self.done else list(grads)
        return grads

    def run_by_torch(self, backward_hooks: Any) -> None:
        """Have torch's own backward hooks of this call (its ``BackwardHook``) run the ``backward_pre`` hooks too.

        torch puts a node of its own around the outputs *after* all forward hooks, so its hooks would come before
        everything that we put there. It keeps a list of pre-hooks for this one call: our edits go in before the hooks
        of others, our observers after them.
        """
        theirs = backward_hooks.user_pre_hooks
        backward_hooks.user_pre_hooks = [self._edit_for_torch, *theirs, self._observe_for_torch]

    def _edit_for_torch(self, module: Any, grads: Grads) -> Grads | None:
        """Begin the pass and run the edits; return the gradients if one was replaced."""
        if len(grads) != self._num_outputs:
            return None  # a forward hook behind ours has put another output there
        self._begin(_torch.graph_task_id())
        self._pre_done, self.done = True, not self._hooks.backward
        edited = self.fire(tuple(filter(_edits, self._hooks.backward_pre)), grads, ())
        return None if edited is grads else edited

    def _observe_for_torch(self, module: Any, grads: Grads) -> None:
        """Run the observers: everybody has edited by now."""
        if self._task == _torch.graph_task_id():
            self.fire(tuple(entry for entry in self._hooks.backward_pre if not _edits(entry)), grads, ())

    # -- gradients of inputs -------------------------------------------------------------------------------

    def collect_input(self, index: int, grad: Tensor | None) -> None:
        """Add to the gradient of input ``index`` what one node of the call has sent there."""
        if grad is not None and not self.done and self._task == _torch.graph_task_id():
            so_far = self._grad_inputs[index]
            self._grad_inputs[index] = grad if so_far is None else so_far + grad

    def take_inputs(self, indices: list[int], grads: Grads) -> Grads:
        """Take the gradients of all inputs that passed the gate, and fire; return the gradients to go on with."""
        if self.done or self._task != _torch.graph_task_id():
            return grads  # the hooks are off, or this backward pass did not come through the outputs
        for index, grad in zip(indices, grads, strict=True):
            self.collect_input(index, grad)
        inputs = self.fire_post()
        return grads if inputs is None else tuple(inputs[index] for index in indices)

    def reach_producer(self, index: int, grad: Tensor | None, shape: torch.Size | None) -> Tensor | None:
        """Fire ``backward``, since the producer of input ``index`` runs next, and all nodes of this call have run.

        ``grad`` is the whole gradient of the input, in another ``shape`` if that is not its own. Return the gradient to
        go on with.
        """
        if index == self._returned[0]:
            return self._take_returned(grad, shape)
        if not self.done and self._task == _torch.graph_task_id():
            if self._takes_alias:
                self._grad_inputs[0] = grad
            self.fire_post()
        return grad

    def _take_returned(self, grad: Tensor | None, shape: torch.Size | None) -> Tensor | None:
        """Take the gradient of an input that is the output too."""
        index, output = self._returned
        seen = grad if grad is None or shape is None else grad.reshape(shape)
        new = self.take_output(output, seen)
        self.collect_input(index, new)
        self.fire_post()
        return grad if grad is None or new is seen or new is None else new.reshape(grad.shape)

    # -- firing --------------------------------------------------------------------------------------------

    def fire_post(self) -> Grads | None:
        """Fire ``backward``: all gradients of this call in this pass are there, those of its parameters included.

        Return the gradients of the inputs to go on with; None if there is nothing to fire.
        """
        if not self.done and not self._pre_done:
            self._release_outputs()
        if self.done:
            return None
        self.done = True
        outputs, self._grad_outputs = tuple(self._grad_outputs), []
        inputs, self._grad_inputs = tuple(self._grad_inputs), []
        return self.fire(self._hooks.backward, inputs, (outputs,))

    def fire(self, entries: tuple[HookAtSite, ...], grads: Grads, more: tuple[Grads, ...]) -> Grads:
        """Call those hooks that were on when this call began; return the gradients as edited."""
        return fire_gradients(self, entries, self._module, grads, more, self._input_names, self._output_names)


def fire_gradients(
    call: Any, entries: tuple[HookAtSite, ...], module: Any, grads: Grads, more: tuple[Grads, ...], *names: Names
) -> Grads:
    """Call those hooks that were on when ``call`` began, in its context; return the gradients as edited.

    ``call`` is a `BackwardCall`, or ``op_runtime._NotedCall`` in compiled code: all that is read of it is ``order``,
    ``contexts`` and ``moments``. ``names`` are those of inputs and outputs.
    """
    of_function = type(module) is FunctionSite
    if of_function:  # a module's hooks are taken out of the tuple when they come off, a function's are not
        entries = tuple(entry for entry in entries if not entry.attachment.removed)
    shown = module
    for entry in entries:
        attachment = entry.attachment
        if attachment.order > call.order:
            continue
        if attachment.context is not None and attachment.context not in call.contexts:
            continue
        entry.fired += 1
        entry.last_step = entry.counter.step
        if of_function:
            shown = module.seen_from(entry.counter)
        if entry.simple:
            result = entry.hook(shown, grads, *more)
        else:
            site = gradient_site(entry, shown, call.moments, *names) if attachment.wants_site else None
            result = entry.call(shown, (grads, *more), site)
        if result is not None and not attachment.options.observe:
            grads = checked(result, grads, entry)
    return grads


class _EndOfBackward:
    """The calls that took part in one backward pass; a call that has not fired when the pass ends fires then."""

    __slots__ = ("__weakref__", "calls", "latest")

    def __init__(self) -> None:
        self.calls: list[BackwardCall] = []
        self.latest: Tensor | None = None
        """For ``compiled_gradients``, while a backward pass is traced: the output of the last operator with hooks. The
        next one takes it as an input, so that the compiler keeps their order."""

    def __call__(self) -> None:
        # In the order autograd would have reached them: the last that began comes first.
        late = [call for call in self.calls if not call.done]
        self.calls.clear()
        for call in sorted(late, key=lambda call: call.order, reverse=True):
            call.fire_post()


# The engine holds the values, so a pass that raises leaves nothing here.
_ENDS: Final[weakref.WeakValueDictionary[int, _EndOfBackward]] = weakref.WeakValueDictionary()


def end_of(task: int) -> _EndOfBackward:
    """Return the object that autograd calls at the end of the backward pass ``task``; make it if there is none."""
    end = _ENDS.get(task)
    if end is None:
        end = _ENDS[task] = _EndOfBackward()
        _torch.queue_end_of_backward(end)
    return end


# -- a call from its beginning on -------------------------------------------------------------------------------------


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
        state.watches = bool(hooks.backward)
        only = args[0] if len(args) == 1 and not kwargs and not hooks.edits_gradients else None
        if isinstance(only, Tensor) and not only.requires_grad:
            return args, state
        if not isinstance(only, Tensor) or only.grad_fn is None:
            return self._enter_any(args, kwargs, state)
        if hooks.uses_input_once and state.watches and not only.is_nested:
            # An alias in the place of the one user is the cheapest tap, and regroups no sum.
            self._takes_alias = True
            alias = only.view_as(only)
            tap(alias, alias.grad_fn).add_input(self, 0)
            return (alias,), state
        self._watch_input(0, only, state)
        return args, state

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
        """Raise for a module that changes its input in place, if its ``inplace`` says so.

        Torch allows no in-place change of what comes out of a gate. Functions whose names say so have no such hooks.
        """
        module = self._module
        if getattr(module, "inplace", False) is True:
            hook = next(entry for entry in self._hooks.backward if entry.attachment.may_edit)
            raise UnhookableError(
                f"backward hook {hook.attachment.name!r} on {hook.name!r} may return other gradients, but "
                f"{type(module).__name__} changes its input in place, where none can be exchanged; attach with "
                "observe=True, or use the one that writes elsewhere (inplace=False)."
            )

    def enter_afterwards(self, began: Began | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallState:
        """Return the state of a call whose forward is over, and for which `enter` was not called before it.

        The last forward slot (``module_hooks``) calls this where hooks observe outputs alone, and `tap_output` was not
        enough; then ``began`` says how the call began. It also does where the state is lost, since a pre-hook behind
        ours has made new keyword arguments: then no inputs are known.
        """
        if began is None or began[0] != get_ident() or not self._hooks.observes_outputs:
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
        if state.edges and self._hooks.backward and not state.gated:
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
        if self._hooks.backward and not state.gated:
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
