"""Put on whatever people call a hook: lifecycle hooks, specs, functions of a model, context managers, torch hooks.

`audit` makes an `AuditedHook` of each that it was given; `train_once` puts a fresh copy of it on at every training.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn
from torch.optim import Optimizer

from hookline.errors import OptionError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.hook import TrainingHook
from hookline.messages import type_name
from hookline.observe.watch.step_alarm import StepAlarm
from hookline.observe.watch.watch import Watch
from hookline.sites.handle import HandleSet, HookHandle

if TYPE_CHECKING:
    from hookline.integrations.first_step import FirstStep

__all__ = ["AuditedHook", "audited_hooks", "follow_with", "needed_arguments", "put_around", "put_on_model"]

_Way = Literal["lifecycle", "specs", "model", "around", "forward"]
_SPEC_FILES: Final = (".json", ".toml", ".yaml", ".yml")
_LONGEST: Final = 40
_FORWARD_HOOK: Final = 3
"""How many arguments a torch forward hook takes: module, arguments, output."""


@dataclass(frozen=True)
class AuditedHook:
    """A hook by its name, and the way in which it is put on."""

    name: str
    given: Any
    way: _Way | None = None
    """None: the training puts it on itself."""

    def fresh(self) -> Any:
        """Return a copy without what an earlier training left in it; what cannot be copied, as it is."""
        try:
            return copy.deepcopy(self.given)
        except Exception:
            return self.given


def audited_hooks(hooks: Any, *, by_training: bool) -> list[AuditedHook]:
    """Return the hooks one by one, each with a name of its own.

    Args:
        hooks: One hook, several, or several by name.
        by_training: Whether the training puts them on; then they may be anything.
    """
    named = hooks if isinstance(hooks, Mapping) else None
    if named is not None and "target_modules" in named:
        named, hooks = None, [hooks]  # one spec
    listed = list(named.items()) if named is not None else [("", one) for one in _as_list(hooks)]
    if not listed:
        raise OptionError("audit(train_fn, hooks) was given no hooks: name at least one.")
    found: list[AuditedHook] = []
    for name, given in listed:
        for each in [AuditedHook(name or _name_of(given), given)] if by_training else _known_hooks(name, given):
            found.append(AuditedHook(_unique(each.name, {one.name for one in found}), each.given, each.way))
    return found


def _as_list(hooks: Any) -> list[Any]:
    return list(hooks) if isinstance(hooks, Iterable) and not isinstance(hooks, str | nn.Module) else [hooks]


def _unique(name: str, taken: set[str]) -> str:
    number = 2
    while name in taken:
        base = name if number == 2 else name.rpartition(" ")[0]
        name, number = f"{base} {number}", number + 1
    return name


def _name_of(given: Any) -> str:
    if isinstance(given, str):
        return given
    named = getattr(given, "name", None)
    if isinstance(named, str) and named:
        return named
    if isinstance(given, Mapping):
        return str(given.get("name") or "spec")
    inner = getattr(given, "func", given)  # functools.partial
    if getattr(inner, "__name__", "") == "<lambda>":
        return f"lambda: {'.'.join(inner.__code__.co_names)}"[:_LONGEST]
    return str(getattr(inner, "__qualname__", None) or type(given).__name__).rpartition("<locals>.")[2]


# -- which way -------------------------------------------------------------------------------------------------


def _known_hooks(name: str, given: Any) -> list[AuditedHook]:
    if isinstance(given, str):
        return _named_hooks(name, given)
    return [AuditedHook(name or _name_of(given), given, _way_of(given))]


def _named_hooks(name: str, given: str) -> list[AuditedHook]:
    """Return what a string stands for: the specs of a file, an object of a module, a lifecycle hook or a group."""
    if given.endswith(_SPEC_FILES):
        from hookline.runs.documents import specs_of_file

        specs = specs_of_file(given)
        return [
            AuditedHook(str(spec.get("name") or f"{given}[{place}]"), spec, "specs") for place, spec in enumerate(specs)
        ]
    if ":" in given:
        from hookline.load import load_object

        return _known_hooks(name or given.rpartition(":")[2], load_object(given, wanted="a hook"))
    from hookline.lifecycle.registry import HookRegistry

    return [AuditedHook(one, one, "lifecycle") for one in HookRegistry.resolve([given])]


def _way_of(given: Any) -> _Way:
    from hookline.specs.hook_spec import HookSpec

    if isinstance(given, TrainingHook) or (isinstance(given, type) and issubclass(given, TrainingHook)):
        return "lifecycle"
    if isinstance(given, HookSpec | Mapping):
        return "specs"
    if isinstance(given, contextlib._GeneratorContextManager):
        raise OptionError(
            "A block made by @contextmanager can be entered once, and an audit trains several times: give the function "
            "that makes it, without calling it."
        )
    if isinstance(given, Watch | StepAlarm | HookHandle | HandleSet):
        raise OptionError(
            f"This {type(given).__name__} is on a model already, and an audit puts hooks on that of each training. "
            'Next: give the function that makes it: hooks={"watch": lambda model: hookline.watch(model)}.'
        )
    if isinstance(given, AbstractContextManager) and not isinstance(given, type):
        return "around"
    if not callable(given):
        raise OptionError(
            f"audit() cannot put {type_name(given)} on by itself. Next: give a function that does, "
            "hooks=[lambda model: …], or write train_fn(hooks) to get the hooks and put them on there."
        )
    return _way_of_function(given)


def _way_of_function(given: Callable[..., Any]) -> _Way:
    """Return the way by how many arguments a function needs."""
    count = needed_arguments(given)
    if count > _FORWARD_HOOK:
        raise OptionError(
            f"{_name_of(given)} needs {count} arguments. audit() calls functions of none (around the training), of one "
            "(the model) and of two (model, optimizer), and puts those of three on every module as forward hooks."
        )
    return "around" if count == 0 else "forward" if count == _FORWARD_HOOK else "model"


def needed_arguments(given: Callable[..., Any]) -> int:
    """Return how many positional arguments a function cannot do without."""
    try:
        parameters = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):  # some functions of C do not tell
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty and one.kind in kinds for one in parameters)


# -- put on ----------------------------------------------------------------------------------------------------


def put_around(hook: AuditedHook, stack: ExitStack) -> None:
    """Put on what goes around a whole training, before it begins."""
    if hook.way == "around":
        made = hook.fresh()
        _take_off_later(
            made() if not isinstance(made, AbstractContextManager) or isinstance(made, type) else made, stack
        )


def put_on_model(hook: AuditedHook, model: nn.Module, optimizer: Optimizer, stack: ExitStack) -> None:
    """Put on what goes on a model, before its first forward; ``stack`` takes it off."""
    if hook.way == "specs":
        from hookline.specs.apply_specs import close_hooks, hooks_of, register_hooks

        handles = register_hooks(model, [hook.given])
        stack.callback(lambda: close_hooks(hooks_of(handles)))
        stack.callback(handles.remove)
    elif hook.way == "forward":
        function = hook.fresh()
        for module in model.modules():
            stack.callback(module.register_forward_hook(function).remove)
    elif hook.way == "model":
        function = hook.fresh()
        _take_off_later(function(*(model, optimizer)[: max(1, needed_arguments(function))]), stack)


def _take_off_later(found: Any, stack: ExitStack) -> None:
    """Take off, at the end, what a function returned: a block, a handle, several of these; or nothing."""
    if isinstance(found, AbstractContextManager):
        stack.enter_context(found)
    elif isinstance(found, list | tuple):
        for each in found:
            _take_off_later(each, stack)
    else:
        for name in ("remove", "close"):
            if callable(getattr(found, name, None)):
                stack.callback(getattr(found, name))
                return


def _made(given: Any) -> TrainingHook:
    from hookline.lifecycle.registry import HookRegistry

    (made,) = HookRegistry.create([given]) if isinstance(given, str) else [given]
    return made() if isinstance(made, type) else made


def follow_with(hooks: list[AuditedHook], model: nn.Module, optimizer: Optimizer, first: FirstStep) -> Any:
    """Fire lifecycle hooks in the training from now on; return what follows it."""
    from hookline.integrations.follow import follow
    from hookline.integrations.snapshot_steps import can_count_steps
    from hookline.lifecycle.manager import HookManager

    with kept_rng():
        made = [_made(hook.fresh()) for hook in hooks]
    # A script is stopped long before its first epoch ends: hooks that can report by steps are asked after each.
    loop = "step" if can_count_steps(made) else "epoch"
    manager = HookManager(hooks=made, loop_type=loop, on_error="raise")  # without the hooks that every followed run has
    run = follow(model, optimizer, manager=manager, loader=first.loader, loop=loop, snapshot_every=1)
    first.hand_over(run)
    return run
