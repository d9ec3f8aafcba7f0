"""What torch calls: at most one hook of ours per module, kind and end of the queue, with a live module_hooks behind it.

Takes torch's hook calls, runs the entries of its `ModuleHooks`, hands back edits. A torch_hook reads its entries anew
at each call, so removal counts from the next one on; torch looks hook options up while it iterates, so a torch_hook
also bears being called without the keyword arguments it asked for, when it was taken off in the middle of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import torch
from torch.compiler import is_dynamo_compiling

from hookline.errors import HookReturnError
from hookline.sites import _torch
from hookline.sites.compiled import recompile_guard
from hookline.sites.compiled import trace_hooks as trace
from hookline.sites.gradients.call_gradients import GradientCall
from hookline.sites.gradients.call_inputs import CallState
from hookline.sites.gradients.early_backward_pre import run_before_torch
from hookline.sites.hook_at_site import OrderGroup, next_order
from hookline.sites.modules.call_endings import StaleCallGuard

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.modules.module_hooks import ModuleHooks

__all__ = [
    "AnchorHook",
    "FirstForwardHook",
    "FirstPreHook",
    "FullBackwardHook",
    "LastForwardHook",
    "LastHook",
    "LastPreHook",
    "StaleHook",
    "StateHook",
    "TorchHook",
    "drop_stale",
    "run_one_post",
    "run_one_pre",
]

_ABSENT: Any = object()
_WHERE_STALE = (*_torch.HOOK_DICTS, _torch.CALL_IMPL)
_EDIT = OrderGroup.EDIT  # looking an enum member up by its class costs 0.2 µs


class TorchHook:
    """Base of everything that hookline registers with torch."""

    __slots__ = (
        "__weakref__",
        "_before",
        "entries",
        "groups",
        "hook_id",
        "key",
        "module_hooks",
        "plan",
        "reads",
        "recipe",
        "steps",
        "ticks",
    )

    slot: ClassVar[str] = ""
    """Its name in compiled graphs."""
    recipe: str
    steps: _Steps
    groups: _Groups

    def __init__(self, module_hooks: ModuleHooks) -> None:
        self.module_hooks = module_hooks
        self.key = module_hooks.key
        self.hook_id = -1
        self.entries: tuple[HookAtSite, ...] = ()
        self._before: tuple[str, _Steps, _Groups] | None = None
        self.plan = ""
        """What compiled calls have to know of the gradient hooks."""
        self.ticks = ""
        """Whether the torch_hook tells the counter of each call: "t"."""
        self.steps, self.groups, self.reads = _NO_STEPS
        self.recipe = ""

    def put(self, entries: tuple[HookAtSite, ...]) -> None:
        """These are the hooks from now on."""
        before = self.entries
        self.entries = entries
        if self.key is not None:
            if before:
                self._before = self.recipe, self.steps, self.groups
            self.prepare()

    def prepare(self) -> None:
        """Have the hooks in the order in which compiled code comes to them."""
        entries = self.entries
        if not entries:
            self.steps, self.groups, self.reads = _NO_STEPS
        elif len(entries) == 1 and _is_called(entries[0]):
            self.steps, self.groups, self.reads = _ONE_GROUP, (entries,), entries[0].attachment.reads
        else:
            self.steps, self.groups = _in_steps(entries)
            watching = [entry for group in self.groups for entry in group]
            self.reads = "".join(sorted(set().union(*[entry.attachment.reads for entry in watching])))
        self.write_recipe()

    def write_recipe(self) -> None:
        """Say in one text what a compiled call does here: every single thing that it reads becomes a guard."""
        if self.key is None:
            return
        steps = "".join(
            ["w" if step is None else "e" if step.attachment.summary is None else "s" for step in self.steps]
        )
        self.recipe = f"{steps}/{self.reads}/{self.plan}/{self.ticks}"

    def group(self, steps: str, place: int) -> tuple[HookAtSite, ...]:
        """The hooks that only watch at one place of a compiled call with those steps."""
        _, groups, live = self._as_compiled(steps)
        return groups[place] if live else tuple(entry for entry in groups[place] if not entry.attachment.removed)

    def stepper(self, steps: str, place: int) -> HookAtSite | None:
        """The hook that edits there, or is handed a summary."""
        return self._as_compiled(steps)[0][place]

    def _as_compiled(self, steps: str) -> tuple[_Steps, _Groups, bool]:
        """Steps and groups as the call that is under way was compiled for: its own hooks may have changed them."""
        if self.recipe.startswith(f"{steps}/"):
            self._before = None
            return self.steps, self.groups, True
        if self._before is not None and self._before[0].startswith(f"{steps}/"):
            return self._before[1], self._before[2], False
        return (None,) * len(steps), ((),) * len(steps), False

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model carries no hooks of ours, only this, which takes itself off.
        return StaleHook, (isinstance(self, StateHook),)


_Steps: TypeAlias = "tuple[HookAtSite | None, ...]"
"""What compiled code does, in order: run an editing hook, make a summary for a hook, or (None) run a group of hooks
that only watch."""
_Groups: TypeAlias = "tuple[tuple[HookAtSite, ...], ...]"
"""For each step, the hooks of the group."""
_NO_STEPS: Final[tuple[_Steps, _Groups, str]] = ((), (), "")
_ONE_GROUP: Final[_Steps] = (None,)


def _is_called(entry: HookAtSite) -> bool:
    """Whether compiled code has an operator call the hook."""
    return entry.attachment.by_name is None and entry.attachment.summary is None


def _in_steps(entries: tuple[HookAtSite, ...]) -> tuple[_Steps, _Groups]:
    steps: list[HookAtSite | None] = []
    groups: list[list[HookAtSite]] = []
    for entry in entries:
        if not _is_called(entry):
            steps.append(entry)
            groups.append([])
        elif steps and steps[-1] is None:
            groups[-1].append(entry)
        else:
            steps.append(None)
            groups.append([entry])
    return tuple(steps), tuple(map(tuple, groups))


class StaleHook:
    """What a copy of a hooked model finds in place of a torch_hook: does nothing, and goes at the first forward."""

    __slots__ = ("__weakref__", "_from_public_api", "in_walk")

    def __init__(self, in_walk: bool) -> None:
        self.in_walk = in_walk
        """Whether torch calls it while walking the live dictionary, which then must not change."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not self.in_walk and not is_dynamo_compiling():
            drop_stale(module)


