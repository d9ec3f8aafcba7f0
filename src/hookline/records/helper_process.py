"""Control the helper process of slow sinks from the run: start it, ask it to flush, restart it if it dies.

The fan-out adds slow sinks as recipes (class and options); ``python -m hookline.records.helper`` makes and feeds them
from the log. Both talk by lines of JSON over pipes. The run waits for the process in ``flush`` and ``close`` alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from hookline.error_policy import ErrorPolicy
from hookline.records.delivery import read_position
from hookline.records.resilient_log import BackOff, ResilientLog
from hookline.records.values import JsonCleaner, dumps, loads

__all__ = ["HelperProcess", "sink_recipe"]

_LOOK_EVERY: Final = 0.25
"""Seconds between two reads of the process's messages: a read costs two system calls."""
_QUIET: Final = 1.5
"""Seconds of waiting before a notice says for what: MLflow alone takes ten to import."""
_HASTY: Final = 1.0
"""Seconds to wait for sinks for which the run has waited in vain before."""


def sink_recipe(sink: Any, name: str) -> dict[str, Any] | str:
    """Return what makes ``sink`` in another process; or, as a text, why that cannot be."""
    cls = type(sink)
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ or module is None:
        return f"{cls.__qualname__} cannot be imported elsewhere; put it at the top of a module of its own"
    try:
        cleaner = JsonCleaner()
        options = cleaner.clean(sink.options())
        dumps(options)
    except Exception as error:
        return f"options() raised {type(error).__name__}: {error}".rstrip(".")
    if cleaner.altered or cleaner.flags:
        return f"options() has what JSON cannot hold: {', '.join(map(repr, [*cleaner.altered, *cleaner.flags]))}"
    file = getattr(module, "__file__", None)
    return {
        "name": name,
        "module": cls.__module__,
        "class": cls.__qualname__,
        "file": None if file is None else str(Path(file).absolute()),
        "options": options,
    }


