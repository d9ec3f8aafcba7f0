"""Whether a hook over time can be called, found out when it is registered or given to a manager, not when it is due.

Asked by `HookRegistry` and `HookManager`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from hookline.errors import HookSignatureError, OptionError
from hookline.specs.copy_config import own_copy
from hookline.training.training_hook import InterventionHook, TrainingHook

__all__ = ["check_hook", "make_hook"]

_SCOPES: Final = ("reads", "grads", "trains")


def check_hook(hook: TrainingHook | type[TrainingHook]) -> None:
    """That ``compute`` and ``intervene`` are there and take what they will be given."""
    cls = hook if isinstance(hook, type) else type(hook)
    is_intervention = issubclass(cls, InterventionHook)
    if not is_intervention and cls.compute is TrainingHook.compute:
        raise HookSignatureError(f"{cls.__name__} has to say what it observes: define compute(self, ctx).")
    if is_intervention and cls.intervene is InterventionHook.intervene:  # type: ignore[attr-defined]
        raise HookSignatureError(f"{cls.__name__} has to say what it does: define intervene(self, run_ctx, model_ctx).")
    if cls.get_state_tensors is not TrainingHook.get_state_tensors and not _takes_state_back(cls):
        raise HookSignatureError(
            f"{cls.__name__} hands out get_state_tensors() and cannot take them back, so a resumed run would go on "
            "without: define set_state_tensors(self, tensors)."
        )
    _check_call(cls, "compute", ("ctx",))
    if is_intervention:
        _check_call(cls, "intervene", ("run_ctx", "model_ctx"))
        if getattr(hook, "scope", None) not in _SCOPES:
            raise OptionError(
                f"scope of hook {hook.name!r} is one of {', '.join(map(repr, _SCOPES))}; got {hook.scope!r}."  # type: ignore[union-attr]
            )


def _takes_state_back(cls: type[TrainingHook]) -> bool:
    return (
        cls.set_state_tensors is not TrainingHook.set_state_tensors
        or cls.load_state_dict is not TrainingHook.load_state_dict
    )


def _check_call(cls: type[TrainingHook], method: str, arguments: tuple[str, ...]) -> None:
    function = inspect.getattr_static(cls, method)
    if not inspect.isfunction(function):
        return  # a static or class method, a partial: whoever does that knows what it takes
    signature = inspect.signature(function)
    try:
        signature.bind(None, *arguments)
    except TypeError as error:
        wanted = f"{method}(self, {', '.join(arguments)})"
        raise HookSignatureError(f"{cls.__name__}.{method}{signature} cannot be called as {wanted}: {error}.") from None


def make_hook(cls: type[TrainingHook], options: Mapping[str, Any]) -> TrainingHook:
    """Make a hook of class `cls` with a copy of `options`; an argument it does not take is an error that names it."""
    options = own_copy(dict(options))
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # pragma: no cover  (a class whose metaclass hides it)
        return cls(**options)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in options if name not in names]
    if unknown and not takes_any:
        raise OptionError(
            f"Hook {cls.name!r} takes no {', '.join(map(repr, unknown))}; it takes "
            f"{', '.join(names) or 'no arguments'}."
        )
    return cls(**options)
