"""Start a script that hookline does not own, with hooks in it: ``hookline run --hooks norms -- python train.py``.

`run_command` calls `run_script`. The command runs in a process of its own, as it would without hookline: its standard
output, its signals and its exit code are its own. What hookline has to say goes to the standard error, at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hookline.cli.main import DONE, NOT_ATTACHED
from hookline.cli.script_request import ScriptRequest, read_script, write_run_file
from hookline.errors import OptionError
from hookline.runs.build import hook_names
from hookline.runs.folder import LOG, STRATEGY, read_run_json, write_run_json
from hookline.runs.named_sinks import sink_files

__all__ = ["run_script"]

_START: Final = Path(__file__).resolve().parent.parent / "integrations" / "script_start"
"""The folder of the ``sitecustomize`` that every Python of the command reads."""
_BY_SIGNAL: Final = 128
"""Exit codes above it are those of signals."""
_AFTER_ERROR: Final = {"disable": "was switched off", "warn": "stayed on", "raise": "ended the script"}
_ENOUGH: Final = 9
"""Reports from which on the page looks for anomalies in a curve."""
_STOPS: Final = (signal.SIGINT, signal.SIGTERM)
"""The signals by which somebody stops a run; by another one it was killed."""
_FORWARDED: Final = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def run_script(arguments: Sequence[str]) -> int:
    """Run a command with hooks; return its exit code, which is over 128 if a signal has ended it.

    A command that ends with 0, and to which not all hooks could be attached, gives NOT_ATTACHED.

    Args:
        arguments: Flags, ``--`` and the command; or a run file that names the command, and flags.
    """
    request = read_script(arguments)
    with tempfile.TemporaryDirectory(prefix="hookline-") as folder:
        file = write_run_file(Path(folder), request)  # raises if something is wrong
        if request.how.dry_run:
            _print_plan(request, json.loads(file.read_text(encoding="utf-8")))
            return DONE
        code, by_signal = _run(request.command, _environment(file, Path(folder), request))
        closing = _Closing(request, Path(folder), code, by_signal)
        closing.say()
        return code or (NOT_ATTACHED if closing.has_failed_hooks else DONE)


def _environment(file: Path, notes: Path, request: ScriptRequest) -> dict[str, str]:
    paths = [str(_START), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"HOOKLINE_RUN": str(file), "HOOKLINE_RUN_NOTES": str(notes), "HOOKLINE_RUN_NAME": request.name}
    if request.run.snapshot_every is not None:
        own["HOOKLINE_RUN_SNAPSHOT_EVERY"] = str(request.run.snapshot_every)
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, signal.Signals | None]:
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

    numbers = [signal.SIGINT, *(getattr(signal, name) for name in _FORWARDED if hasattr(signal, name))]
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

    def __init__(self, request: ScriptRequest, notes: Path, code: int, by_signal: signal.Signals | None) -> None:
        self._request = request
        self._notes = notes
        self._code = code
        self._signal = by_signal
        self._is_silent = request.run.console == "none"

    def say(self) -> None:
        """Finish ``run.json``, make the pages, and print a few lines."""
        followed = [json.loads(text) for text in self._read("followed")]
        folders = [Path(each["folder"]) for each in followed if each["folder"]]
        for folder in folders:
            self._finish(folder)
        for text in self._read("reports") if not self._code else ():  # one that was broken off may still become long
            self._print_few(**json.loads(text))
        for text in self._read("silent"):
            for name, why in json.loads(text).items():
                self._print(f"the hook {name} has not fired: {why}.", always=True)
        for text in self._read("failed"):
            self._print(f"not attached: {text}", always=True)
        if not followed and not self.has_failed_hooks:
            self._print(f"nothing was seen: {self._why_nothing()}", always=True)

    @property
    def has_failed_hooks(self) -> bool:
        """Whether something that was asked for could not be attached to the model."""
        return bool(self._read("failed"))

    def _read(self, what: str) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in sorted(self._notes.glob(f"*.{what}"))]

    def _why_nothing(self) -> str:
        if self._signal is not None:
            return f"the command was stopped by {_signal_text(self._signal)} before its first step."
        if self._code:
            return f"the command ended with exit code {self._code} before its first step."
        if not self._read("python"):
            return (
                "the command started no Python that reads PYTHONPATH. Is it python -I or -E? Next: leave that out, or "
                "call hookline.follow(model, optimizer) in the script."
            )
        if not self._read("torch"):
            return "the script has not imported torch.optim."
        return (
            "no optimizer of torch made a step. Next: for an optimizer that is no torch.optim.Optimizer, use "
            "hookline.HookManager in the script."
        )

    def _finish(self, folder: Path) -> None:
        facts = read_run_json(folder)
        words = facts.get("status", "ended")
        if self._code or words == "running":  # the script left without a word, or failed afterwards
            words = self._how_it_ended(words)
            facts["status"] = words.partition(" ")[0].rstrip(",")
            if self._code:
                facts.setdefault("error", words if self._signal is not None else f"exit code {self._code}")
            write_run_json(folder, facts)
        found = _write_page(folder) if self._request.run.report else None
        steps = (facts.get("result") or {}).get("steps")
        done = _logged(folder) if steps is None else f": {steps} steps in {facts.get('seconds') or 0:.1f} s"
        set_up = facts.get("set_up_seconds")
        if steps is not None and set_up is not None:
            done += f", and {set_up:.1f} s to attach the hooks"
        self._print(f"{self._request.name}/{folder.name} {words}{done}")
        for hook, told in (facts.get("hooks") or {}).items():
            if told.get("failed") and told.get("fired"):  # one that never fired was not attached
                self._print_failed(hook, told["failed"])
        names = {"records": LOG, **sink_files(self._request.run.sinks.chosen(), STRATEGY)}
        for label, name in (names if found is None else {"report": "report.html", **names}).items():
            self._print_file(label, folder / name)
        for line in found or ():
            self._print(line)

    def _print_few(self, reports: int, steps: int, loop: str) -> None:
        """Tell how to get more reports, if there were too few to judge a curve by."""
        if 0 < reports < _ENOUGH and steps >= _ENOUGH:
            every = max(steps // (2 * _ENOUGH), 1)
            why = ", at the ends of epochs" if loop == "epoch" else ""
            made = f"{reports} report{'s' * (reports != 1)} in {steps} steps{why}"
            self._print(f"{made}; for curves that can be judged: --snapshot-every {every}.")

    def _print_failed(self, hook: str, count: int) -> None:
        """Tell of a hook that raised, and what came of it."""
        became = _AFTER_ERROR[self._request.on_error]
        times = "once" if count == 1 else f"{count} times"
        self._print(f"the hook {hook} raised {times} and {became}: its metrics are incomplete.", always=True)

    def _how_it_ended(self, told: str) -> str:
        """Return the status in words, the status first; ``told`` is what the script's process has written of it."""
        if self._code == 0:
            return "finished"
        if self._signal is None or told == "failed":
            return "failed"
        return (
            f"stopped by {self._signal.name}" if self._signal in _STOPS else f"failed, by {_signal_text(self._signal)}"
        )

    def _print_file(self, label: str, path: Path) -> None:
        if path.exists():
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            if not self._is_silent:
                print(f"  {label:<13}{shown}", file=sys.stderr)

    def _print(self, text: str, *, always: bool = False) -> None:
        if always or not self._is_silent:
            print(f"hookline: {text}", file=sys.stderr)


