"""Find hooks over time by name, and choose those of a manager.

Users and packages register classes (by decorator, entry point or path); `HookManager` and the command line look them
up. A hook is imported and made when it is selected.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final, TypeVar, overload

from hookline.error_policy import error_text, warn_user
from hookline.errors import HookNameError, HookSignatureError, OptionError
from hookline.lifecycle.hook import InterventionHook, MetricInfo, TrackerHook, TrainingHook, is_tracker
from hookline.messages import type_name, unknown_name_text
from hookline.plain import own_copy
from hookline.when import HookPoint, validate_points

_Class = TypeVar("_Class", bound=type[TrainingHook])
_GROUP: Final = "hookline.hooks"
_ANALYSES: Final = "hookline.analyses"
_TOOLS: Final = {
    "first_bad_operation": "hookline.debug.first_bad.find_bad_operations:FirstBadOperation",
    "flight_recorder": "hookline.debug.first_bad.flight_recorder:FlightRecorder",
}
"""Hooks of ``hookline.debug``: selected by their own names alone, since they look for faults and measure nothing."""
_SCOPES: Final = ("reads", "grads", "trains")
_CALLS: Final = {"compute": "compute(self, ctx)", "intervene": "intervene(self, run_ctx, model_ctx)"}


class HookRegistry:
    """All hooks that can be selected by name.

    Recipe::

        @hookline.HookRegistry.register
        class MyHook(hookline.TrainingHook):
            name = "my_hook"
            hook_points = {hookline.HookPoint.POST_EPOCH}

            def compute(self, ctx):
                return {"my_metric": 1.0}


        hookline.HookManager(["my_hook"])

    Another package makes its hooks known by an entry point: ``[project.entry-points."hookline.hooks"]`` with
    ``my_hook = "my_package.hooks:MyHook"``.
    """

    groups: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Names that stand for several hooks, see ``add_group``."""
    _hooks: ClassVar[dict[str, type[TrainingHook] | str | EntryPoint | None]] = {}
    """By name: a class, or where it is to be imported from; None while that is done."""
    _has_entry_points: ClassVar[bool] = False
    _loading: ClassVar[threading.RLock] = threading.RLock()
    """One thread at a time; it may load one hook while it loads another."""

    # -- making known ------------------------------------------------------------------------------------

    @overload
    @classmethod
    def register(cls, hook: _Class) -> _Class: ...
    @overload
    @classmethod
    def register(cls, hook: str | None = None) -> Callable[[_Class], _Class]: ...
    @classmethod
    def register(cls, hook: Any = None) -> Any:
        """Register a class: as ``@register``, ``@register()`` or ``@register("name")``; return the class, untouched.

        A class registered again (a cell of a notebook that is run twice) takes the place of its former self; another
        class under a name that is taken is an error.
        """
        if isinstance(hook, type):
            return cls._add(hook, "")
        return lambda later: cls._add(later, hook or "")

    @classmethod
    def _add(cls, hook: Any, name: str) -> Any:
        if not (isinstance(hook, type) and issubclass(hook, TrainingHook)):
            raise HookSignatureError(f"register() takes a class derived from TrainingHook, got {hook!r}.")
        name = name or hook.name
        check_hook(hook)
        there = _path(cls._hooks.get(name))
        if name in cls._tokens() or name in cls.groups:
            there = "a word that stands for several hooks"
        if there not in ("", _path(hook)):
            raise HookNameError(f'The name {name!r} is taken by {there}; say @HookRegistry.register("another_name").')
        cls._hooks[name] = hook
        return hook

    @classmethod
    def register_path(cls, name: str, path: str) -> None:
        """Register a class by ``"package.module:Class"``; it is imported when it is used."""
        if not isinstance(cls._hooks.get(name), type):
            cls._hooks[name] = path

    @classmethod
    def add_group(cls, name: str, hooks: Iterable[str]) -> None:
        """Let a name stand for several hooks."""
        if name in cls._tokens() or name in cls.known():
            raise HookNameError(f"The name {name!r} is taken, so it cannot stand for a group; take another.")
        cls.groups[name] = (hooks,) if isinstance(hooks, str) else tuple(hooks)

    # -- asking ------------------------------------------------------------------------------------------

    @classmethod
    def get(cls, name: str) -> type[TrainingHook]:
        """Return the class of that name."""
        hook = cls._hooks.get(name)
        if isinstance(hook, type):
            return hook
        with cls._loading:
            return cls._load(name)

    @classmethod
    def known(cls) -> list[str]:
        """Return all names, debug hooks included, without importing their classes."""
        if not cls._has_entry_points:
            cls._has_entry_points = True
            for point in entry_points(group=_GROUP):
                cls._hooks.setdefault(point.name, point)
        return list(cls._hooks)

    @classmethod
    def list_all(cls) -> list[str]:
        """Return the names of all hooks but those for debugging, in the order they were registered."""
        return [name for name, hook in cls._all().items() if not hook.debug]

    @classmethod
    def list_observers(cls) -> list[str]:
        """Return the names of the hooks that only observe."""
        return [name for name in cls.list_all() if not issubclass(cls.get(name), InterventionHook)]

    @classmethod
    def list_interventions(cls) -> list[str]:
        """Return the names of the hooks that intervene."""
        return [name for name in cls.list_all() if issubclass(cls.get(name), InterventionHook)]

    @classmethod
    def list_debug(cls) -> list[str]:
        """Return the names of the hooks for debugging."""
        return [name for name, hook in cls._all().items() if hook.debug]

    @classmethod
    def get_all_info(cls) -> dict[str, dict[str, Any]]:
        """Return for every hook its role (as ``"kind"``: observer or intervention), description, needs and points."""
        return {name: _info(hook) for name, hook in cls._all().items()}

    @classmethod
    def get_info(cls, name: str) -> dict[str, Any]:
        """Return the same for one hook."""
        return _info(cls.get(name))

    @classmethod
    def describe(cls, name: str) -> list[MetricInfo]:
        """Return what the metrics of a hook mean; makes a hook to ask it."""
        (hook,) = cls.create([name])
        return hook.describe_metrics()

    # -- selecting ---------------------------------------------------------------------------------------

    @classmethod
    def resolve(cls, tokens: Iterable[str] | str) -> list[str]:
        """Return the hooks that names and groups stand for; and ``"all"``, ``"observers"``, …, ``"with_debug"``.

        Each once, in the order it was first named.
        """
        words = cls._tokens() | {name: lambda hooks=hooks: list(hooks) for name, hooks in cls.groups.items()}
        given = [tokens] if isinstance(tokens, str) else tokens
        found = [name for token in given for name in (words[token]() if token in words else [token])]
        for name in found:
            cls.get(name)
        return list(dict.fromkeys(found))

    @classmethod
    def _tokens(cls) -> dict[str, Callable[[], list[str]]]:
        return {
            "all": cls.list_all,
            "observers": cls.list_observers,
            "interventions": cls.list_interventions,
            "with_debug": lambda: [name for name in cls.list_debug() if name not in _TOOLS],
        }

    @classmethod
    def create(
        cls, names: Iterable[str] | str, config: Mapping[str, Mapping[str, Any]] | None = None
    ) -> list[TrainingHook]:
        """Make the hooks of these names, each with its arguments from ``config``."""
        config = config or {}
        names = cls.resolve(names)
        for name in config.keys() - set(names):
            raise HookNameError(f"config is for {name!r}, which is no hook here.{unknown_name_text(name, names)}")
        made = [make_hook(cls.get(name), config.get(name, {})) for name in names]
        for name, hook in zip(names, made, strict=True):
            hook.name = name
        return made

    # -- finding -----------------------------------------------------------------------------------------

    @classmethod
    def _all(cls) -> dict[str, type[TrainingHook]]:
        """Return all classes; one that cannot be imported is passed over, with a warning."""
        found = {}
        with cls._loading:
            for name in cls.known():
                try:
                    found[name] = cls._load(name)
                except Exception as error:
                    warn_user(f"The hook {name!r} cannot be loaded ({error_text(error)}) and is passed over.")
        return found

    @classmethod
    def _load(cls, name: str) -> type[TrainingHook]:
        known = cls.known()
        where = cls._hooks.get(name)
        if isinstance(where, type):
            return where
        if where is None:
            raise HookNameError(f"Unknown hook: {name!r}.{unknown_name_text(name, known, 'Available')}")
        cls._hooks[name] = None  # its module may register it, from wherever it is defined
        try:
            hook = pkgutil.resolve_name(where) if isinstance(where, str) else where.load()
            cls._hooks[name] = None
            added: type[TrainingHook] = cls._add(hook, name)
            return added
        except BaseException:
            cls._hooks[name] = where
            raise


