"""Read what ``hookline run … -- COMMAND`` was asked for, and write it as a run file for the script's processes.

`script_command` calls it. Flags and run files mean the same as for experiments; those that are about training are
errors, because the script decides there.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from hookline.cli.find_experiment import FoundExperiment
from hookline.cli.option_sources import RunSettings, settings_of_file
from hookline.cli.parse import read_flags
from hookline.cli.run_request import MARKERS, Request, joined_flags, merged_options
from hookline.errors import OptionError
from hookline.load import from_folder
from hookline.messages import did_you_mean
from hookline.runs.folder import STRATEGY, to_plain
from hookline.runs.named_sinks import sink_maker
from hookline.runs.run_options import (
    FILE_KEYS,
    CheckpointOptions,
    OutputOptions,
    RunOptions,
    TrainingOptions,
    flag,
    flat,
)

__all__ = ["ScriptRequest", "read_script", "split_command", "write_run_file"]

_ABOUT: Final = """Follow a script that trains, with hooks: hookline run [OPTIONS] -- COMMAND.

Examples:
  hookline run --hooks norms -- python train.py --lr 1e-3
  hookline run --hooks norms --hook-csv -- torchrun --nproc-per-node 2 train.py
  hookline run my_hooks.yaml -- -m my_package.train
  hookline run --hooks stats --snapshot-every 5 -- python train.py
"""
_USED: Final = {"config", "output_dir", "name", "no_report", "dry_run", "silent", "no_console_output", "console"}
_NOT_USED: Final = {
    name for group in (TrainingOptions, OutputOptions, CheckpointOptions) for name in vars(group()) if name not in _USED
}
"""The flags that are about training or about the screen, which are the script's own."""
_PASSED_OVER: Final = {*_NOT_USED, "console", "loop"}
"""What a run file may say for experiments, where the command stands behind the ``--``."""
_QUIET: Final = ("silent", "none")


@dataclass
class ReportOptions:
    """How often watches and trackers report"""

    snapshot_every: Annotated[int | None, flag("N")] = None
    """Report every N steps; 0: when an epoch ends. If left out, every 10 steps at first and less often later (144 times
    in 1,000,000 steps), or when an epoch ends where a hook needs epochs."""


@dataclass
class ScriptOptions(RunOptions):
    """All flags that stand before the ``--``."""

    report: ReportOptions = field(default_factory=ReportOptions)