class HelperProcess:
    """The process that delivers the log to slow sinks, as the run sees it."""

    def __init__(self, log: ResilientLog, errors: ErrorPolicy, patience: float) -> None:
        self._log, self._errors, self._patience = log, errors, patience
        self._recipes: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._unread = b""
        self._flushed = self._asked = 0
        self._looked_at = 0.0
        self._back_off = BackOff(first=0.5)
        self._was_late = False

    def add(self, recipe: dict[str, Any]) -> None:
        """Add a sink; end the process if it runs, as the next record starts it with all sinks."""
        self._recipes.append(recipe)
        if self._process is not None:
            self.close()

    def keep_running(self) -> None:
        """Start the process if it does not run, and read its messages; four times a second at the most."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY:
            self._looked_at = now
            if not self._is_running:
                self._start()
            self.read_messages()

    def read_messages(self) -> None:
        """Take in what the process has sent."""
        process = self._process
        if process is None or process.stdout is None:
            return
        with suppress(OSError):
            while found := os.read(process.stdout.fileno(), 1 << 16):
                self._unread += found
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            with suppress(ValueError):
                self._take(loads(line))

    def flush(self, number: int) -> bool:
        """Wait until all sinks have the records below ``number``; return False, with a warning, after ``patience``."""
        if not number or (self._process is None and not self._behind(number)):
            return True
        if not self._is_running:
            self._back_off.hurry()
            self._start()
        self._asked += 1
        if self._wait_for_flush(number, _HASTY if self._was_late else self._patience):
            self._was_late = False
            return True
        behind = self._behind(number)
        self._was_late = bool(behind)
        if behind:
            words = ", ".join(f"{name} by {count:,} records" for name, count in behind.items())
            self._errors.warn_later(
                f"behind {sorted(behind)}",
                f"After {self._patience:g} s slow sinks are behind: {words}. They are all in {self._log.path}: "
                f"feed the sinks later by hookline replay {self._log.path} --to ….",
            )
        return not behind

    def seek(self) -> None:
        """Make sinks read the log from its beginning, as it was cut back."""
        self._send({"seek": True})

    def close(self) -> bool:
        """End the process when all is delivered, and wait for that; return whether there was one."""
        process = self._process
        if process is None:
            return False
        self._send({"end": True})
        if process.stdin is not None:
            process.stdin.close()
        if not self._wait_for_end(process):
            self._errors.warn_later(
                "ending",
                f"The process of the slow sinks (pid {process.pid}) is still at work; it goes on by itself, and ends "
                "when everything is delivered or cannot be.",
            )
        self.read_messages()
        self._release()
        return True

    # -- the process ---------------------------------------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        if self._process is not None:
            self.read_messages()
            code = self._process.returncode
            self._release()
            ending = f"by signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            self._fail(f"The process of the slow sinks ended ({ending}); it is begun anew")
        if not self._back_off.is_due:
            return
        try:
            self._process = self._popen()
        except OSError as error:
            self._fail(f"The process of the slow sinks could not be begun ({error}); it is tried again")
            return
        self._finalizer = weakref.finalize(self, _abandon, self._process)
        self._send(
            {
                "sinks": self._recipes,
                "log": str(self._log.path.absolute()),
                "path": sys.path,
                "patience": self._patience,
                "remove": self._log.is_temporary,
                "parent": os.getpid(),
            }
        )

    def _popen(self) -> subprocess.Popen[bytes]:
        home = str(Path(__file__).parents[2])
        before = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, before] if before else [home])}
        with _output_beside(self._log.path) as output:
            process = subprocess.Popen(
                # -P: a csv.py in the current folder must not shadow Python's own. -B: on a full disk Python 3.11 leaves
                # half a .pyc, and no later helper could begin.
                [sys.executable, "-P", "-B", "-m", "hookline.records.helper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the run
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _release(self) -> None:
        process, self._process = self._process, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if process is not None:
            _abandon(process)
        self._unread = b""

    def _fail(self, sentence: str) -> None:
        self._back_off.fail()
        self._errors.counts["helper"] += 1
        self._errors.warn_later(
            "helper", f"{sentence}. What is in the log is not lost. Its output: .helper.log beside it."
        )

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with suppress(OSError):  # it died: `keep_running` will notice
            self._process.stdin.write(dumps(message) + b"\n")
            self._process.stdin.flush()

    def _take(self, message: dict[str, Any]) -> None:
        if "flushed" in message:
            self._flushed = message["flushed"]
            self._back_off.reset()
            return
        name, is_skipped = message["failed"], message.get("skipped")
        self._errors.counts[name] += 1
        missing = " That record is passed over." if is_skipped else " It is tried again from the log."
        self._errors.warn_later(
            f"{name}{' skipped' if is_skipped else ''}",
            f"{name} could not {message['what']} ({message['error']}); the run and the other sinks go on.{missing} "
            "Further failures are counted in manager.sink_errors.",
        )

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait_for_flush(self, number: int, patience: float) -> bool:
        deadline = time.monotonic() + patience
        quiet_until: float | None = time.monotonic() + _QUIET
        asked_process = None
        while True:
            if self._process is not None and asked_process is not self._process:
                asked_process = self._process
                self._send({"flush": self._asked, "until": number})
            self.read_messages()
            if self._flushed >= self._asked:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if quiet_until is not None and time.monotonic() > quiet_until:
                quiet_until = None
                behind = self._behind(number).items()
                words = ", ".join(f"{name} ({count:,} of {number:,} records to go)" for name, count in behind)
                _print_notice(f"waiting {_at_most(left)} for {words or 'slow sinks'}.")
            if self._is_running:
                time.sleep(min(left, 0.005))
            else:
                self._start()
                time.sleep(min(left, 0.05))

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> bool:
        patience = _HASTY if self._was_late else self._patience
        for seconds in (min(_QUIET, patience), max(patience - _QUIET, 0.0)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return True
            if seconds == _QUIET:
                names = ", ".join(recipe["name"] for recipe in self._recipes)
                _print_notice(f"{names} let go of what they hold; waiting for that {_at_most(patience)}.")
        return False

    def _behind(self, number: int) -> dict[str, int]:
        """Return, by sink, how many of the records below ``number`` it has not received."""
        missing = {recipe["name"]: number - read_position(self._log.path, recipe["name"]) for recipe in self._recipes}
        return {name: count for name, count in missing.items() if count > 0}


def _print_notice(sentence: str) -> None:
    """Print a line to the standard error: no warning, as nothing is wrong."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed
            print(f"hookline: {sentence}", file=sys.stderr, flush=True)


def _at_most(seconds: float) -> str:
    return f"up to {seconds:.0f} s (Ctrl-C: they go on by themselves)"


def _output_beside(log: Path) -> IO[bytes]:
    """Return the file for what sinks print."""
    try:
        return (log.parent / ".helper.log").open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Close our ends of the pipes: the process delivers what there is, and ends."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if process.poll() is None:
        process.returncode = 0  # it is meant to go on: Python need not warn of it
