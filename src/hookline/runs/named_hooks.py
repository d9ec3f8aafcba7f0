"""Find and make the hooks that a run file or the command line names.

`run_hooks` of the command line and the run files of adapters call it, so that a name means the same in both: a file is
relative to the folder of the run file that names it, or else to the current folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.load import load_object

if TYPE_CHECKING:
    from hookline.lifecycle.hook import TrainingHook

__all__ = ["ALWAYS", "known_name", "make_tracker"]

ALWAYS: Final = "training_metrics"
"""The hook that every run has: loss, accuracy and learning rate."""


def known_name(name: str) -> str:
    """Return the name of a hook; one in a file or a module (``file.py:Class``) is registered first."""
    if "," in name:
        raise OptionError(f"--hooks {name}: names of hooks have blanks between them: {' '.join(name.split(','))}.")
    if ":" not in name:
        return name
    from hookline.lifecycle.hook import TrainingHook
    from hookline.lifecycle.registry import HookRegistry

    found = load_object(name, wanted="a hook")
    if not (isinstance(found, type) and issubclass(found, TrainingHook)):
        raise OptionError(f"--hooks {name}: that is {found!r}, and a hook is a class derived from TrainingHook.")
    if found.name not in HookRegistry.known() or HookRegistry.get(found.name) is not found:
        HookRegistry.register(found)
    return found.name


def make_tracker(
    name: str, tracker: str, targets: Sequence[str], exclude: Sequence[str], options: Mapping[str, Any]
) -> TrainingHook:
    """Return a tracker of modules as a hook that reports it; no ``targets`` stand for the layers of its kind."""
    from hookline.lifecycle.registry import HookRegistry

    where = {"targets": ",".join(targets) or None, "exclude": list(exclude) or None}
    (hook,) = HookRegistry.create([tracker], {tracker: {**options, **where}})
    hook.name = name
    return hook
