"""Collect the options of a run that do not come from flags: those of a run file, or of the run that is resumed.

`run_request` calls `settings_of_file` and `settings_of_run`; both return `RunSettings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hookline.cli.find_experiment import FoundExperiment
from hookline.errors import OptionError
from hookline.runs.folder import newest_run, read_run_json
from hookline.runs.mistakes import Mistakes
from hookline.runs.run_options import RunOptions

__all__ = ["RunSettings", "settings_of_file", "settings_of_run"]


@dataclass
class RunSettings:
    """Hold the options that do not come from flags; a flag takes precedence over them."""

    flags: dict[str, Any] = field(default_factory=dict)
    """The values for fields of `RunOptions`, by their names."""
    config: dict[str, Any] = field(default_factory=dict)
    """The values for fields of the experiment's configuration."""
    hook_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By hook, its arguments."""
    specs: list[dict[str, Any]] = field(default_factory=list)
    """Hooks on modules, as data."""
    sinks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Sinks without a flag: name or path, and arguments."""
    trackers: list[dict[str, Any]] = field(default_factory=list)
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By hook, the arguments of its `StepSchedule`."""
    mistakes: Mistakes = field(default_factory=Mistakes)
    """What is wrong with the values, with lines; raised as one error."""
    says_experiment: bool = False
    """Whether the run file names the experiment, and not the command line."""
    command: list[str] = field(default_factory=list)
    """The command that starts a script, in place of an experiment."""
    says_on_error: bool = False
    """Whether the run file says what happens when a hook raises, and it is not only the default."""


def settings_of_file(options: RunOptions, *, has_command: bool = False) -> tuple[RunSettings, str]:
    """Return the settings of a run file, if there is one, and the path of the experiment.

    A file need not say what to run, if the command line ``has_command``: an experiment that it names is passed over.
    """
    from hookline.runs.read import ENDINGS, read_document

    path = options.experiment
    file = options.checkpoint.config
    if file is not None and options.checkpoint.resume:
        raise OptionError("--config and --resume do not go together: a run that is resumed has its own options.")
    if file is None and path is not None and Path(path).suffix.lower() in ENDINGS:
        file, path = path, None
    if file is None:
        return RunSettings(), path or ""
    document = read_document(file)
    settings, experiment = _of_run_file(document)
    settings.says_experiment = path is None
    path = path or (None if has_command else experiment)
    says_what = has_command or path is not None or settings.command
    if not says_what and not settings.mistakes.has_any(("experiment",), ("command",)):
        settings.mistakes.add_text(
            f"{file} does not say what to run: experiment: NAME, or path/file.py:Class; or command: python train.py."
        )
    return settings, path or ""


def _of_run_file(document: Any) -> tuple[RunSettings, str | None]:
    from hookline.runs.run_file import RunFile

    mistakes = Mistakes.of(document)
    run = RunFile.of(document, mistakes)
    settings = RunSettings(run.flags(), dict(run.config), dict(run.hooks.config), mistakes=mistakes)
    settings.command = run.command_words()
    settings.says_on_error = "on_error" in run.hooks.model_fields_set
    settings.specs = run.given_specs()
    settings.trackers = [entry.model_dump() for entry in run.trackers]
    settings.schedules = {name: entry.arguments() for name, entry in run.hooks.schedules.items()}
    settings.sinks = run.given_sinks()
    return settings, run.experiment


def settings_of_run(options: RunOptions, found: FoundExperiment) -> RunSettings | None:
    """Return the options of the newest run of ``found``, from its run.json; None if there is no run to resume."""
    strategies = found.chosen(options.training.strategy)
    for strategy in strategies:
        folder = newest_run(Path(options.output.output_dir), found.name, strategy)
        if folder is not None:
            facts = read_run_json(folder)
            saved = facts.get("options", {})
            flags = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.get("flags", {}).items()}
            flags |= {"strategy": options.training.strategy, "output_dir": options.output.output_dir}
            return RunSettings(
                flags | {"loop": saved.get("loop", {}), "run_group": saved.get("run_group")},
                dict(facts.get("config") or {}),
                saved.get("hook_config", {}),
                saved.get("specs", []),
                [(path, arguments) for path, arguments in saved.get("sinks", [])],
                saved.get("trackers", []),
                saved.get("schedules", {}),
                Mistakes(partial(_in_run, folder)),
            )
    return None


def _in_run(folder: Path, path: Sequence[str | int]) -> str:
    return f"{folder / 'run.json'}, {'.'.join(map(str, path))}"
