"""Run a script that hookline does not own, with hooks in it: ``hookline run --hooks norms -- python train.py``.

``hookline run`` calls `run_script`. The command runs in a process of its own, as it would without hookline: its
standard output, its signals and its exit code are its own. The run is handed to its processes as a file, which
`hookline.integrations.script_run` reads there; what they note comes back in a folder, and is told at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hookline.cli.main import DONE, NOT_ATTACHED
from hookline.cli.run import failed_hooks, files_of, write_page
from hookline.cli.screen import tell_plan
from hookline.error_policy import error_text
from hookline.errors import HooklineError, OptionError
from hookline.integrations.host_run import command_name
from hookline.plain import to_plain
from hookline.runs.build import build, hook_names
from hookline.runs.folder import STRATEGY, read_run_json, write_run_json
from hookline.runs.read import Asked, placed_files
from hookline.runs.run import Run

_START: Final = Path(__file__).resolve().parent.parent / "integrations" / "script_start"
"""The folder of the ``sitecustomize`` that every Python of the command reads."""
_BY_SIGNAL: Final = 128
"""Exit codes above it are those of signals."""
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)
"""The signals by which somebody stops a run; by another one it was killed."""
_FORWARDED: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def run_script(asked: Asked) -> int:
    """Run the command of a run with its hooks; return its exit code, which is over 128 if a signal has ended it.

    A command that ends with 0, and to which not all hooks could be attached, gives NOT_ATTACHED.
    """
    run, command = asked.run, _started(asked.run.command)
    _check_arguments(run)
    # The script may change its folder, and a hook does not end a script that it does not own, unless it is asked to.
    hooks = run.hooks if run.hooks.says_on_error else run.hooks.model_copy(update={"on_error": "disable"})
    where = {"command": command, "hooks": hooks, "output_dir": str(Path(run.output_dir).absolute())}
    run = run.model_copy(update=where)
    if asked.how.dry_run:
        name = command_name(run.command)
        plan = {"script": name, "command": shlex.join(run.command), "hooks": hook_names(run)}
        where = {"with": to_plain(run.hooks.config), "folder": str(Path(run.output_dir) / name / STRATEGY)}
        tell_plan("dry-run", plan | where, as_json=False)
        return DONE
    with tempfile.TemporaryDirectory(prefix="hookline-") as folder:
        file = Path(folder) / "run.json"
        values = placed_files(run.model_dump(exclude_unset=True), Path.cwd())
        file.write_text(json.dumps(to_plain(values)), encoding="utf-8")
        paths = [str(_START), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"HOOKLINE_RUN": str(file), "HOOKLINE_RUN_NOTES": folder, "PYTHONPATH": os.pathsep.join(paths)}
        code, by_signal = _wait_for(command, {**os.environ, **own})
        closing = _Closing(run, Path(folder), code, by_signal)
        closing.say()
        return code or (NOT_ATTACHED if closing.failed else DONE)


# -- the command -----------------------------------------------------------------------------------------------


def _started(command: list[str]) -> list[str]:
    """Return the command as it is started: a Python file and ``-m module`` get this Python before them."""
    first = command[0]
    if first == "-m" or (first.endswith(".py") and Path(first).is_file()):
        return [sys.executable, *command]
    if shutil.which(first) is None:
        what = "There is no file" if first.endswith(".py") else "There is no program"
        raise OptionError(f"{what} {first!r}. Next: write the command as a shell has it: -- python train.py.")
    return command


def _check_arguments(run: Run) -> None:
    """Make the hooks that were given arguments, and drop them, so that a wrong value is an error now.

    The run begins in another process, where nobody would see it in time. Others are not made: a constructor of the
    user's may do anything.
    """
    for name in [name for name in hook_names(run) if run.hooks.config.get(name)]:
        try:
            build(run, only=[name])
        except Exception as error:
            said = str(error) if isinstance(error, HooklineError) else error_text(error)
            raise OptionError(f"The hook {name} does not take its arguments: {said}") from error


def _wait_for(command: Sequence[str], environment: dict[str, str]) -> tuple[int, signal.Signals | None]:
    """Return the exit code of a command, and the signal that it ended by."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise OptionError(f"The command {shlex.join(command)!r} cannot be started: {error.strerror}.") from None
    with _signals_to(process) as sent:
        code = process.wait()
    code = _BY_SIGNAL - code if code < 0 else code
    # torchrun leaves with 1 after a signal; a script that catches one may leave with a code of its own.
    number = code - _BY_SIGNAL if code > _BY_SIGNAL else sent[-1] if code and sent else 0
    return code, next((each for each in signal.Signals if each == number), None)


