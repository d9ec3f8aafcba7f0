"""Fire the gradient hooks of a call in the backward pass: taps on tensors, gates, and the calls that these report to.

`ModuleHooks` and `FunctionHooks` derive from `GradientHooks`, which keeps the hooks. ``call_gradients`` derives its
`GradientCall` from `BackwardCall`, makes one for each call, and uses the helpers here: it puts a `Tap` on a tensor to
observe its gradient, and lets several tensors pass a gate where their gradients are edited together. In the backward
pass autograd calls taps and gates, they call the `BackwardCall`, or the `OutputCall` where all hooks observe one
output; and that calls the user's hooks.

Others use parts: ``module_hooks`` (`tap_output`), ``sites.compiled`` (`fire_gradients`, `end_of`, `gradient_places`,
which is traced) and ``sites.tensors`` (`fitting`). In compiled code, `BackwardCall` runs on fake tensors, with the
hooks that ``compiled_gradients.plan_of`` describes: let it read no values of tensors, and add every new attribute of
`GradientHooks` that it reads to `plan_of` and `_TracedHooks`. ``_torch._WIRING`` lists this module by name, so that the
torch functions called here fire no hooks on functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hookline import tree
from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.hook_at_site import FunctionSite, HookContainer, OrderGroup, Site, open_contexts

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.hook_at_site import ForwardCounter, HookAtSite

_EDIT: Final = OrderGroup.EDIT  # looking an enum member up by its class costs 0.2 µs
USE_INPUT_ONCE: Final = frozenset(
    {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm}
    | {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softmax}
)
"""Classes that read their one input once, and write elsewhere."""


Began: TypeAlias = tuple[int, int, int]
"""How a call began: its thread, its number by `next_order`, and the number for the next graph node of the thread."""
Moments: TypeAlias = "dict[ForwardCounter, tuple[int, int]]"
"""Step and number of one call, for each model that hooks were attached through (`ForwardCounter.moment`)."""
_NO_MOMENTS: Final[Moments] = {}
Names: TypeAlias = tuple[str, ...]
"""Which input or output each entry of ``grad_input`` or ``grad_output`` belongs to."""
thread: Final[Callable[[], int]] = get_ident
"""Return the number of this thread."""


# -- the tensors of a call -----------------------------------------------------------------------------------------

IndexedTensor: TypeAlias = tuple[int, Tensor]
"""A tensor with its index in ``grad_input`` or ``grad_output``."""

_NOTHING: Final[tuple[Any, ...]] = ()


def as_arguments(output: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return an output in the shape of arguments: the items of a tuple or list count like positional ones."""
    if isinstance(output, tuple | list):
        return output, {}
    return _NOTHING, {"": output}


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

Call: TypeAlias = Any
"""A `BackwardCall`, which is above this file."""
_Output: TypeAlias = tuple[Any, Any, torch.Size | None]
"""A `BackwardCall` or `OutputCall`, the tensor's place there, and its shape there, if not its own."""


class Tap(list[_Output]):
    """The one tensor hook on a tensor that passes between modules; as a list, the calls that give the tensor out.

    A module and its last child give the same tensor out: the child is first in the list. There has to be one hook:
    torch runs the hooks of a tensor in the order they came, which is the order of the forward, and would run a module's
    ``backward_pre`` before the ``backward`` of the module that used its output.
    """

    # It is itself the list, since one is made for each call of each module that is watched, and has to be cheap.
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
    """Return the tensor to tap in place of ``tensor``, so that a later in-place operation on it does no harm.

    For a plain reshape, that is the tensor behind it, and the shape of the reshape comes with it. For any other
    tensor, it is ``tensor`` itself, with None.
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

    Users see the name of this class: an input of a module passes as a view (``views``), as with torch's full backward
    hook, and where the module changes it in place, torch raises an error with this name in it. An output passes as a
    tensor that shares memory and version with the one before the gate but is no view: in-place operations behind the
    gate stay legal, and torch still notices one that spoils a saved tensor.
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
    if not _torch.is_own_output(node, began[2], module):
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
    """The live hooks, in the order they run."""
    has_gradients = False
    edits_gradients = False
    """Whether a hook may return gradients of inputs, which then pass a gate."""
    edits_outputs = False
    """The same for the gradients of outputs, which pass a gate if there are several."""
    watches_inputs = False
    """Whether there are ``backward`` hooks, which are shown the gradients of inputs."""
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
        self.watches_inputs = bool(post)
        self.observes_outputs = bool(pre) and not post and not any(map(_edits_or_asks, pre))
        self.output_call = None
        self.told = tuple({entry.counter for entry in (*pre, *post) if entry.attachment.wants_site})

    def gradient_moments(self) -> Moments:
        """Count a call; return its step and number, for each model whose hooks declare ``site``."""
        return {counter: counter.moment(self) for counter in self.told}


def _edits(entry: HookAtSite) -> bool:
    return entry.attachment.order_group is _EDIT


def _edits_or_asks(entry: HookAtSite) -> bool:
    """Return whether a hook edits, or fires for one context alone."""
    return _edits(entry) or entry.attachment.context is not None


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
        if result is not None and attachment.order_group is _EDIT:
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
