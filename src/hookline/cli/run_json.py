"""``run.json``, from the beginning of a run to its end.

Kept by `session`; takes what is known of the run, and asks its manager at the end what hooks have cost.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.cli.folder import read_run_file, write_run_file
from hookline.cli.run_facts import git_state, hook_facts, now, versions

__all__ = ["RunNotes"]


class RunNotes:
    """What is written down of a run: when it begins, when it ends, whatever ends it.

    Recipe: ``notes.begin({"experiment": "parity"})``, then ``notes.end("finished", seconds=3.0, result=result)``.
    """

    def __init__(self, folder: Path, manager: Any, sinks: list[Any]) -> None:
        self._folder = folder
        self._manager = manager
        self._sinks = [type(sink).__name__ for sink in sinks]
        self._before = read_run_file(folder)
        self._facts: dict[str, Any] = {}

    def begin(self, facts: Mapping[str, Any]) -> None:
        """It is running."""
        from hookline import __version__

        before = self._before
        self._facts = {
            "hookline": __version__,
            **facts,
            "versions": versions(),
            "git": git_state(Path.cwd()),
            "started": before.get("started", now()),
            "resumed": [*before.get("resumed", []), now()] if before else [],
        }
        self._write("running", None, None)

    def take_back(self) -> None:
        """It was not begun after all: what stood there stands there."""
        write_run_file(self._folder, self._before)

    def end(self, status: str, seconds: float, *, result: Any = None, error: BaseException | None = None) -> None:
        """It is over; the seconds of the runs that it went on with count."""
        if error is not None:
            self._facts["error"] = f"{type(error).__name__}: {error}"
        try:
            self._write(status, seconds + (self._before.get("seconds") or 0.0), result)
        except OSError as trouble:  # a full disk has not kept the run from ending
            print(f"hookline: run.json could not be written: {trouble}.", file=sys.stderr)

    def _write(self, status: str, seconds: float | None, result: Any) -> None:
        manager = self._manager
        found = {
            **self._facts,
            "finished": None if seconds is None else now(),
            "seconds": seconds,
            "status": status,
            "hooks": {} if manager is None else hook_facts(manager),
            "sinks": self._sinks,
            "sink_errors": {} if manager is None else manager.sink_errors,
            "result": None if result is None else _result(result),
        }
        write_run_file(self._folder, found)


def _result(result: Any) -> dict[str, Any]:
    return {"epochs": result.epochs, "steps": result.steps, "loss": result.loss, "metrics": dict(result.metrics)}
