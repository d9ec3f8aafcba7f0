"""The helper process as the run sees it: begun with the first record, asked to flush, begun anew if it dies.

Takes slow sinks as specs (class and options), hands them to ``python -m hookline.sinks.helper``, which reads the log.
Talks to it by lines of JSON over pipes, and never waits for it but in ``flush`` and ``close``.
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

from hookline.sinks.log_position import read_position
from hookline.sinks.resilient_log import BackOff, LogKeeper
from hookline.sinks.strict_json import Clean, dumps, loads
from hookline.sinks.warn_once import Teller, say

__all__ = ["HelperProcess", "sink_spec"]

_LOOK_EVERY: Final = 0.25
"""Seconds between looks at what the process says: a look costs two system calls."""
_QUIET: Final = 1.5
"""Seconds of waiting before it is said what for: MLflow alone takes ten to import."""
_HASTY: Final = 1.0
"""Seconds to wait for sinks that have made the run wait in vain before."""


def sink_spec(sink: Any, name: str) -> dict[str, Any] | str:
    """What such a sink is made of in another process; or why it cannot be."""
    kind = type(sink)
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__ or module is None:
        return f"{kind.__qualname__} cannot be imported elsewhere; put it at the top of a module of its own"
    try:
        options = sink.options()
        clean = Clean()
        fit = clean.mapping(options)
        dumps(fit)
    except Exception as error:
        return f"options() raised {type(error).__name__}: {error}".rstrip(".")
    if clean.altered or clean.flags:
        return f"options() has what JSON cannot hold: {', '.join(map(repr, [*clean.altered, *clean.flags]))}"
    file = getattr(module, "__file__", None)
    return {
        "name": name,
        "module": kind.__module__,
        "class": kind.__qualname__,
        "file": None if file is None else str(Path(file).absolute()),
        "options": fit,
    }


class HelperProcess:
    """A process in which slow sinks are given what is in the log."""

    def __init__(self, keeper: LogKeeper, teller: Teller, patience: float) -> None:
        self._keeper, self._teller, self._patience = keeper, teller, patience
        self._specs: list[dict[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._heard = b""
        self._flushed = self._asked = 0
        self._looked = 0.0
        self._back_off = BackOff(first=0.5)
        self._kept_waiting = False

    def add(self, spec: dict[str, Any]) -> None:
        """One more sink; the process begins anew if it runs."""
        self._specs.append(spec)
        if self._process is not None:
            self.close()

    def go(self) -> None:
        """There is something in the log: see to it that the process runs."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY:
            self._looked = now
            if self._process is None or self._process.poll() is not None:
                self._begin()
            self.look()

    def look(self) -> None:
        """Take in what the process has to say."""
        process = self._process
        if process is None or process.stdout is None:
            return
        with suppress(OSError):
            while found := os.read(process.stdout.fileno(), 1 << 16):
                self._heard += found
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            with suppress(ValueError):
                self._take(loads(line))

    def flush(self, number: int) -> bool:
        """Wait until all sinks have had the records below that number; False, and said, if they take too long."""
        if not number or (self._process is None and not self._behind(number)):
            return True
        self._begin_if_dead()
        self._asked += 1
        if self._wait_for(number, _HASTY if self._kept_waiting else self._patience):
            self._kept_waiting = False
            return True
        behind = self._behind(number)
        self._kept_waiting = bool(behind)
        if behind:
            words = ", ".join(f"{name} by {count:,} records" for name, count in behind.items())
            self._teller.once(
                f"behind {sorted(behind)}",
                f"After {self._patience:g} s slow sinks are behind: {words}. They are all in {self._keeper.path}: "
                f"feed the sinks later by hookline replay {self._keeper.path} --to ….",
            )
        return not behind

    def seek(self) -> None:
        """The log was cut back: sinks look at it from its beginning."""
        self._say({"seek": True})

    def close(self) -> bool:
        """Have the process end when all is delivered, and wait for that; whether there was one."""
        process = self._process
        if process is None:
            return False
        self._say({"end": True})
        if process.stdin is not None:
            process.stdin.close()
        if not self._has_ended(process):
            self._teller.once(
                "ending",
                f"The process of the slow sinks (pid {process.pid}) is still at work; it goes on by itself, and ends "
                "when everything is delivered or cannot be.",
            )
        self.look()
        self._let_go()
        return True

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for its end; not for ever."""
        patience = _HASTY if self._kept_waiting else self._patience
        for seconds in (min(_QUIET, patience), max(patience - _QUIET, 0.0)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return True
            if seconds == _QUIET:
                say(f"{', '.join(self._names())} let go of what they hold; waiting for that {self._at_most(patience)}.")
        return False

    # -- the process ---------------------------------------------------------------------------------------------

    def _begin_if_dead(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._back_off.hurry()
            self._begin()

    def _begin(self) -> None:
        if self._process is not None:
            self.look()
            code = self._process.returncode
            self._let_go()
            self._failed(f"The process of the slow sinks ended ({_ending(code)}); it is begun anew")
        if not self._back_off.is_due:
            return
        try:
            self._process = self._started()
        except OSError as error:
            self._failed(f"The process of the slow sinks could not be begun ({error}); it is tried again")
            return
        self._finalizer = weakref.finalize(self, _abandon, self._process)
        self._say(
            {
                "sinks": self._specs,
                "log": str(self._keeper.path.absolute()),
                "path": sys.path,
                "patience": self._patience,
                "remove": self._keeper.is_temporary,
                "parent": os.getpid(),
            }
        )

    def _started(self) -> subprocess.Popen[bytes]:
        home = str(Path(__file__).parents[2])
        before = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, before] if before else [home])}
        with _output_beside(self._keeper.path) as output:
            process = subprocess.Popen(
                # -P: a csv.py in the current folder must not stand in for Python's own.
                [sys.executable, "-P", "-m", "hookline.sinks.helper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the run
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if process is not None:
            _abandon(process)
        self._heard = b""

    def _failed(self, sentence: str) -> None:
        self._back_off.failed()
        self._teller.counts["helper"] += 1
        self._teller.once("helper", f"{sentence}. What is in the log is not lost. Its output: .helper.log beside it.")

    # -- talking -------------------------------------------------------------------------------------------------

    def _say(self, message: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with suppress(OSError):  # it died: seen at the next look
            self._process.stdin.write(dumps(message) + b"\n")
            self._process.stdin.flush()

    def _take(self, message: dict[str, Any]) -> None:
        if "flushed" in message:
            self._flushed = message["flushed"]
            self._back_off.worked()
            return
        name = message["failed"]
        self._teller.counts[name] += 1
        missing = " That record is passed over." if message.get("skipped") else " It is tried again from the log."
        self._teller.once(
            f"{name}{' skipped' if message.get('skipped') else ''}",
            f"{name} could not {message['what']} ({message['error']}); the run and the other sinks go on.{missing} "
            "Further failures are counted in manager.sink_errors.",
        )

    def _wait_for(self, number: int, patience: float) -> bool:
        deadline = time.monotonic() + patience
        quiet_until: float | None = time.monotonic() + _QUIET
        asked_of = None
        while True:
            if self._process is not None and asked_of is not self._process:
                asked_of = self._process
                self._say({"flush": self._asked, "until": number})
            self.look()
            if self._flushed >= self._asked:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if quiet_until is not None and time.monotonic() > quiet_until:
                quiet_until = None
                self._say_who_is_awaited(number, left)
            if self._process is None or self._process.poll() is not None:
                self._begin()
                time.sleep(min(left, 0.05))
            else:
                time.sleep(min(left, 0.005))

    def _say_who_is_awaited(self, number: int, left: float) -> None:
        behind = self._behind(number)
        words = ", ".join(f"{name} ({count:,} of {number:,} records to go)" for name, count in behind.items())
        say(f"waiting {self._at_most(left)} for {words or 'slow sinks'}.")

    def _at_most(self, seconds: float) -> str:
        return f"up to {seconds:.0f} s (Ctrl-C: they go on by themselves)"

    def _names(self) -> list[str]:
        return [spec["name"] for spec in self._specs]

    def _behind(self, number: int) -> dict[str, int]:
        found = {}
        for spec in self._specs:
            missing = number - read_position(self._keeper.path, spec["name"])
            if missing > 0:
                found[spec["name"]] = missing
        return found


def _output_beside(log: Path) -> IO[bytes]:
    """Where what sinks print goes."""
    try:
        return (log.parent / ".helper.log").open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _ending(code: int | None) -> str:
    return f"by signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Let go of a process: without our end of the pipe it delivers what there is, and ends."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if process.poll() is None:
        process.returncode = 0  # it is meant to go on: nothing to warn of
