"""Which hooks a run has: a group of the experiment, hooks by name, hooks from files, and always `training_metrics`.

Takes the flags, hands names to `HookManager`; an empty list, which only ``none`` gives, is no manager at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from hookline.cli.load_object import load_object, nearest_text
from hookline.errors import HookNameError, OptionError

__all__ = ["ALWAYS", "choose_hooks", "known_name"]

ALWAYS: Final = "training_metrics"
"""Loss, accuracy and learning rate flow beside whatever else is asked for."""
_NONE: Final = "none"
"""The group of no hooks: every experiment has it."""


def choose_hooks(
    group: str | None,
    names: Sequence[str] | None,
    hook_sets: Mapping[str, Sequence[str]] | None,
    experiment: str,
    at: Callable[[Sequence[str | int]], AbstractContextManager[None]] = lambda path: nullcontext(),
) -> list[str]:
    """Return the names of the hooks, each once, `training_metrics` first and always; none if that is asked for.

    Args:
        group: What ``--with-hooks`` says.
        names: What ``--hooks`` says; None if it is not given, empty if it is given bare; ``none`` is the group.
        hook_sets: The groups of the experiment; None if it is not known which experiment that is.
        experiment: Its name, for messages.
        at: Collects the error about what stands at a path of a file (``["hooks", "names", 2]``); one about a flag it
            lets through.
    """
    from hookline.training.registry import HookRegistry

    if names is not None and list(names) == [_NONE]:
        group, names = group or _NONE, None
    found: list[str] = []
    if group is not None and hook_sets is not None:
        with at(["hooks", "with_hooks"]):
            found += _of_group(group, hook_sets, experiment)
    for place, name in enumerate(names or ()):
        with at(["hooks", "names", place]):
            found += HookRegistry.resolve([known_name(name)])
    if not found and names is None and group is not None:
        return []
    return list(dict.fromkeys([ALWAYS, *found]))


def _of_group(group: str, hook_sets: Mapping[str, Sequence[str]], experiment: str) -> list[str]:
    from hookline.training.registry import HookRegistry

    if group == _NONE and _NONE not in hook_sets:
        return []
    if not hook_sets:
        raise HookNameError(
            f"--with-hooks {group}: {experiment} names no groups of hooks (hook_sets); choose hooks with --hooks NAME."
        )
    if group not in hook_sets:
        raise HookNameError(f"Unknown group of hooks: {group!r}.{nearest_text(group, list(hook_sets), 'Groups')}")
    return [name for name in HookRegistry.resolve(hook_sets[group]) if not HookRegistry.get(name).debug]


def known_name(name: str) -> str:
    """The name; of a hook in a file or a module, the name it is registered by from now on."""
    if "," in name:
        raise OptionError(f"--hooks {name}: names of hooks have blanks between them: {' '.join(name.split(','))}.")
    if ":" not in name:
        return name
    from hookline.training.registry import HookRegistry
    from hookline.training.training_hook import TrainingHook

    found = load_object(name, wanted="a hook")
    if not (isinstance(found, type) and issubclass(found, TrainingHook)):
        raise OptionError(f"--hooks {name}: that is {found!r}, and a hook is a class derived from TrainingHook.")
    if found.name not in HookRegistry.known() or HookRegistry.get(found.name) is not found:
        HookRegistry.register(found)
    return found.name