@dataclass
class ScriptRequest:
    """Hold everything that was asked for."""

    command: list[str]
    """What is started, word by word."""
    name: str
    """What folders call it."""
    request: Request
    """Hooks and sinks, as for an experiment."""
    snapshot_every: int | None = None
    """How many steps from one report to the next, if that was asked for."""

    @property
    def options(self) -> RunOptions:
        """The flags, over those of a run file."""
        return self.request.options

    def run_file(self) -> dict[str, Any]:
        """Return a run file with everything that the script's processes have to know; raise if something is wrong."""
        request, options, settings = self.request, self.options, self.request.settings
        hook_objects = request.hook_objects()
        hook_objects.check_arguments()
        sink_maker(vars(options.sink), settings.sinks)
        specs = request.module_specs()
        request.check()
        flags = flat(options)
        found: dict[str, Any] = {"command": self.command, "hooks": {}, "sinks": {"others": []}}
        for name, place in FILE_KEYS.items():
            section, _, key = place.key.rpartition(".")
            if section in ("hooks", "sinks") and place.convert is None:
                found[section][key] = flags[name]
        names, here = options.hook.hooks, Path.cwd()  # the script may change its folder
        found["hooks"]["names"] = None if names is None else [from_folder(name, here) for name in names]
        found["hooks"]["config"] = hook_objects.config
        found["hooks"]["schedules"] = {name: _schedule(given) for name, given in settings.schedules.items()}
        found["trackers"] = [{**entry, "tracker": from_folder(entry["tracker"], here)} for entry in settings.trackers]
        found["specs"] = specs
        sinks: list[tuple[str, dict[str, Any]]] = [(path, {}) for path in options.sink.hook_sink] + list(settings.sinks)
        found["sinks"]["others"] = [{"sink": from_folder(path, here), "options": given} for path, given in sinks]
        found["name"] = options.output.name
        found["output_dir"] = str(Path(options.output.output_dir).absolute())
        plain: dict[str, Any] = to_plain(_without_none(found))
        return plain


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the first ``--``, and the command behind it; nothing for what there is not."""
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    return given[:place], given[place + 1 :]


def read_script(arguments: Sequence[str], command: Sequence[str]) -> ScriptRequest:
    """Return what was asked for; ``arguments`` are those before the ``--``."""
    given = joined_flags(arguments)
    parsed, unknown = read_flags(
        ScriptOptions, given, "hookline run", description=_ABOUT, config=MARKERS, return_unknown_args=True
    )
    if unknown:
        _refuse(unknown[0])
    options, every = RunOptions(parsed.experiment, *parsed.groups), parsed.report.snapshot_every
    if every is not None and every < 0:
        raise OptionError(f"--snapshot-every is a number of steps, or 0 for the ends of epochs; got {every}.")
    settings, path = _settings(options, command)
    words = _started(list(command) or settings.command)
    name = _name_of(words)
    found = FoundExperiment(name, shlex.join(words), make=lambda config, strategy: None, strategies=(STRATEGY,))
    options = merged_options(options, settings)
    _check_flags(options)
    if not any(word.startswith("--on-hook-error") for word in given) and not settings.says_on_error:
        options.hook.on_hook_error = "disable"  # a hook does not end a script that it does not own
    options.experiment = path
    return ScriptRequest(words, name, Request(options, found, None, {}, settings), every)


def _refuse(word: str) -> None:
    """Raise because of a word before the ``--`` that means nothing here."""
    if not word.startswith("-"):
        raise OptionError(f"{word!r} is one word too many. Next: hookline run --hooks norms -- python train.py.")
    known = [name for name in (*flat(RunOptions()), *vars(ReportOptions())) if name != "experiment"]
    name = word.partition("=")[0]
    meant = did_you_mean(name, [f"--{each.replace('_', '-')}" for each in known])
    raise OptionError(f"There is no option {name}.{meant} All of them: hookline run --help -- python.")


def _settings(options: RunOptions, command: Sequence[str]) -> tuple[RunSettings, str]:
    """Return the settings of the run file, if there is one; refuse an experiment beside a command.

    Behind a ``--``, the command decides how it trains: what a file says of that is passed over, as in trainers.
    """
    settings, path = settings_of_file(options, has_command=bool(command))
    if path:
        raise OptionError(
            f"Two things were asked to run: the experiment {path!r}, and the command "
            f"{shlex.join(command or settings.command)!r}. Next: leave one of them out."
        )
    if settings.command and command and settings.command != list(command):
        raise OptionError(
            f"The run file names a command ({shlex.join(settings.command)}), and another stands behind the --. Next: "
            "leave one of them out."
        )
    if command and not settings.command:
        settings.config = {}
        settings.flags = {name: value for name, value in settings.flags.items() if name not in _PASSED_OVER}
    return settings, path


def _check_flags(options: RunOptions) -> None:
    defaults, given = flat(RunOptions()), flat(options)
    wrong = sorted(name for name in _NOT_USED if given[name] != defaults[name])
    if options.output.console not in (None, *_QUIET):
        wrong.append("console")
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise OptionError(
            f"{flags}: that is for experiments; here the script decides how it is trained and what it prints. Next: "
            "leave it out, or give it to the script, behind the --."
        )


def _started(command: list[str]) -> list[str]:
    """Return the command as it is started: a Python file and ``-m module`` get this Python before them."""
    if not command:
        raise OptionError("There is no command behind the --. Next: hookline run --hooks norms -- python train.py.")
    first = command[0]
    if first == "-m" or (first.endswith(".py") and Path(first).is_file()):
        return [sys.executable, *command]
    if shutil.which(first) is None:
        what = "There is no file" if first.endswith(".py") else "There is no program"
        raise OptionError(f"{what} {first!r}. Next: write the command as a shell has it: -- python train.py.")
    return command


def _name_of(command: Sequence[str]) -> str:
    """Return the name of the script in a command: of the first Python file, of the module, or of the program."""
    for place, word in enumerate(command):
        if word.endswith(".py"):
            return Path(word).stem
        if word == "-m" and place + 1 < len(command) and not command[place + 1].startswith("torch."):
            return command[place + 1].rpartition(".")[2]
    return Path(command[0]).name


def _schedule(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a schedule as a run file has them: only those that its mode takes."""
    left_out = {"continual": ("stride", "burst_length"), "stride": ("burst_length",)}.get(given["mode"], ())
    return {name: value for name, value in given.items() if name not in left_out}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def write_run_file(folder: Path, request: ScriptRequest) -> Path:
    """Write the run file of ``request`` into ``folder``."""
    path = folder / "run.json"
    path.write_text(json.dumps(request.run_file(), indent=2), encoding="utf-8")
    return path
