"""Run the helper process, which delivers the log to slow sinks while the run goes on.

`HelperProcess` starts it as ``python -m hookline.records.helper``; the first line of its input says which sinks and
which log. Each sink has a `Delivery` of its own: one that fails is retried, from where it stopped, ever later. When
the input ends, as the run is over or was killed, what is left is delivered, and the process ends. It does not import
torch, and Ctrl-C does not reach it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from hookline.files import FileLock, take_lock
from hookline.records.delivery import Delivery
from hookline.records.values import dumps, loads

__all__ = ["main"]

_IDLE: Final = 0.2
"""Seconds between two reads of a log that does not grow."""


class Helper:
    """Delivers to all slow sinks of a run."""

    def __init__(self, task: dict[str, Any], in_pipe: int, out_pipe: int) -> None:
        self._log = Path(task["log"])
        self._patience = float(task["patience"])
        self._removes_log = bool(task["remove"])
        self._parent = int(task["parent"])
        self._in_pipe, self._out_pipe = in_pipe, out_pipe
        self._input = b""
        self._flushes: list[tuple[int, int]] = []
        self._is_ending = False
        self._lock = _wait_for_lock(self._log, 2 * self._patience)
        self._deliveries = [Delivery(one, self._log, self._send) for one in task["sinks"]]

    def run(self) -> None:
        """Deliver until the run is over and everything has arrived, or nothing has for ``patience`` seconds."""
        last_progress = time.monotonic()
        while True:
            has_moved = [delivery.advance() for delivery in self._deliveries]
            self._confirm_flushes()
            if any(has_moved):
                last_progress = time.monotonic()
            elif self._is_ending:
                has_given_up = time.monotonic() - last_progress > self._patience
                if has_given_up or all(delivery.is_done() for delivery in self._deliveries):
                    break
                time.sleep(0.02)
            if not self._is_ending:
                self._read_input(0.0 if any(has_moved) else _IDLE)
                if self._is_ending:
                    last_progress = time.monotonic()
                    self._hurry()
        done = [delivery.close() for delivery in self._deliveries]
        if self._lock is not None:
            self._lock.release()
        if self._removes_log and all(done):
            shutil.rmtree(self._log.parent, ignore_errors=True)

    def _read_input(self, seconds: float) -> None:
        ready, _, _ = select.select([self._in_pipe], [], [], seconds)
        if ready:
            found = os.read(self._in_pipe, 1 << 16)
            self._is_ending = self._is_ending or not found
            *lines, self._input = (self._input + found).split(b"\n")
            for line in lines:
                self._obey(loads(line))
        elif os.getppid() != self._parent:  # killed; a forked worker of it may still hold the pipe open
            self._is_ending = True

    def _obey(self, message: dict[str, Any]) -> None:
        if "flush" in message:
            self._flushes.append((message["flush"], message["until"]))
            self._hurry()
        if "seek" in message:
            for delivery in self._deliveries:
                delivery.seek()
        if "end" in message:
            self._is_ending = True

    def _hurry(self) -> None:
        for delivery in self._deliveries:
            delivery.back_off.hurry()

    def _confirm_flushes(self) -> None:
        least = min((delivery.position for delivery in self._deliveries), default=0)
        for flush, until in self._flushes:
            if least >= until:
                self._send({"flushed": flush})
        self._flushes = [(flush, until) for flush, until in self._flushes if least < until]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            os.write(self._out_pipe, dumps(message) + b"\n")
        except OSError:  # the run is gone, or does not read
            self._flushes.clear()


def _wait_for_lock(log: Path, patience: float) -> FileLock | None:
    """Return the lock of the helper's work, once the helper of a killed run has delivered the rest."""
    deadline = time.monotonic() + patience
    while (lock := take_lock(log.with_name(".helper.lock"))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return lock


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
    first = b""
    while not first.endswith(b"\n"):
        found = os.read(in_pipe, 1)
        if not found:
            return
        first += found
    task = loads(first)
    sys.path[:] = task["path"]
    Helper(task, in_pipe, out_pipe).run()


if __name__ == "__main__":
    main()
