"""Know how each metric of a run is reduced over ranks: as the hook that returns it declares.

`RankSync` asks for the rule of every metric that goes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from hookline.distributed.metric_rules import check_rule
from hookline.errors import OptionError
from hookline.messages import type_name

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook

__all__ = ["USUAL_RULE", "ReduceRules", "checked_reduce"]

USUAL_RULE: Final = "mean"
"""The rule of a metric that no hook says anything about: the loss, an evaluation, `hookline.record`."""


class ReduceRules:
    """Find the rule of a metric by its name; each name is looked up once."""

    def __init__(self, hooks: Mapping[str, TrainingHook]) -> None:
        self._prefixed = {f"{name}/": _patterns(hook) for name, hook in hooks.items()}
        self._rooted = [(tuple(hook.roots), _patterns(hook)) for hook in hooks.values() if hook.roots]
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the rule of the metric ``"hook/metric"``."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._find(name)
        return found

    def _find(self, name: str) -> str:
        # The longest name first: a hook may be called "a" and another one "a/b".
        for prefix in sorted(self._prefixed, key=len, reverse=True):
            if name.startswith(prefix):
                return _match(name[len(prefix) :], self._prefixed[prefix])
        for roots, patterns in self._rooted:
            if name.startswith(roots):
                return _match(name, patterns)
        return USUAL_RULE


def checked_reduce(hook: str, given: Any) -> str | dict[str, str]:
    """Return what a hook declares as ``reduce``; raise if it is neither a rule nor rules by pattern."""
    if isinstance(given, str):
        return _checked(hook, given)
    if isinstance(given, Mapping):
        return {str(pattern): _checked(hook, rule) for pattern, rule in given.items()}
    raise OptionError(
        f'Hook {hook!r} declares reduce = {type_name(given)}; it is a rule ("mean"), or rules by pattern of metrics '
        '({"count": "sum", "*": "mean"}).'
    )


def _checked(hook: str, rule: Any) -> str:
    try:
        return check_rule(rule)
    except OptionError as error:
        raise OptionError(f"Hook {hook!r}, reduce: {error}") from None


def _patterns(hook: TrainingHook) -> list[tuple[str, str]]:
    declared = checked_reduce(hook.name, hook.reduce)
    return [("*", declared)] if isinstance(declared, str) else list(declared.items())


def _match(name: str, patterns: Iterable[tuple[str, str]]) -> str:
    return next((rule for pattern, rule in patterns if fnmatchcase(name, pattern)), USUAL_RULE)