def drop_stale(module: nn.Module) -> None:
    """Take what is left of copied hooks off a module, outside of torch's own iterations over them."""
    if not any(map(module.__dict__.get, _WHERE_STALE)):
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
    """First of a module's forward pre-hooks: the counter's tick, raw observers, edits."""

    __slots__ = ()

    slot = "pre_front"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = _ABSENT) -> Any:
        if is_dynamo_compiling():
            return _handed_back(kwargs, trace.run_pre(self, module, args, kwargs))
        module_hooks = self.module_hooks
        if module_hooks.counter is not None and module_hooks.around is None:
            module_hooks.counter.begin()
        if not self.entries:
            return None
        back = module_hooks.last_hook(LastPreHook)
        later = () if back is None else back.entries
        if back is not None:
            back.release()
        began, gradient_hooks = next_order(), (module_hooks.backward_pre, module_hooks.backward)
        given = args, kwargs
        named = {} if kwargs is _ABSENT else kwargs
        for entry in self.entries:
            result = run_one_pre(entry, module, args, named)
            if result is not None and entry.attachment.order_group is _EDIT:
                args, named = _new_arguments(entry, result, named)
                if module_hooks.guard is not None:
                    module_hooks.guard.note(args, named, None)
        if back is not None:
            back.hold(later, began, changed=gradient_hooks != (module_hooks.backward_pre, module_hooks.backward))
        if kwargs is _ABSENT:
            return None if args is given[0] else args
        return None if args is given[0] and named is kwargs else (args, named)


class LastHook(TorchHook):
    """Base of the torch_hooks at the end of a queue: they run the observers that were on when the queue began."""

    __slots__ = ("_held",)

    def __init__(self, module_hooks: ModuleHooks) -> None:
        super().__init__(module_hooks)
        self.plan = module_hooks.plan
        self.write_recipe()
        self._held: tuple[int, tuple[HookAtSite, ...], int] | None = None

    def hold(self, entries: tuple[HookAtSite, ...], began: int = -1, *, changed: bool = False) -> None:
        """Keep ``entries`` as the observers of this call, if hooks at the front of the queue have changed these.

        ``began`` is when the queue began, ``changed`` whether they have changed the gradient hooks.
        """
        if changed or self.entries is not entries:
            self._held = _torch.queue_id(2), entries, began

    def release(self) -> None:
        """A queue begins; whatever an earlier one held that never came to its end is no longer due."""
        self._held = None

    def due(self) -> tuple[tuple[HookAtSite, ...], int]:
        """The observers of the call under way, and when its queue began, on the clock of ``entry.next_order``."""
        held, self._held = self._held, None
        if held is not None and held[0] == _torch.queue_id(2):
            return held[1:]
        return self.entries, next_order()


