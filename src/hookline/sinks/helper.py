"""The helper process: gives slow sinks what is in the log, while the run goes on.

Begun by `HelperProcess` as ``python -m hookline.sinks.helper``; a first line on its input says which sinks and which
log. Each sink goes through the log by itself: one that fails is tried again, from where it stopped, ever later. When
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

from hookline.file_lock import FileLock, take_lock
from hookline.sinks.delivery import Delivery
from hookline.sinks.strict_json import dumps, loads

__all__ = ["main"]

_IDLE: Final = 0.2
"""Seconds between looks at a log that does not grow."""


class Helper:
    """All slow sinks of a run."""

    def __init__(self, spec: dict[str, Any], inlet: int, outlet: int) -> None:
        self._log = Path(spec["log"])
        self._patience = float(spec["patience"])
        self._removes = bool(spec["remove"])
        self._parent = int(spec["parent"])
        self._inlet, self._outlet = inlet, outlet
        self._heard = b""
        self._flushes: list[tuple[int, int]] = []
        self._is_ending = False
        self._turn = _taken_turn(self._log, 2 * self._patience)
        self._deliveries = [Delivery(one, self._log, self._say) for one in spec["sinks"]]

    def run(self) -> None:
        """Deliver until the run is over and everything has arrived, or nothing has for a long time."""
        progress = time.monotonic()
        while True:
            moved = [delivery.advance() for delivery in self._deliveries]
            self._answer()
            if any(moved):
                progress = time.monotonic()
            elif self._is_ending:
                if all(d.is_done() for d in self._deliveries) or time.monotonic() - progress > self._patience:
                    break
                time.sleep(0.02)
            if not self._is_ending:
                self._listen(0.0 if any(moved) else _IDLE)
                if self._is_ending:
                    progress = time.monotonic()
                    self._hurry()
        done = [delivery.close() for delivery in self._deliveries]
        if self._turn is not None:
            self._turn.release()
        if self._removes and all(done):
            shutil.rmtree(self._log.parent, ignore_errors=True)

    def _listen(self, seconds: float) -> None:
        ready, _, _ = select.select([self._inlet], [], [], seconds)
        if ready:
            found = os.read(self._inlet, 1 << 16)
            self._is_ending = self._is_ending or not found
            *lines, self._heard = (self._heard + found).split(b"\n")
            for line in lines:
                self._take(loads(line))
        elif os.getppid() != self._parent:  # killed; a forked worker of it may still hold the pipe open
            self._is_ending = True

    def _take(self, message: dict[str, Any]) -> None:
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

    def _answer(self) -> None:
        least = min((delivery.position for delivery in self._deliveries), default=0)
        for flush, until in self._flushes:
            if least >= until:
                self._say({"flushed": flush})
        self._flushes = [(flush, until) for flush, until in self._flushes if least < until]

    def _say(self, message: dict[str, Any]) -> None:
        try:
            os.write(self._outlet, dumps(message) + b"\n")
        except OSError:  # the run is gone, or does not listen
            self._flushes.clear()


def _taken_turn(log: Path, patience: float) -> FileLock | None:
    """Wait for the helper of a run that was killed to deliver the rest; what keeps the next one waiting."""
    deadline = time.monotonic() + patience
    while (turn := take_lock(log.with_name(".helper.lock"))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return turn


def main() -> None:
    """Serve the run at the other end of the pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inlet, outlet = os.dup(0), os.dup(1)
    # What sinks print is not ours to say: it goes where errors go. And nobody is to read our input.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(inlet, False)
    os.set_inheritable(outlet, False)
    os.set_blocking(outlet, False)
    if hasattr(os, "nice"):
        os.nice(5)  # the run comes first
    first = b""
    while not first.endswith(b"\n"):
        found = os.read(inlet, 1)
        if not found:
            return
        first += found
    spec = loads(first)
    sys.path[:] = spec["path"]
    Helper(spec, inlet, outlet).run()


if __name__ == "__main__":
    main()
