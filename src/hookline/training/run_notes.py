"""Write what a run was made with and how it ended, as ``run.json`` beside its log: the page of the run reads it.

`RunNotes` is made by the command line for each run, and by `HostRun` for one that a host trains and that has a log.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from hookline.error_policy import error_text
from hookline.replace_file import replace_file

__all__ = ["FACTS", "LOG", "STRATEGY", "RunNotes", "model_facts", "read_run_json", "to_plain", "write_run_json"]

LOG: Final = "records.jsonl"
"""The record log."""
FACTS: Final = "run.json"
STRATEGY: Final = "script"
"""What the folder of a script's run is called, where that of an experiment has its strategy."""
_PACKAGES: Final = ("hookline", "torch", "numpy", "triton", "transformers")


class RunNotes:
    """Write ``run.json`` when a run begins and when it ends, whatever ends it.

    Recipe: ``notes.begin({"experiment": "parity"})``, then ``notes.end("finished", seconds=3.0, result=result)``.
    """

    def __init__(self, folder: Path, manager: Any, sinks: list[Any], *, is_written: bool = True) -> None:
        self._is_written = is_written
        self._folder = folder
        self._manager = manager
        self._sinks = [type(sink).__name__ for sink in sinks]
        self._before = read_run_json(folder)
        self._facts: dict[str, Any] = {}

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write that it is running."""
        from hookline import __version__

        before = self._before
        self._facts = {
            "hookline": __version__,
            **facts,
            "versions": _versions(),
            "git": _git_state(Path.cwd()),
            "started": before.get("started", _now()),
            "resumed": [*before.get("resumed", []), _now()] if before else [],
        }
        self._write("running", None, None)

    def add(self, **facts: Any) -> None:
        """Say more of the run while it lasts."""
        self._facts |= facts
        self._write("running", None, None)

    def undo(self) -> None:
        """Write back what was there before: the run was not begun after all."""
        if self._is_written:
            write_run_json(self._folder, self._before)

    def end(self, status: str, seconds: float, *, result: Any = None, error: BaseException | None = None) -> None:
        """Write how it ended; the seconds of the runs that it resumed count."""
        if error is not None:
            self._facts["error"] = error_text(error)
        try:
            self._write(status, seconds + (self._before.get("seconds") or 0.0), result)
        except OSError as trouble:  # a full disk has not kept the run from ending
            print(f"hookline: run.json could not be written: {trouble}.", file=sys.stderr)

    def _write(self, status: str, seconds: float | None, result: Any) -> None:
        manager = self._manager
        if not self._is_written:
            return
        found = {
            **self._facts,
            "finished": None if seconds is None else _now(),
            "seconds": seconds,
            "status": status,
            "hooks": {} if manager is None else _hook_facts(manager),
            "sinks": self._sinks,
            "sink_errors": {} if manager is None else manager.sink_errors,
            "result": None if result is None else _result(result),
        }
        write_run_json(self._folder, found)


def _result(result: Any) -> dict[str, Any]:
    return {"epochs": result.epochs, "steps": result.steps, "loss": result.loss, "metrics": dict(result.metrics)}


def _now() -> str:
    """Return the time, with its zone."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the code in a folder, and whether it was changed since; None where there is no git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def model_facts(model: Any) -> dict[str, Any]:
    """Return the class of a model and how many parameters it has."""
    return {"class": type(model).__name__, "parameters": sum(one.numel() for one in model.parameters())}


def _hook_facts(manager: Any) -> dict[str, Any]:
    """Return for each hook of a manager what it is, what its metrics mean, how often it fired and what that took."""
    from hookline.training.training_hook import InterventionHook

    costs = manager.costs() if hasattr(manager, "costs") else {}
    found = {}
    for name, hook in manager.hooks.items():
        found[name] = {
            "kind": "intervention" if isinstance(hook, InterventionHook) else "observer",
            "description": hook.description or (type(hook).__doc__ or "").strip().partition("\n")[0],
            "metrics": [asdict(metric) for metric in hook.describe_metrics()],
            "fired": manager.fired[name],
            "failed": manager.hook_errors.get(name, 0),
            "cost": costs.get(name, {"count": 0, "total_ms": 0.0, "mean_ms": 0.0}),
            "inside_steps": hook.may_work_inside_steps,
        }
    return found


def read_run_json(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` says; nothing if there is none, or it cannot be read."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def write_run_json(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``run.json`` in one go: a reader finds the old one or the new one, whole."""
    text = json.dumps(to_plain(facts), indent=2, allow_nan=False, ensure_ascii=False)
    replace_file(folder / FACTS, text + "\n")


def to_plain(value: Any) -> Any:
    """Return a value as JSON has it; an object of another kind becomes text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value if isinstance(value, int) or math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    return str(value)
