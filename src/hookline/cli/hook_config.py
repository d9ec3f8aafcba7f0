"""Turn ``--hook-config hook.param=value`` into arguments, typed as the hook's signature declares them.

`run_request` calls `read_hook_config` with the flags and with what a run file says; `HookObjects` gets the arguments.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import HookNameError, OptionError
from hookline.messages import unknown_name_text

if TYPE_CHECKING:
    from hookline.runs.mistakes import Mistakes

__all__ = ["as_declared", "file_argument", "read_hook_config"]

_REFERENCE: Final = "reference_weights"
"""Not a hook, but the weights that hooks compare with; `HookManager` gets its ``path``."""
_TRUE: Final = ("true", "yes", "on", "1")
_FALSE: Final = ("false", "no", "off", "0")
_SEQUENCES: Final = (list, tuple, set, frozenset, Sequence, Iterable)


def read_hook_config(
    items: Sequence[str],
    given: Mapping[str, Mapping[str, Any]],
    hooks: Sequence[str] | None,
    mistakes: Mistakes,
) -> dict[str, dict[str, Any]]:
    """Return arguments by hook: those of a file, checked, and over them those of the flags, converted.

    Args:
        items: ``hook.param=value`` each.
        given: What a file says.
        hooks: The hooks of the run; for another an argument would have no effect, and is an error. None if they are
            not known, since the file does not say them right.
        mistakes: What is wrong with the file.
    """
    found: dict[str, dict[str, Any]] = {}
    for hook, arguments in given.items():
        _from_file(hook, arguments, hooks, mistakes, found.setdefault(hook, {}))
    for item in items:
        hook, name, text = _split(item)
        found.setdefault(hook, {})[name] = _from_flag(hook, name, text, hooks)
    return found


def _split(item: str) -> tuple[str, str, str]:
    path, equals, text = item.partition("=")
    hook, dot, name = path.partition(".")
    if not (equals and dot and hook and name):
        raise OptionError(f"Invalid --hook-config format: '{item}' (expected hook_name.param=value)")
    return hook, name, text


def _from_flag(hook: str, name: str, text: str, hooks: Sequence[str] | None) -> Any:
    said = f"--hook-config {hook}.{name}"
    if hook == _REFERENCE:
        _check_reference(name, f"{said}: ")
        return text
    _check_is_on(hook, hooks, said, unknown="--hook-config: ")
    parameter, hint = _parameter(hook, name)
    try:
        return as_declared(text, hint, parameter.default)
    except ValueError as error:
        raise OptionError(f"{said}: {error}, got {text!r}.") from None


def _from_file(
    hook: str, arguments: Mapping[str, Any], hooks: Sequence[str] | None, mistakes: Mistakes, found: dict[str, Any]
) -> None:
    """Put the arguments that a file has for a hook into `found`, but for those that are wrong."""
    here = ("hooks", "config", hook)
    before = len(mistakes)
    if hook != _REFERENCE and arguments:
        with mistakes.at(*here):
            _check_is_on(hook, hooks, "this")
    if len(mistakes) > before:
        return
    for name, value in arguments.items():
        with mistakes.at(*here, name):
            if hook == _REFERENCE:
                _check_reference(name)
            found[name] = value if hook == _REFERENCE else file_argument(hook, name, value)


def file_argument(hook: str, name: str, value: Any) -> Any:
    """Return a value of a file as the hook's signature declares it."""
    from hookline.runs.run_file import validate_value

    parameter, hint = _parameter(hook, name)
    return value if hint is parameter.empty else validate_value(value, hint)


def _check_reference(name: str, said: str = "") -> None:
    if name != "path":
        raise OptionError(f"{said}reference weights have a path, and nothing else.")


def _check_is_on(hook: str, hooks: Sequence[str] | None, said: str, *, unknown: str = "") -> None:
    """Raise unless the hook is known, and one of this run, if those are known."""
    from hookline.lifecycle.registry import HookRegistry

    known = HookRegistry.known()
    if hook not in known:
        raise HookNameError(f"{unknown}Unknown hook: {hook!r}.{unknown_name_text(hook, known, 'Available')}")
    if hooks is not None and hook not in hooks:
        raise OptionError(
            f"{said} would have no effect: {hook} is not among the hooks of this run ({', '.join(hooks) or 'none'}); "
            f"add it: --hooks {hook}."
        )


def _parameter(hook: str, name: str) -> tuple[inspect.Parameter, Any]:
    """Return an argument of the hook's signature, and its type."""
    from hookline.lifecycle.registry import HookRegistry

    cls = HookRegistry.get(hook)
    parameters = inspect.signature(cls).parameters
    takes = [one.name for one in parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if name not in takes:
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY), inspect.Parameter.empty
        raise OptionError(f"Hook {hook!r} takes no {name!r}.{unknown_name_text(name, takes, 'It takes')}")
    return parameters[name], _hints(cls).get(name, parameters[name].annotation)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(vars(cls).get("__init__") or inspect.getattr_static(cls, "__init__"))
    except (NameError, TypeError, AttributeError):  # a name that only a type checker sees
        return {}


# -- text as a type --------------------------------------------------------------------------------------------


def as_declared(text: str, hint: Any, default: Any = inspect.Parameter.empty) -> Any:
    """Return a text as the declared type has it; ValueError says what was expected.

    Recipe: ``as_declared("2,5,10", tuple[int, ...])`` is ``(2, 5, 10)``. Without a declaration the default's type
    counts; without either a number is a number, true and false are bool, and the rest is text.
    """
    if isinstance(hint, str) or hint in (inspect.Parameter.empty, Any):
        if default is inspect.Parameter.empty or default is None:
            return _guessed(text)
        hint = type(default)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return as_declared(text, typing.get_args(hint)[0], default)
    if origin is typing.Literal:
        return _one_of(text, typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return _any_of(text, typing.get_args(hint))
    if (origin or hint) in _SEQUENCES:
        return _several(text, origin or hint, typing.get_args(hint))
    return _single(text, hint)


def _single(text: str, hint: Any) -> Any:
    if hint is type(None):
        if text.lower() in ("none", "null", ""):
            return None
        raise ValueError("expected none")
    if hint is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError("expected true or false")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError(f"expected {'a whole number' if hint is int else 'a number'}") from None
    if hint in (str, object):
        return text
    return _guessed(text)  # a type that has no spelling here: the hook will say whether it will do


def _any_of(text: str, hints: Sequence[Any]) -> Any:
    # None first, as "none" is a text as well; text last, as everything is one.
    order = sorted(hints, key=lambda hint: (hint is not type(None), hint is str))
    said = []
    for hint in order:
        try:
            return as_declared(text, hint)
        except ValueError as error:
            said.append(str(error).removeprefix("expected "))
    raise ValueError(f"expected {' or '.join(said)}")


def _one_of(text: str, choices: Sequence[Any]) -> Any:
    for choice in choices:
        if str(choice).lower() == text.lower():
            return choice
    raise ValueError(f"expected one of {', '.join(map(str, choices))}")


def _several(text: str, kind: Any, hints: Sequence[Any]) -> Any:
    parts = [part.strip() for part in text.strip("[]()").split(",") if part.strip()]
    if kind is tuple and hints and Ellipsis not in hints:
        if len(parts) != len(hints):
            raise ValueError(f"expected {len(hints)} values, with commas between them")
        return tuple(as_declared(part, hint) for part, hint in zip(parts, hints, strict=True))
    values = [as_declared(part, hints[0] if hints else Any) for part in parts]
    return values if kind in (list, Sequence, Iterable) else kind(values)


def _guessed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
