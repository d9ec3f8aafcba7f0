"""Read what ``hookline run … -- COMMAND`` was asked for, and write it as a run file for the script's processes.

`script_command` calls it. Flags and run files mean the same as for experiments; those that are about training are
errors, because the script decides there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.error_policy import error_text
from hookline.errors import HooklineError, OptionError
from hookline.plain import to_plain
from hookline.runs.build import build, hook_names, tracker_name
from hookline.runs.flags import How
from hookline.runs.read import placed_files, read
from hookline.runs.run import Run

__all__ = ["ScriptRequest", "read_script", "split_command", "write_run_file"]


@dataclass
class ScriptRequest:
    """Hold everything that was asked for."""

    command: list[str]
    """What is started, word by word."""
    name: str
    """What folders call it."""
    run: Run
    """Hooks and sinks, as for an experiment."""
    how: How

    @property
    def on_error(self) -> str:
        """What happens when a hook raises: if nothing is said, it does not end a script that it does not own."""
        return self.run.hooks.on_error if self.run.hooks.says_on_error else "disable"

    def run_file(self) -> dict[str, Any]:
        """Return a run file with everything that the script's processes have to know."""
        _check_arguments(self.run)
        values = self.run.model_dump(exclude_unset=True)
        values["command"] = self.command
        values["output_dir"] = str(Path(self.run.output_dir).absolute())  # the script may change its folder
        plain: dict[str, Any] = to_plain(placed_files(values, Path.cwd()))
        return plain


def _check_arguments(run: Run) -> None:
    """Make the hooks that were given arguments, and drop them, so that a wrong value is an error now.

    The run begins in another process, where nobody would see it in time. Others are not made: a constructor of the
    user's may do anything.
    """
    for name in [*(name for name in hook_names(run) if run.hooks.config.get(name)), *map(tracker_name, run.trackers)]:
        try:
            build(run, only=[name])
        except Exception as error:
            said = str(error) if isinstance(error, HooklineError) else error_text(error)
            raise OptionError(f"The hook {name} does not take its arguments: {said}") from error


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the first ``--``, and the command behind it; nothing for what there is not."""
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    return given[:place], given[place + 1 :]


def read_script(arguments: Sequence[str]) -> ScriptRequest:
    """Return what was asked for: flags, ``--`` and a command, or a run file that names one."""
    before, command = split_command(arguments)
    if "--" in arguments and not command:
        raise OptionError("There is no command behind the --. Next: hookline run --hooks norms -- python train.py.")
    asked = read(before, command)
    words = _started(list(asked.run.command))
    return ScriptRequest(words, _name_of(words), asked.run, asked.how)


def _started(command: list[str]) -> list[str]:
    """Return the command as it is started: a Python file and ``-m module`` get this Python before them."""
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


def write_run_file(folder: Path, request: ScriptRequest) -> Path:
    """Write the run file of ``request`` into ``folder``."""
    path = folder / "run.json"
    path.write_text(json.dumps(request.run_file(), indent=2), encoding="utf-8")
    return path
