"""Keep the gradient hooks of a module or function, collect the gradients of a call, and fire them.

`ModuleHooks` and `FunctionHooks` derive from `GradientHooks`. ``call_gradients`` adds the part that runs before and
after the forward. The tensor hooks of ``tensor_taps`` call `BackwardCall` in the backward pass, or `OutputCall` where
all hooks observe one output; these call the user's hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from hookline.sites import _torch
from hookline.sites.gradients.tensor_taps import Tap, behind, checked
from hookline.sites.hook_at_site import HookContainer, OrderGroup, open_contexts
from hookline.sites.site_info import FunctionSite, Site

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
"""How a call began: its thread, when, as `next_order` counts, and the number of the next graph node there."""
Moments: TypeAlias = "dict[ForwardCounter, tuple[int, int]]"
"""Step and number of one call, by the model whose forwards are counted."""
thread: Final[Callable[[], int]] = get_ident
"""Return the number of this thread."""


class OutputCall:
    """The observers of what comes to a module's output, for all its calls while they stay the same."""

    __slots__ = ("entries", "order")

    def __init__(self, entries: tuple[HookAtSite, ...]) -> None:
        self.entries = entries
        """The observers; it is for these alone, and another is made when they change."""
        self.order = max(entry.attachment.order for entry in entries)
        """When the last of them came; it takes part in calls that began later."""

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
    """Watch one output that the call has made; return False, and do nothing, where that takes more than a tap."""
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


def gradient_site(
    entry: HookAtSite,
    module: Any,
    moments: Moments,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("",),
) -> Site:
    """Return the site of a gradient hook that fires for a call of a module."""
    step, call = moments.get(entry.counter, (-1, 0))
    counter = entry.counter
    return Site(entry.name, module, entry.attachment.kind, call, step, False, inputs, outputs, counter.training_now())


class GradientHooks(HookContainer):
    """The gradient hooks of one module or function, and what a call has to know of them."""

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
    observes_outputs = False
    """Whether all hooks observe the gradients of outputs, and can be called straight."""
    output_call: OutputCall | None = None
    """What fires them then; made by the first call."""
    uses_input_once = False
    """Whether the module is one of `USE_INPUT_ONCE`."""
    told: tuple[ForwardCounter, ...] = ()
    """The models whose hooks declare ``site``."""
    plan = ""
    """The same in letters, for calls that are compiled (`plan_of`)."""
    entered = -1
    """When the latest call that gradient hooks take part in began."""
    began: Began | None = None
    """The same of a call whose gradient hooks observe its output alone, until it is over."""
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
    """One call of a module or function, as the backward pass sees it.

    One is made for every call of every module that has gradient hooks, so rare attributes are defaults of the class.
    """

    _takes_alias = False
    """Whether an alias of the one input went in, whose tap has the module's own share."""
    _returned = (-1, -1)
    """The indices of an input and of the output which are the same tensor."""
    _last_outputs: frozenset[int] | None = None
    """With several outputs: those whose gradients come last."""
    _num_inputs = 1
    _num_outputs = 1
    _input_names: tuple[str, ...] = ("0",)
    _output_names: tuple[str, ...] = ("",)
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
        self._contexts = open_contexts()  # autograd may run in a thread of its own
        if hooks.told:
            self._moments = hooks.gradient_moments()

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
        self._awaited -= index in self._last_outputs
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
            return grads  # torch has run the hooks; or others are tapped, and come later: then nothing is edited
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
        """Fire, since the producer of input ``index`` runs next and all that this call made has run.

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
        module = self._module
        of_function = type(module) is FunctionSite
        if of_function:  # these hooks are not taken out of the tuple, as a module's are
            entries = tuple(entry for entry in entries if not entry.attachment.removed)
        for entry in entries:
            attachment = entry.attachment
            if attachment.order > self.order:
                continue
            if attachment.context is not None and attachment.context not in self._contexts:
                continue
            entry.fired += 1
            entry.last_step = entry.counter.step
            if of_function:
                module = self._module.seen_from(entry.counter)
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
            return Site(fn.name, owner, kind, fn.call, fn.step)
        return gradient_site(entry, fn, self._moments, self._input_names, self._output_names)


class _EndOfBackward:
    """The calls that took part in one backward pass; what has not fired when it ends, fires then."""

    __slots__ = ("__weakref__", "calls", "latest")

    def __init__(self) -> None:
        self.calls: list[BackwardCall] = []
        self.latest: Tensor | None = None
        """For a backward pass that is traced: the output of the hooks that fired last, for the next to take in."""

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
