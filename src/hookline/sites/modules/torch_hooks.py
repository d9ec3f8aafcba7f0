"""Define what torch calls: at most one hook of ours per module, kind and end of the queue, which runs the users' hooks.

`ModuleHooks` registers these with torch; each runs the entries that it was given and returns their edits. Entries are
read anew at each call, so removal counts from the next one on. torch looks hook options up while it iterates, so one
that was taken off in the middle of a call may be called without the keyword arguments it asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.compiler import is_dynamo_compiling

from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled.trace_hooks import NO_STEPS, CompiledSteps, run_post, run_pre
from hookline.sites.gradients.call_gradients import CallState, GradientCall
from hookline.sites.gradients.output_calls import tap_output, thread
from hookline.sites.gradients.tensor_taps import run_before_torch
from hookline.sites.hook_at_site import OrderGroup, next_order
from hookline.sites.kinds import Kind
from hookline.sites.modules.call_guard import COPIES, StaleCallGuard, new_arguments

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.modules.call_guard import HookedModule

_ABSENT: Any = object()
_HOOK_DICTS_OF: Final = operator.itemgetter(*_torch.HOOK_DICTS)
_EDIT: Final = OrderGroup.EDIT  # looking an enum member up by its class costs 0.2 µs


class TorchHook(CompiledSteps):
    """Base of everything that hookline registers with torch on a module."""

    __slots__ = ()

    def __init__(self, module_hooks: HookedModule) -> None:
        self.module_hooks = module_hooks
        self.key = module_hooks.key
        self.hook_id = -1
        self.entries: tuple[HookAtSite, ...] = ()
        self._before = None
        self.plan = self.ticks = self.recipe = ""
        self.steps, self.groups, self.reads = NO_STEPS

    def put(self, entries: tuple[HookAtSite, ...]) -> None:
        """Replace the hooks, from the next call on."""
        before = self.entries
        self.entries = entries
        if self.key is not None:
            if before:
                self._before = self.recipe, self.steps, self.groups
            self.prepare()

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model carries no hooks of ours, only this, which takes itself off.
        return StaleHook, (isinstance(self, StateHook),)


class StaleHook:
    """Stands for a torch hook in a copy of a hooked model; does nothing, and removes itself at the first forward."""

    __slots__ = ("__weakref__", "_from_public_api", "in_walk")

    def __init__(self, in_walk: bool) -> None:
        COPIES.add("hook")
        self.in_walk = in_walk
        """Whether torch calls it while walking the live dictionary, which then must not change."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not self.in_walk and not is_dynamo_compiling():
            drop_stale(module)


def drop_stale(module: nn.Module) -> None:
    """Take what is left of copied hooks off a module, outside of torch's own iterations over them."""
    try:
        if not any(_HOOK_DICTS_OF(module.__dict__)) and _torch.CALL_IMPL not in module.__dict__:
            return  # 0.3 µs; looked up one by one, they take 0.9
    except KeyError:  # made without super().__init__()
        return
    for attribute, hook_id, hook in _torch.hooks_of(module):
        if isinstance(hook, StaleHook) and not (StateHook.running and "state_dict" in attribute):
            _torch.drop_hook(module, attribute, hook_id)
            if attribute == "_backward_hooks" and not module._backward_hooks:
                setattr(module, _torch.FULL_BACKWARD_FLAG, None)  # torch leaves it set
    if isinstance(module.__dict__.get(_torch.CALL_IMPL), StaleCallGuard):
        del module.__dict__[_torch.CALL_IMPL]
    recompile_guard.drop_own_forward(module)  # a copy of a hooked module has no hooks


class FirstPreHook(TorchHook):
    """First of a module's forward pre-hooks: counts the model's forwards, runs raw observers and edits."""

    __slots__ = ()

    slot = "first_pre"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = _ABSENT) -> Any:
        if is_dynamo_compiling():
            return _handed_back(kwargs, run_pre(self, module, args, kwargs))
        module_hooks = self.module_hooks
        if module_hooks.counter is not None and module_hooks.around is None:
            module_hooks.counter.begin()
        if not self.entries:
            return None
        last = module_hooks.torch_hook(LastPreHook)
        later = () if last is None else last.entries
        if last is not None:
            last.release()
        began, gradient_hooks = next_order(), (module_hooks.backward_pre, module_hooks.backward)
        given = args, kwargs
        named = {} if kwargs is _ABSENT else kwargs
        for entry in self.entries:
            result = run_one_pre(entry, module, args, named)
            if result is not None and entry.attachment.order_group is _EDIT:
                args, named = new_arguments(entry, result, named)
                if module_hooks.guard is not None:
                    module_hooks.guard.note(args, named, None)
        if last is not None:
            last.hold(later, began, changed=gradient_hooks != (module_hooks.backward_pre, module_hooks.backward))
        if kwargs is _ABSENT:
            return None if args is given[0] else args
        return None if args is given[0] and named is kwargs else (args, named)


