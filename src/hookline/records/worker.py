"""Run the process of slow sinks, which hands them the log while the run goes on.

`HelperProcess` starts it as ``python -m hookline.records.worker``; the first line of its input says which sinks and
which log. Each sink has a `Reader`, as in the run's own process. When the input ends, as the run is over or was killed,
what is left is delivered, and the process ends. It does not import torch, and Ctrl-C does not reach it.
"""

from __future__ import annotations

import importlib
import os
import select
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

from hookline.error_policy import error_text
from hookline.load import load_object
from hookline.records.helper import wait_for_lock
from hookline.records.log import Context, Log, dumps, loads
from hookline.records.readers import Failed, Reader, hand
from hookline.records.sink import RunSink

__all__ = ["SlowReader", "main", "serve"]

_IDLE: Final = 0.2
"""Seconds between two reads of a log that does not grow."""
BATCH: Final = 256
"""Records that are delivered before the position is written: as many may come twice after a kill."""
_LONGEST: Final = 1.0
"""Seconds after which the other sinks continue."""


class SlowReader(Reader):
    """A slow sink and how far it is, which stands in a file beside the log: nothing is delivered twice."""

    log: Log

    def __init__(self, recipe: dict[str, Any], log: Log, failed: Failed) -> None:
        super().__init__(recipe["name"], None, log, failed)
        self._recipe = recipe
        self._has_begun = False

    def advance_batch(self) -> bool:
        """Deliver a batch, if there is one and the back-off is over; return whether the sink is farther than before."""
        if not self.back_off.is_due or self.is_done or not (self._has_begun or self._begin()):
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

    def _begin(self) -> bool:
        """Make the sink, and go to the beginning of the log, or to where the sink has been; return if it worked."""
        try:
            self.sink = self.sink or _make_sink(self._recipe)
            if isinstance(self.sink, RunSink):
                self.sink.keep_files = self.keep
            if not self.restart():
                self.number = self.kept = self.log.kept(self.name).get("number", 0)
                self.offset, context = self.log.find(self.number) if self.number else (0, {})
                if context:
                    hand(self.sink, Context(context))
        except Exception as error:
            self.fail("begin", error)
            return False
        self._has_begun = True
        return True

    @property
    def is_done(self) -> bool:
        """Whether everything in the log has arrived."""
        if self.kept != self.number:
            return False
        return self.offset >= self.log.size or next(self.log.entries(self.offset), None) is None


def serve(task: dict[str, Any], in_pipe: int, out_pipe: int) -> None:
    """Deliver until the run is over and everything has arrived, or nothing has for ``patience`` seconds."""

    def tell(name: str, what: str, error: Exception) -> None:
        traceback.print_exception(error)  # to the file of this process's standard error
        with suppress(OSError):  # the run is gone, or does not read
            os.write(out_pipe, dumps([name, what, error_text(error)]) + b"\n")

    log, patience = Log(task["log"]), float(task["patience"])
    lock = wait_for_lock(log, 2 * patience)
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
                reader.back_off.hurry()
        elif all(reader.is_done for reader in readers) or time.monotonic() - last_progress > patience:
            break
        elif not has_moved:
            time.sleep(0.02)
    delivered = [reader.call("close") and reader.is_done for reader in readers]
    if lock is not None:
        lock.release()
    if task["remove"] and all(delivered):
        shutil.rmtree(log.path.parent, ignore_errors=True)


def _make_sink(recipe: dict[str, Any]) -> Any:
    """Return the sink that ``recipe`` describes."""
    try:
        made = attrgetter(recipe["class"])(importlib.import_module(recipe["module"]))
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
