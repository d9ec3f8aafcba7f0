"""Take hooks, trackers, specs and sinks from a run file, for a run that a host trains.

`make_manager` calls it. What the file says of training itself (experiment, seed, device, checkpoints) is the host's to
decide, and is passed over, so that one file serves ``hookline run`` and every host.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.errors import ConfigError
from hookline.guard.rng import kept_rng
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.registry import HookRegistry
from hookline.messages import suggest
from hookline.runs.named_hooks import ALWAYS, known_name, make_tracker
from hookline.runs.named_sinks import sink_maker
from hookline.runs.run_file import RunFile, TrackerEntry
from hookline.runs.run_options import manager_options
from hookline.when import StepSchedule

__all__ = ["HooksOfFile"]

logger = logging.getLogger(__name__)


class HooksOfFile:
    """The part of a run file that concerns hooks.

    Recipe::

        file = HooksOfFile("run.yaml")
        manager = HookManager(hooks=file.make_hooks(), sinks=file.make_sinks(), **file.options)
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = file = RunFile.read(path)
        self._hooks: Any = file.hooks
        self.specs = file.given_specs()
        """Hooks on modules."""
        self.says_on_error = "on_error" in self._hooks.model_fields_set
        """Whether the file says what happens when a hook raises, and it is not only the default."""
        self.options = manager_options(file.flags(), self._hooks.config)
        """Other options of the manager."""
        ignored = sorted(file.model_fields_set - {"hooks", "specs", "enable_hooks", "trackers", "sinks"})
        if ignored:
            logger.info("%s: the trainer decides about %s", self._path, ", ".join(ignored))

    def make_hooks(self) -> list[TrainingHook]:
        """Make the hooks and trackers; the random streams of the run stay where they are."""
        names = self._names()
        config = {name: options for name, options in self._hooks.config.items() if name in names}
        with kept_rng():
            made = HookRegistry.create(names, config)
            self._set_schedules({hook.name: hook for hook in made})
            return made + [self._make_tracker(entry) for entry in self._file.trackers]

    def make_sinks(self) -> list[Any]:
        """Make the sinks."""
        return sink_maker(self._file.flags(), self._file.given_sinks())()

    def _names(self) -> list[str]:
        group, names = self._hooks.with_hooks, self._hooks.names
        if group not in (None, "none") and group not in HookRegistry.groups:
            raise ConfigError(
                f"{self._path}: with_hooks: {group} is a group of an experiment, and a trainer has none. Next: list "
                "the hooks under hooks: {names: [...]}."
            )
        chosen = [] if group in (None, "none") else [group]
        chosen += [known_name(name) for name in names or () if name != "none"]
        if not chosen and (group == "none" or names == ("none",) or list(names or ()) == ["none"]):
            return []
        return list(dict.fromkeys([ALWAYS, *HookRegistry.resolve(chosen)]))

    def _make_tracker(self, entry: TrackerEntry) -> TrainingHook:
        tracker = known_name(entry.tracker)
        where = _listed(entry.target_modules), _listed(entry.exclude)
        return make_tracker(entry.name or tracker, tracker, *where, entry.options)

    def _set_schedules(self, hooks: Mapping[str, TrainingHook]) -> None:
        for name, entry in self._hooks.schedules.items():
            if name not in hooks:
                meant = suggest(name, list(hooks)) or f"; hooks are {', '.join(hooks) or 'none'}."
                raise ConfigError(f"{self._path}: there is a schedule for {name!r}, which is no hook of the run{meant}")
            hooks[name].step_schedule = StepSchedule(**entry.arguments())


def _listed(patterns: list[str] | str | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())