class LastHook(TorchHook):
    """Base of the hooks at the end of a queue: they run the observers that were on when the queue began."""

    __slots__ = ("_held",)

    def __init__(self, module_hooks: HookedModule) -> None:
        super().__init__(module_hooks)
        self.plan = module_hooks.plan
        if self.key is not None:
            self.write_recipe()
        self._held: tuple[int, tuple[HookAtSite, ...], int] | None = None

    def hold(self, entries: tuple[HookAtSite, ...], began: int = -1, *, changed: bool = False) -> None:
        """Keep ``entries`` as the observers of this call, if hooks at the front of the queue have changed these.

        ``began`` is when the queue began, ``changed`` whether they have changed the gradient hooks.
        """
        if changed or self.entries is not entries:
            self._held = _torch.queue_id(2), entries, began

    def release(self) -> None:
        """Forget what an earlier queue held that never came to its end, since a queue begins."""
        self._held = None

    def due(self) -> tuple[tuple[HookAtSite, ...], int]:
        """Return the observers of the call under way, and when its queue began, as `next_order` counts."""
        held, self._held = self._held, None
        if held is not None and held[0] == _torch.queue_id(2):
            return held[1:]
        return self.entries, next_order()


class LastPreHook(LastHook):
    """Last of a module's forward pre-hooks: observers, then the inputs' gradients; keeps our places in the queues."""

    __slots__ = ()

    slot = "last_pre"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = _ABSENT) -> Any:
        if is_dynamo_compiling():
            return _handed_back(kwargs, run_pre(self, module, args, kwargs))
        module_hooks = self.module_hooks
        if len(module._forward_hooks) > 1 or len(module._forward_pre_hooks) > 1:
            module_hooks.keep_places()
        began = -1
        if self.entries or self._held is not None:
            observers, began = self.due()
            for entry in observers:
                run_one_pre(entry, module, args, {} if kwargs is _ABSENT else kwargs)
        if not module_hooks.has_gradients or not torch.is_grad_enabled():
            return None
        # A gradient hook that a pre-hook of this call has put on begins with the next.
        order = module_hooks.entered = began if began >= 0 else next_order()
        module_hooks.began = None
        if kwargs is _ABSENT:
            return None
        if module_hooks.observes_outputs:
            module_hooks.began = thread(), order, _torch.sequence_number()
            return None
        return GradientCall(module_hooks, module, order).enter(args, kwargs)


class FirstForwardHook(TorchHook):
    """First of a module's forward hooks: raw observers, edits."""

    __slots__ = ()

    slot = "first_forward"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _ABSENT) -> Any:
        if output is _ABSENT:
            kwargs, output = {}, kwargs
        if is_dynamo_compiling():
            return run_post(self, module, args, kwargs, output)
        given = output
        guard = self.module_hooks.guard
        if guard is not None:
            guard.note(args, kwargs, output)
        last = self.module_hooks.torch_hook(LastForwardHook)
        later = () if last is None else last.entries
        if last is not None:
            last.release()
        for entry in self.entries:
            result = run_one_post(entry, module, args, kwargs, output)
            if result is not None and entry.attachment.order_group is _EDIT:
                output = result
                if guard is not None:
                    guard.note(args, kwargs, output)
        if last is not None:
            last.hold(later)
        return None if output is given else output


class LastForwardHook(LastHook):
    """Last of a module's forward hooks: observers, then the outputs' gradients."""

    __slots__ = ()

    slot = "last_forward"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        kwargs, output = more if len(more) == 2 else ({}, more[0])  # a default value would be two guards more
        if is_dynamo_compiling():
            return run_post(self, module, args, kwargs, output)
        for entry in self.entries if self._held is None else self.due()[0]:
            if entry.simple:  # run_one_post, without the call: this is the hot path
                entry.fired += 1
                entry.last_step = entry.counter.step
                entry.hook(module, args, output)
            else:
                run_one_post(entry, module, args, kwargs, output)
        module_hooks = self.module_hooks
        has_gradients, late = module_hooks.has_gradients, module_hooks.begins_late
        is_alone = len(module._forward_hooks) == 1
        if not is_alone and (late or not has_gradients):
            module_hooks.keep_places()
        if not has_gradients:
            return None
        module_hooks.calls_seen += 1
        if not torch.is_grad_enabled():
            return None
        began, module_hooks.began = module_hooks.began, None
        late = late and began is None
        if late and is_alone:  # so the output is of this call, whenever that began
            began = thread(), next_order(), 0
        if began is not None and tap_output(module_hooks, began, module, output):
            return None
        state = kwargs if isinstance(kwargs, CallState) else getattr(args, "state", None)
        if state is None:
            call = GradientCall(module_hooks, module, next_order() if late else module_hooks.entered)
            state = call.enter(args, dict(kwargs))[1] if late else call.enter_late(began, args, kwargs)
        watched = state.call.leave(output, state)
        if module_hooks.backward_pre and _torch.has_backward_hooks(module):
            hooks = _torch.backward_hooks_of_call()
            if hooks is not None:
                run_before_torch(state.call, hooks, output, state.index_of)
        return None if watched is output else watched