def _path(hook: type | str | EntryPoint | None) -> str:
    """Return where a hook is, ``"module:Class"``; nothing for one that is not there."""
    if isinstance(hook, type):
        return f"{hook.__module__}:{hook.__qualname__}"
    return hook if isinstance(hook, str) else "" if hook is None else hook.value


def _points_in_any_loop(hook: type[TrainingHook] | TrainingHook) -> frozenset[HookPoint]:
    """Return the points of a hook in any loop; those that each object works out for itself are not known here."""
    by_loop = hook.loop_points.values() if isinstance(hook.loop_points, Mapping) else ()
    declared = [points for points in (hook.hook_points, *by_loop) if points and not isinstance(points, property)]
    return frozenset().union(*map(validate_points, declared))


def _info(hook: type[TrainingHook]) -> dict[str, Any]:
    return {
        "kind": "intervention" if issubclass(hook, InterventionHook) else "observer",
        "description": hook.description or (hook.__doc__ or "").strip().partition("\n")[0],
        "debug": hook.debug,
        "hook_points": sorted(point.name for point in _points_in_any_loop(hook)),
        "needs": [name for name in dir(hook) if name.startswith("needs_") and getattr(hook, name)],
    }


def register_built_ins() -> None:
    """Register the hooks that come with hookline, by path, so that training does not import them."""
    for name, path in (importlib.import_module(_ANALYSES).BUILT_IN | _TOOLS).items():
        HookRegistry.register_path(name, path)