@contextlib.contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Hand signals on while the block lasts, and outlive them; yield those that have come and that stop a run.

    A terminal sends Ctrl-C to all processes in the foreground, the script among them: sent on, it would come twice.
    """
    on_terminal = _is_in_foreground()
    stops: list[int] = []

    def forward(number: int, frame: Any) -> None:
        if number in _STOPS:
            stops.append(number)
        if process.poll() is None and not (number == signal.SIGINT and on_terminal):
            process.send_signal(number)

    numbers = [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # no terminal
        return False


# -- what is said at the end -----------------------------------------------------------------------------------


class _Closing:
    """Say where everything is, or why nothing was seen."""

    def __init__(self, run: Run, notes: Path, code: int, by_signal: signal.Signals | None) -> None:
        self._run, self._notes = run, notes
        self._code, self._signal = code, by_signal
        self._by = "" if by_signal is None else f"signal {by_signal.value} ({by_signal.name})"
        self.failed = self._read("failed")
        """What was asked for, and could not be attached to the model."""

    def say(self) -> None:
        """Finish ``run.json``, make the pages, and print a few lines."""
        followed = self._read("followed")
        for folder in filter(None, followed):  # ranks over 0 have none
            self._finish(Path(folder))
        for text in self.failed:
            self._print(f"not attached: {text}", always=True)
        if not followed and not self.failed:
            self._print(f"nothing was seen: {self._why_nothing()}", always=True)

    def _read(self, what: str) -> list[str]:
        """Return the notes of all processes of the script about `what`."""
        return [path.read_text(encoding="utf-8") for path in sorted(self._notes.glob(f"*.{what}"))]

    def _why_nothing(self) -> str:
        if self._code:
            ended = f"ended with exit code {self._code}" if self._signal is None else f"was stopped by {self._by}"
            return f"the command {ended} before its first step."
        return (
            "no optimizer of torch made a step, in a Python that reads PYTHONPATH (-I and -E do not). Next: call "
            "hookline.follow(model, optimizer) in the script."
        )

    def _finish(self, folder: Path) -> None:
        """Complete ``run.json`` where the script's process could not, write the page, and say where everything is."""
        facts = read_run_json(folder)
        words = facts.get("status", "ended")
        if self._code or words == "running":  # the script left without a word, or failed afterwards
            words = self._how_it_ended()
            facts["status"] = words.partition(" ")[0].rstrip(",")
            if self._code:
                facts.setdefault("error", words if self._signal is not None else f"exit code {self._code}")
            write_run_json(folder, facts)
        found = write_page([folder]) if self._run.report else None
        self._print(f"{command_name(self._run.command)}/{folder.name} {words}{_figures(facts)}")
        for line in failed_hooks(self._run, folder):
            self._print(line, always=True)
        for label, path in files_of(self._run, folder, STRATEGY, has_page=found is not None).items():
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            self._print(f"{label:<13}{shown}", prefix="  ")
        for line in found or ():
            self._print(line)
        for name, why in (facts.get("silent") or {}).items():
            self._print(f"the hook {name} has not fired: {why}.", always=True)

    def _how_it_ended(self) -> str:
        """Return the status in words, the status first."""
        if self._code == 0:
            return "finished"
        if self._signal is None:
            return "failed"
        return f"stopped by {self._signal.name}" if self._signal in _STOPS else f"failed, by {self._by}"

    def _print(self, text: str, *, prefix: str = "hookline: ", always: bool = False) -> None:
        if always or self._run.console != "none":
            print(f"{prefix}{text}", file=sys.stderr)


def _figures(facts: dict[str, Any]) -> str:
    """Return how many steps there were; nothing where the script was killed before it could say."""
    steps, set_up = (facts.get("result") or {}).get("steps"), facts.get("set_up_seconds")
    attached = "" if set_up is None else f", and {set_up:.1f} s to attach the hooks"
    return "" if steps is None else f": {steps} steps in {facts.get('seconds') or 0:.1f} s{attached}"