class FullBackwardHook(TorchHook):
    """torch's own full backward hook."""

    __slots__ = ()

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        given = grad_input
        for entry in [entry for entry in self.entries if not entry.attachment.removed]:
            entry.count()
            result = entry.call(module, (grad_input, grad_output))
            if result is not None and entry.attachment.order_group is _EDIT:
                grad_input = result
        return None if grad_input is given else grad_input


class StateHook(TorchHook):
    """Saving and loading. Return values mean nothing, and torch allows none."""

    # torch sets this attribute on its state_dict post-hooks, which a bound method would not take.
    __slots__ = ("_from_public_api",)

    running: ClassVar[int] = 0
    """How many calls are under way, in all threads: torch may be walking a dictionary of state hooks."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        StateHook.running += 1
        try:
            for entry in self.entries:
                entry.count()
                entry.call(module, args)
        finally:
            StateHook.running -= 1


class AnchorHook(StateHook):
    """Keeps the `ModuleHooks` alive of a module whose hooks torch calls from elsewhere; does nothing."""

    __slots__ = ()

    def __call__(self, module: nn.Module, *args: Any) -> None:
        return None


def run_one_pre(entry: HookAtSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one forward pre-hook; return what it returns."""
    if entry.simple:
        entry.count()
        return entry.hook(module, args)
    if not entry.is_due():
        return None
    entry.count()
    return entry.call(module, (args, kwargs) if entry.attachment.options.with_kwargs else (args,))


def run_one_post(entry: HookAtSite, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Run one forward hook; return what it returns."""
    if entry.simple:
        entry.fired += 1  # entry.count(), without the call: this is the hot path
        entry.last_step = entry.counter.step
        return entry.hook(module, args, output)
    if not entry.is_due():
        return None
    entry.count()
    options = entry.attachment.options
    if options.always_call and entry.container.guard is not None:
        entry.container.guard.note_ran(entry)
    return entry.call(module, (args, kwargs, output) if options.with_kwargs else (args, output))


def _handed_back(kwargs: Any, new: tuple[Any, Any] | None) -> Any:
    """Return what a pre-hook has to return to torch."""
    return new[0] if new is not None and kwargs is _ABSENT else new


# -- where torch keeps each of them --------------------------------------------------------------------------------

CALLED_FROM_ELSEWHERE: Final = frozenset(
    {Kind.PARAM_GRAD, Kind.REGISTER_MODULE, Kind.REGISTER_PARAMETER, Kind.REGISTER_BUFFER}
)
QUEUES: Final[dict[type[TorchHook], tuple[str, bool]]] = {
    FirstPreHook: ("_forward_pre_hooks", True),
    LastPreHook: ("_forward_pre_hooks", False),
    FirstForwardHook: ("_forward_hooks", True),
    LastForwardHook: ("_forward_hooks", False),
}
"""The torch hooks around a call: torch's dictionary, and whether each is first or last in there."""
BY_SLOT: Final = {cls.slot: cls for cls in QUEUES}
_LOADED: Final = ("_load_state_dict_post_hooks", "register_load_state_dict_post_hook")
OTHERS: Final[dict[Kind, tuple[type[TorchHook], str, str]]] = {
    Kind.FULL_BACKWARD: (FullBackwardHook, "_backward_hooks", "register_full_backward_hook"),
    Kind.STATE_DICT_PRE: (StateHook, "_state_dict_pre_hooks", "register_state_dict_pre_hook"),
    Kind.STATE_DICT_POST: (StateHook, "_state_dict_hooks", "register_state_dict_post_hook"),
    Kind.LOAD_STATE_DICT_PRE: (StateHook, "_load_state_dict_pre_hooks", "register_load_state_dict_pre_hook"),
    Kind.LOAD_STATE_DICT_POST: (StateHook, *_LOADED),
    **dict.fromkeys(CALLED_FROM_ELSEWHERE, (AnchorHook, *_LOADED)),
}
"""The torch hooks of other kinds: their class, torch's dictionary, and the method that registers them."""
LEFT_BEHIND: Final[list[tuple[Callable[[], nn.Module | None], str, int]]] = []
"""Torch hooks that could not go when they should have: the module, torch's dictionary, the id."""


def drop_left_behind() -> None:
    """Take off what was left behind; only while torch walks no dictionary of state hooks."""
    for module_ref, attribute, hook_id in LEFT_BEHIND:
        module = module_ref()
        if module is not None:
            _torch.drop_hook(module, attribute, hook_id)
    LEFT_BEHIND.clear()


# Where only what is inside a module is compiled, the compiler meets the module's own hooks as functions to compile.
for _class in (*QUEUES, FullBackwardHook, StateHook, AnchorHook, StaleHook):
    _torch.leave_to_python(_class.__call__)
