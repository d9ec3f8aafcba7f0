"""Control the process of slow sinks from the run: start it, ask it to flush, restart it if it dies.

The fan-out adds slow sinks as recipes (class and options); ``python -m hookline.records.worker`` makes and feeds them
from the log. Both talk by lines of JSON over pipes. The run waits for the process in ``flush`` and ``close`` alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from hookline.error_policy import ErrorPolicy
from hookline.files import FileLock, take_lock
from hookline.records.log import BackOff, dumps, loads

__all__ = ["HelperProcess", "sink_recipe", "wait_for_lock"]

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
        options = sink.options()
        dumps(options)
    except Exception as error:
        return f"options() raised {type(error).__name__}, or holds what is no JSON: {error}".rstrip(".")
    file = getattr(module, "__file__", None)
    return {
        "name": name,
        "module": cls.__module__,
        "class": cls.__qualname__,
        "file": None if file is None else str(Path(file).absolute()),
        "options": options,
    }


class HelperProcess:
    """The process that hands the log to slow sinks, as the run sees it.

    Args:
        errors: Collects what went wrong.
        patience: Seconds to wait for the sinks.
        position: Returns how many records of a log a sink has received.
    """

    def __init__(self, errors: ErrorPolicy, patience: float, position: Callable[[Path, str], int]) -> None:
        self._errors, self._patience, self._position = errors, patience, position
        self._log = Path()
        self._removes_log = False
        self._recipes: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._unread = b""
        self._looked_at = 0.0
        self._back_off = BackOff(first=0.5)
        self._was_late = False

    def add(self, recipe: dict[str, Any]) -> None:
        """Add a sink; end the process if it runs, as the next record starts it with all sinks."""
        self._recipes.append(recipe)
        self._end()

    def keep_running(self, log: Path, *, remove: bool) -> None:
        """Start the process if it does not run, and read its messages; four times a second at the most.

        Args:
            log: The log, which has a record.
            remove: Whether the process removes the folder of the log in the end.
        """
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY or log != self._log:
            self._looked_at = now
            self._log, self._removes_log = log, remove
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

    def flush(self, number: int) -> None:
        """Wait until all sinks have the records below ``number``; warn if they have not after ``patience``."""
        if self._log == Path() or not self._behind(number):
            return
        self._back_off.hurry()
        asked = None

        def has_all() -> bool:
            nonlocal asked
            if not self._is_running:
                self._start()
            if asked is not self._process:
                asked = self._process
                self._send({"hurry": True})
            self.read_messages()
            return not self._behind(number)

        self._was_late = not self._wait(has_all, number)
        if self._was_late:
            self._errors.warn_later(
                f"behind {sorted(self._behind(number))}",
                f"After {self._patience:g} s slow sinks are behind: {self._behind_text(number)}. They are all in "
                f"{self._log}: feed the sinks later by hookline replay {self._log} --to ….",
            )

    def close(self, number: int) -> bool:
        """Flush, and end the process; return whether there was one, which removes a temporary log."""
        self.flush(number)
        return self._end()

    def end_all(self, log: Path) -> None:
        """End the process, and wait for that of a killed run, as the log is cut back."""
        self._end()
        if lock := wait_for_lock(log, self._patience):
            lock.release()

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
                "log": str(self._log.absolute()),
                "path": sys.path,
                "patience": self._patience,
                "remove": self._removes_log,
                "parent": os.getpid(),
            }
        )

    def _popen(self) -> subprocess.Popen[bytes]:
        home = str(Path(__file__).parents[2])
        before = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, before] if before else [home])}
        with _output_beside(self._log) as output:
            process = subprocess.Popen(
                # -P: a csv.py in the current folder must not shadow Python's own. -B: on a full disk Python 3.11 leaves
                # half a .pyc, and no later process could begin.
                [sys.executable, "-P", "-B", "-m", "hookline.records.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the run
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _end(self) -> bool:
        """End the process when all is delivered, and wait for that; return whether there was one."""
        process = self._process
        if process is None:
            return False
        if process.stdin is not None:
            process.stdin.close()
        if not self._wait(lambda: process.poll() is not None, 0):
            self._errors.warn_later(
                "ending",
                f"The process of the slow sinks (pid {process.pid}) is still at work; it goes on by itself, and ends "
                "when everything is delivered or cannot be.",
            )
        self.read_messages()
        self._release()
        return True

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
        self._back_off.reset()
        name, is_skipped = message["failed"], message["skipped"]
        self._errors.counts[name] += 1
        missing = " That record is skipped." if is_skipped else " It is tried again from the log."
        self._errors.warn_later(
            f"{name}{' skipped' if is_skipped else ''}",
            f"{name} could not {message['what']} ({message['error']}); the run and the other sinks go on.{missing} "
            "Further failures are counted in manager.sink_errors.",
        )

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, is_done: Callable[[], bool], number: int) -> bool:
        """Wait until ``is_done``, up to ``patience``; after a while say on the screen for whom."""
        begun = time.monotonic()
        patience = _HASTY if self._was_late else self._patience
        has_said = False
        while not is_done():
            waited = time.monotonic() - begun
            if waited > patience:
                return False
            if waited > _QUIET and not has_said:
                has_said = True
                _print_notice(
                    f"waiting up to {patience - waited:.0f} s (Ctrl-C: they go on by themselves) for "
                    f"{self._behind_text(number) or 'slow sinks'}."
                )
            time.sleep(0.005)
        return True

    def _behind(self, number: int) -> dict[str, int]:
        """Return, by sink, how many of the records below ``number`` it has not received."""
        missing = {recipe["name"]: number - self._position(self._log, recipe["name"]) for recipe in self._recipes}
        return {name: count for name, count in missing.items() if count > 0}

    def _behind_text(self, number: int) -> str:
        return ", ".join(f"{name} by {count:,} records" for name, count in self._behind(number).items())


def wait_for_lock(log: Path, patience: float) -> FileLock | None:
    """Return the lock of the process of slow sinks, once that of a killed run has delivered the rest."""
    deadline = time.monotonic() + patience
    while (lock := take_lock(log.with_name(".helper.lock"))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return lock


def _print_notice(sentence: str) -> None:
    """Print a line to the standard error: no warning, as nothing is wrong."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed
            print(f"hookline: {sentence}", file=sys.stderr, flush=True)


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