def _signal_text(number: signal.Signals) -> str:
    return f"signal {number.value} ({number.name})"


def _logged(folder: Path) -> str:
    """Return how many steps the log knows of, where the script was killed before it could say."""
    from hookline.records.log import read_log
    from hookline.records.sink import Record

    entries = read_log(folder) if (folder / LOG).exists() else ()
    steps = [entry.step for entry in entries if isinstance(entry, Record) and entry.step is not None]
    return f": {max(steps) + 1} steps in the log" if steps else ""


def _write_page(folder: Path) -> list[str] | None:
    """Write the page of a run; return what was found, None without a page. The script has ended well or not anyway."""
    try:
        from hookline.report.report_page import write_page

        return write_page([folder]).found
    except Exception as error:
        print(f"hookline: no report.html: {type(error).__name__}: {error}", file=sys.stderr)
    return None


def _print_plan(request: ScriptRequest, file: dict[str, Any]) -> None:
    hooks = file.get("hooks", {})
    print(f"{request.name}: {shlex.join(request.command)}")
    print(f"hooks: {', '.join(hook_names(request.run)) or 'none'}")
    if hooks.get("config"):
        print(f"with: {json.dumps(hooks['config'])}")
    print(f"folder: {Path(file['output_dir']) / request.name / STRATEGY}")