class LastPreHook(LastHook):
    """Last of a module's forward pre-hooks: observers, then the inputs' gradients; keeps our places."""

    __slots__ = ()

    slot = "pre_back"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = _ABSENT) -> Any:
        if is_dynamo_compiling():
            return _handed_back(kwargs, trace.run_pre(self, module, args, kwargs))
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
        module_hooks.entered = began if began >= 0 else next_order()
        if kwargs is _ABSENT:
            return None
        call = GradientCall(module_hooks, module)
        call.order = module_hooks.entered
        return call.enter(args, kwargs)


class FirstForwardHook(TorchHook):
    """First of a module's forward hooks: raw observers, edits."""

    __slots__ = ()

    slot = "post_front"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _ABSENT) -> Any:
        if output is _ABSENT:
            kwargs, output = {}, kwargs
        if is_dynamo_compiling():
            return trace.run_post(self, module, args, kwargs, output)
        given = output
        guard = self.module_hooks.guard
        if guard is not None:
            guard.note(args, kwargs, output)
        back = self.module_hooks.last_hook(LastForwardHook)
        later = () if back is None else back.entries
        if back is not None:
            back.release()
        for entry in self.entries:
            result = run_one_post(entry, module, args, kwargs, output)
            if result is not None and entry.attachment.order_group is _EDIT:
                output = result
                if guard is not None:
                    guard.note(args, kwargs, output)
        if back is not None:
            back.hold(later)
        return None if output is given else output


class LastForwardHook(LastHook):
    """Last of a module's forward hooks: observers, then the outputs' gradients."""

    __slots__ = ()

    slot = "post_back"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _ABSENT) -> Any:
        if output is _ABSENT:
            kwargs, output = {}, kwargs
        if is_dynamo_compiling():
            return trace.run_post(self, module, args, kwargs, output)
        if self.entries or self._held is not None:
            for entry in self.due()[0]:
                run_one_post(entry, module, args, kwargs, output)
        module_hooks = self.module_hooks
        if not module_hooks.has_gradients:
            if len(module._forward_hooks) > 1:
                module_hooks.keep_places()
            return None
        module_hooks.calls_seen += 1
        if not torch.is_grad_enabled():
            return None
        state = kwargs if isinstance(kwargs, CallState) else getattr(args, "state", None)
        if state is None:  # a pre-hook behind ours has made new keyword arguments: the inputs are lost
            state = GradientCall(module_hooks, module).enter((), {})[1]
            state.call.order = module_hooks.entered
        watched = state.call.leave(output, state)
        if module_hooks.backward_pre and _torch.has_backward_hooks(module):
            hooks = _torch.backward_hooks_of_call()
            if hooks is not None:
                run_before_torch(state.call, hooks, output, state)
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

    # torch marks its state_dict post-hooks by an attribute, which a bound method would not take.
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
    """Keeps the module_hooks of a module alive whose hooks torch calls from elsewhere; does nothing."""

    __slots__ = ()

    def __call__(self, module: nn.Module, *args: Any) -> None:
        return None


def run_one_pre(entry: HookAtSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One forward pre-hook."""
    if entry.simple:
        entry.count()
        return entry.hook(module, args)
    if not entry.due():
        return None
    entry.count()
    return entry.call(module, (args, kwargs) if entry.attachment.with_kwargs else (args,))


def run_one_post(
    entry: HookAtSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """One forward hook."""
    if entry.simple:
        entry.fired += 1  # entry.count(), without the call: this is the hot path
        entry.last_step = entry.counter.step
        return entry.hook(module, args, output)
    if not entry.due():
        return None
    entry.count()
    attachment = entry.attachment
    if attachment.always_call and entry.container.guard is not None:
        entry.container.guard.note_ran(entry)
    return entry.call(module, (args, kwargs, output) if attachment.with_kwargs else (args, output))


def _handed_back(kwargs: Any, new: tuple[Any, Any] | None) -> Any:
    """What a pre-hook returns to torch."""
    return new[0] if new is not None and kwargs is _ABSENT else new


def _new_arguments(entry: HookAtSite, result: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a pre-hook's return value makes of the arguments."""
    if not entry.attachment.with_kwargs:
        return result if isinstance(result, tuple) else (result,), kwargs
    if isinstance(result, tuple) and len(result) == 2:
        args, named = result
        if isinstance(args, tuple) and isinstance(named, dict):
            return args, named
    raise HookReturnError(
        f"forward_pre hook {entry.attachment.name!r} on {entry.name!r} takes kwargs, so it must return None or "
        f"(new_args, new_kwargs), a tuple and a dict, but got {result!r}."
    )


# Where only what is inside a module is compiled, the compiler meets the module's own hooks as functions to compile.
for _torch_hook in (
    FirstPreHook,
    LastPreHook,
    FirstForwardHook,
    LastForwardHook,
    FullBackwardHook,
    StateHook,
    AnchorHook,
    StaleHook,
):
    _torch.leave_to_python(_torch_hook.__call__)
