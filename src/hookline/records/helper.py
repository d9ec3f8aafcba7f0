"""Control the process of slow sinks from the run: start it, restart it if it dies, end it.

The fan-out adds slow sinks as recipes (class and options); ``python -m hookline.records.worker`` makes and feeds them
from the log. Both talk by lines of JSON over pipes. The run waits for the process in ``close`` alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from hookline.error_policy import ErrorPolicy
from hookline.errors import OptionError
from hookline.files import FileLock, take_lock
from hookline.records.log import BackOff, Log, dumps, loads

__all__ = ["HelperProcess", "failure_text", "sink_recipe", "wait_for_lock"]

_LOOK_EVERY: Final = 0.25
"""Seconds between two reads of the process's messages: a read costs two system calls."""


def sink_recipe(sink: Any, name: str) -> dict[str, Any]:
    """Return what makes ``sink`` in another process; raise `OptionError` if nothing does."""
    cls = type(sink)
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ or module is None:
        raise OptionError(f"{cls.__qualname__} cannot be imported elsewhere; put it at the top of a module of its own.")
    try:
        options = sink.options()
        dumps(options)
    except Exception as error:
        raise OptionError(f"its options() raised {type(error).__name__}, or holds what is no JSON: {error}") from error
    file = getattr(module, "__file__", None)
    return {
        "name": name,
        "module": cls.__module__,
        "class": cls.__qualname__,
        "file": None if file is None else str(Path(file).absolute()),
        "options": options,
    }


def failure_text(name: str, what: str, why: str) -> str:
    """Return the sentence that says that the sink ``name`` could not do something."""
    return (
        f"{name} could not {what} ({why}); the run and the other sinks go on. Further failures are counted in "
        "manager.sink_errors."
    )


class HelperProcess:
    """The process that hands the log to slow sinks, as the run sees it.

    Args:
        log: The log that it reads.
        errors: Collects what went wrong.
        patience: Seconds to wait for the sinks.
        remove: Whether the folder of the log is removed in the end.
    """

    def __init__(self, log: Log, errors: ErrorPolicy, patience: float, *, remove: bool) -> None:
        self._log, self._errors, self._patience, self._removes_log = log, errors, patience, remove
        self._recipes: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._unread = b""
        self._looked_at = 0.0
        self._back_off = BackOff(first=0.5)

    def add(self, recipe: dict[str, Any]) -> None:
        """Add a sink; end the process if it runs, as the next record starts it with all sinks."""
        self._recipes.append(recipe)
        self._end()

    def keep_running(self) -> None:
        """Start the process if it does not run, and read its messages; four times a second at the most."""
        now = time.monotonic()
        if self._process is None or now - self._looked_at >= _LOOK_EVERY:
            self._looked_at = now
            self._start()
            self.read_messages()

    def read_messages(self) -> None:
        """Take in what the process has sent: which sink could not do what."""
        process = self._process
        if process is None or process.stdout is None:
            return
        with suppress(OSError):
            while found := os.read(process.stdout.fileno(), 1 << 16):
                self._unread += found
        *lines, self._unread = self._unread.split(b"\n")
        for name, what, why in map(loads, lines):
            self._back_off.reset()
            self._errors.counts[name] += 1
            self._errors.warn_later(name, failure_text(name, what, why))

    def close(self, number: int) -> None:
        """Wait until all sinks have the records below ``number``, and end the process; warn if they have not."""
        for _ in range(2):  # the second time if it has died a moment ago
            if self._process is None and self._behind(number):
                self._back_off.hurry()
                self._start()
            if self._end():
                break
        if self._log.path.exists() and (behind := self._behind(number)):  # a temporary one is gone
            self._errors.warn_later(
                "behind",
                f"Slow sinks are behind: {behind} records. All are in {self._log.path}: feed the sinks later by "
                f"hookline replay {self._log.path} --to ….",
            )
        if self._removes_log and self._finalizer is None:  # it never ran
            shutil.rmtree(self._log.path.parent, ignore_errors=True)

    def end_all(self) -> None:
        """End the process, and wait for that of a killed run, as the log is cut back."""
        self._end()
        if lock := wait_for_lock(self._log, self._patience):
            lock.release()

    # -- the process ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the process, unless it runs, or died a moment ago."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._end()
        if not self._back_off.is_due:
            return
        try:
            self._process = self._popen()
        except OSError as error:
            self._fail(f"could not be started ({error})")
            return
        self._finalizer = weakref.finalize(self, _abandon, self._process)
        task = {
            "sinks": self._recipes,
            "log": str(self._log.path.absolute()),
            "path": sys.path,
            "patience": self._patience,
            "remove": self._removes_log,
            "parent": os.getpid(),
        }
        assert self._process.stdin is not None
        with suppress(OSError):  # it died, which the next record will notice
            self._process.stdin.write(dumps(task) + b"\n")
            self._process.stdin.flush()

    def _popen(self) -> subprocess.Popen[bytes]:
        home = str(Path(__file__).parents[2])
        before = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, before] if before else [home])}
        with _output_beside(self._log.path) as output:
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
        """End the process when all is delivered, and wait for that; return False if it has died."""
        process = self._process
        if process is None:
            return True
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it is still at work, and ends by itself
            process.wait(self._patience)
        self.read_messages()
        self._process, self._unread = None, b""
        self._finalizer.detach()
        _abandon(process)
        if process.returncode:
            self._fail(f"ended with exit status {process.returncode}")
        return not process.returncode

    def _fail(self, how: str) -> None:
        self._back_off.fail()
        self._errors.counts["helper"] += 1
        self._errors.warn_later(
            "helper",
            f"The process of the slow sinks {how}; it is started again, and continues with the log. Its output: "
            ".helper.log beside it.",
        )

    def _behind(self, number: int) -> str:
        """Return which sinks have not received all records below ``number``."""
        missing = {name: number - self._log.kept(name).get("number", 0) for name in (r["name"] for r in self._recipes)}
        return ", ".join(f"{name} by {count:,}" for name, count in missing.items() if count > 0)


def wait_for_lock(log: Log, patience: float) -> FileLock | None:
    """Return the lock of the process of slow sinks, once that of a killed run has delivered the rest."""
    deadline = time.monotonic() + patience
    while (lock := take_lock(log.path.with_name(".helper.lock"))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return lock


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
