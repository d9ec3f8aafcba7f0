"""Run slow sinks in a process of their own, which hands them the log while the run goes on.

The fan-out of the run has a `HelperProcess`: it starts the process, starts it again if it dies, and waits for it in
``close`` alone. ``python -m hookline.records.helper`` is the process: it makes the sinks from recipes (class and
options), each with a `Reader`. Both talk by lines of JSON over pipes. When the input ends, as the run is over or was
killed, what is left is delivered, and the process ends. It does not import torch, and Ctrl-C does not reach it.
"""

from __future__ import annotations

import os
import pkgutil
import select
import signal
import subprocess
import sys
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hookline.error_policy import ErrorPolicy, error_text
from hookline.errors import OptionError
from hookline.files import FileLock, take_lock
from hookline.load import load_object
from hookline.records.log import BackOff, Failed, Log, Reader, dumps, failure_text, loads

_LOOK_EVERY: Final = 0.25
"""Seconds between two reads of the process's messages: a read costs two system calls."""
_IDLE: Final = 0.2
"""Seconds between two reads of a log that does not grow."""
BATCH: Final = 256
"""Records that are delivered before the position is written: as many may come twice after a kill."""
_LONGEST: Final = 1.0
"""Seconds after which the other sinks continue."""


# -- in the run ---------------------------------------------------------------------------------------------------


def sink_recipe(sink: Any, name: str) -> dict[str, Any]:
    """Return what makes ``sink`` in another process; raise `OptionError` if nothing does."""
    cls = type(sink)
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ or module is None:
        raise OptionError(f"{cls.__qualname__} cannot be imported elsewhere; put it at the top level of a module.")
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


class HelperProcess:
    """The process that hands the log to slow sinks, as the run sees it.

    Args:
        log: The log that it reads.
        errors: Collects what went wrong.
        patience: Seconds to wait for the sinks.
    """

    def __init__(self, log: Log, errors: ErrorPolicy, patience: float) -> None:
        self._log, self._errors, self._patience = log, errors, patience
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

    def read(self, log: Log) -> None:
        """Read another log from now on, when all of this one is delivered."""
        if self._log.path.exists():
            self.end_all()
        self._log = log

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

    def close(self, number: int) -> bool:
        """Wait until all sinks have the records below ``number``, and end the process; return whether they have."""
        for _ in range(2):  # the second time if it has died a moment ago
            if self._process is None and self._behind(number):
                self._back_off.reset()
                self._start()
            if self._end():
                break
        behind = self._behind(number)
        if behind:
            self._errors.warn_later(
                "behind",
                f"Slow sinks are behind: {behind} records. All are in {self._log.path}: feed the sinks later by "
                f"hookline replay {self._log.path} --to ….",
            )
        return not behind

    def end_all(self) -> None:
        """End the process, and wait for that of a killed run, as the log is cut back."""
        self._end()
        if lock := _wait_for_lock(self._log, self._patience):
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
        with (self._log.path.parent / ".helper.log").open("ab") as output:
            process = subprocess.Popen(
                # -P: a csv.py in the current folder must not shadow Python's own. -B: on a full disk Python 3.11 leaves
                # half a .pyc, and no later process could begin.
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


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Close our ends of the pipes: the process delivers what there is, and ends."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if process.poll() is None:
        process.returncode = 0  # it is meant to go on: Python need not warn of it


# -- the process itself --------------------------------------------------------------------------------------------


class SlowReader(Reader):
    """A slow sink and how far it is, which stands in a file beside the log: nothing is delivered twice."""

    log: Log

    def __init__(self, recipe: dict[str, Any], log: Log, failed: Failed) -> None:
        super().__init__(recipe["name"], None, log, failed)
        self._recipe = recipe
        self._is_made = False

    def advance_batch(self) -> bool:
        """Deliver a batch, if there is one and the back-off is over; return whether the sink is farther than before."""
        if not self.back_off.is_due or self.is_done or not (self._is_made or self._make()):
            return False
        self.advance(most=BATCH, seconds=_LONGEST)
        if self.number == self.kept or not self.call("flush"):
            return False
        try:
            self.kept = self.number
            self.keep()
        except OSError as error:
            self.fail("keep its position", error)
        return True

    def _make(self) -> bool:
        """Make the sink, and go to the beginning of the log, or to where the sink has been; return if it worked."""
        try:
            self.sink = self.sink or _make_sink(self._recipe)
            if not self.restart():
                self.kept = self.log.kept(self.name).get("number", 0)
                self.go_to(self.kept)
        except Exception as error:
            self.fail("begin", error)
            return False
        self._is_made = True
        return True

    @property
    def is_done(self) -> bool:
        """Whether everything in the log has arrived."""
        return self.kept == self.number and next(self.log.entries(self.offset), None) is None


def serve(task: dict[str, Any], in_pipe: int, out_pipe: int) -> None:
    """Deliver until the run is over and everything has arrived, or nothing has for ``patience`` seconds."""

    def tell(name: str, what: str, error: Exception) -> None:
        traceback.print_exception(error)  # to the file of this process's standard error
        with suppress(OSError):  # the run is gone, or does not read
            os.write(out_pipe, dumps([name, what, error_text(error)]) + b"\n")

    log, patience = Log(task["log"]), float(task["patience"])
    lock = _wait_for_lock(log, 2 * patience)
    readers = [SlowReader(recipe, log, tell) for recipe in task["sinks"]]
    is_ending, last_progress = False, time.monotonic()
    while True:
        moved = [reader.advance_batch() for reader in readers]
        has_moved = any(moved)
        if has_moved or not is_ending:
            last_progress = time.monotonic()
        if not is_ending:
            # The end of the pipe, or, as a forked worker of the run may hold that open, of the process.
            ready, _, _ = select.select([in_pipe], [], [], 0.0 if has_moved else _IDLE)
            is_ending = bool(ready) or os.getppid() != task["parent"]
            for reader in readers if is_ending else ():
                reader.back_off.reset()
        elif all(reader.is_done for reader in readers) or time.monotonic() - last_progress > patience:
            break
        elif not has_moved:
            time.sleep(0.02)
    for reader in readers:
        reader.call("close")
    if lock is not None:
        lock.release()


def _wait_for_lock(log: Log, patience: float) -> FileLock | None:
    """Return the lock of the process of slow sinks, once that of a killed run has delivered the rest."""
    deadline = time.monotonic() + patience
    while (lock := take_lock(log.path.with_name(".helper.lock"))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return lock


def _make_sink(recipe: dict[str, Any]) -> Any:
    """Return the sink that ``recipe`` describes."""
    try:
        made = pkgutil.resolve_name(f"{recipe['module']}:{recipe['class']}")
    except ModuleNotFoundError:
        if recipe["file"] is None:
            raise
        made = load_object(f"{recipe['file']}:{recipe['class']}", wanted="a sink")  # as experiments are loaded
    return made(**recipe["options"])


def main() -> None:
    """Serve the run at the other end of the pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_pipe, out_pipe = os.dup(0), os.dup(1)
    # What sinks print goes where errors go, not into our pipe; and no sink may read our input.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(in_pipe, False)
    os.set_inheritable(out_pipe, False)
    os.set_blocking(out_pipe, False)
    if hasattr(os, "nice"):
        os.nice(5)  # the run comes first
    with open(in_pipe, "rb", buffering=0, closefd=False) as pipe:
        first = pipe.readline()
    if not first:
        return
    task = loads(first)
    sys.path[:] = task["path"]
    serve(task, in_pipe, out_pipe)


if __name__ == "__main__":
    main()