# -- checking and making -----------------------------------------------------------------------------------------


def check_hook(hook: TrainingHook | type[TrainingHook]) -> None:
    """Check that ``compute`` and ``intervene`` are there and take what they will be given."""
    cls = hook if isinstance(hook, type) else type(hook)
    is_intervention = issubclass(cls, InterventionHook)
    method, base = ("intervene", InterventionHook) if is_intervention else ("compute", TrainingHook)
    if getattr(cls, method) is getattr(base, method):
        raise HookSignatureError(f"{cls.__name__} has to say what it does: define {_CALLS[method]}.")
    gives = cls.get_state_tensors is not TrainingHook.get_state_tensors
    if gives and all(getattr(cls, n) is getattr(TrainingHook, n) for n in ("set_state_tensors", "load_state_dict")):
        raise HookSignatureError(
            f"{cls.__name__} hands out get_state_tensors() and cannot take them back, so a resumed run would continue "
            "without: define set_state_tensors(self, tensors)."
        )
    _check_call(cls, "compute", 1)
    if is_intervention:
        _check_call(cls, "intervene", 2)
        if hook.scope not in _SCOPES:  # type: ignore[union-attr]
            raise OptionError(f"scope of hook {hook.name!r} is one of {', '.join(_SCOPES)}; got {hook.scope!r}.")  # type: ignore[union-attr]


def _check_call(cls: type[TrainingHook], method: str, count: int) -> None:
    function = inspect.getattr_static(cls, method)
    if not inspect.isfunction(function):
        return  # a static or class method, a partial: whoever does that knows what it takes
    signature, wanted = inspect.signature(function), _CALLS[method]
    try:
        signature.bind(*[None] * (count + 1))
    except TypeError as error:
        raise HookSignatureError(f"{cls.__name__}.{method}{signature} cannot be called as {wanted}: {error}.") from None


def make_hook(cls: type[TrainingHook], options: Mapping[str, Any]) -> TrainingHook:
    """Make a hook of class `cls` with a copy of `options`; an argument it does not take is an error that names it."""
    options = own_copy(dict(options))
    parameters = inspect.signature(cls).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in options if name not in names]
    if unknown and not takes_any:
        known = ", ".join(names) or "no arguments"
        raise OptionError(f"Hook {cls.name!r} takes no {', '.join(map(repr, unknown))}; it takes {known}.")
    return cls(**options)


# -- the hooks of a manager --------------------------------------------------------------------------------------


def choose_hooks(
    names: Iterable[str] | str | None, given: Iterable[Any] | None, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all hooks of a manager, by name.

    Args:
        names: Hooks by their names, and words that stand for several.
        given: Hooks as objects or classes, trackers and watches.
        config: Arguments of hooks, by name.
    """
    for option, value in (("hook_names", names), ("hooks", given)):
        if value is not None and (not isinstance(value, Iterable) or isinstance(value, type) or is_tracker(value)):
            raise OptionError(f"{option}= takes a list; got {type_name(value)}: put hooks into one, hooks=[MyHook()].")
    names = HookRegistry.resolve(names or ())
    unused = {name: dict(options) for name, options in config.items()}
    made = HookRegistry.create(names, {name: unused.pop(name) for name in names if name in unused})
    found: dict[str, TrainingHook] = {hook.name: hook for hook in made}
    for hook in [_as_hook(thing, unused) for thing in given or ()]:
        check_hook(hook)
        if hook.name in found:
            raise HookNameError(
                f"Two hooks are called {hook.name!r} ({type(found[hook.name]).__name__} and {type(hook).__name__}); "
                "set .name of one of them."
            )
        found[hook.name] = hook
    for name in unused:
        if name in found:
            raise OptionError(f"hook_config for {name!r}: it was given as an object, which has its arguments already.")
        if name not in HookRegistry.known():
            there = unknown_name_text(name, [*found, *HookRegistry.known()], "Available")
            raise HookNameError(f"hook_config: Unknown hook: {name!r}.{there}")
        warn_user(f"hook_config for {name!r} has no effect: that hook is not selected.")
    return found


def _as_hook(thing: Any, unused: dict[str, dict[str, Any]]) -> TrainingHook:
    if isinstance(thing, type) and issubclass(thing, TrainingHook):
        return make_hook(thing, unused.pop(thing.name, {}))
    if isinstance(thing, TrainingHook):
        return thing
    if is_tracker(thing) and not isinstance(thing, type):
        return TrackerHook(thing)
    remedy = "; hooks by name go into hook_names=" if isinstance(thing, str) else ""
    if isinstance(thing, type) and is_tracker(thing):
        remedy = f": call it, hooks=[{thing.__name__}()]"
    raise OptionError(f"hooks= takes TrainingHooks, trackers and watches; got {type_name(thing)}{remedy}.")


register_built_ins()
