"""Make and find the folder of a run, and write its ``run.json``: what was run, with what, and how it ended.

The command line makes one for each strategy, and `HostRun` writes ``run.json`` beside the log of a run that a host
trains. ``--resume``, ``report`` and ``replay`` find the folder again, and the page reads it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from hookline.error_policy import error_text
from hookline.errors import ConfigError, OptionError
from hookline.files import replace_file
from hookline.plain import to_plain

LOG: Final = "records.jsonl"
"""The record log."""
_FACTS: Final = "run.json"
STRATEGY: Final = "script"
"""What the folder of a script's run is called, where that of an experiment has its strategy."""
_PACKAGES: Final = ("hookline", "torch", "numpy", "triton", "transformers")


def next_folder(output_dir: Path, experiment: str, strategy: str) -> Path:
    """Return where a run that begins now would be: ``{strategy}``, or ``{strategy}_1``, ``_2`` … if that is taken."""
    base = output_dir / experiment / strategy
    folder, number = base, 0
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = base.with_name(f"{strategy}_{number}")
    return folder


def new_folder(output_dir: Path, experiment: str, strategy: str) -> Path:
    """Make the next folder; of two runs that begin at the same moment, each has its own."""
    parent = output_dir / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = next_folder(output_dir, experiment, strategy)
            try:
                folder.mkdir()
            except FileExistsError:  # an empty one will do; one that another run has just made will not be empty long
                if not folder.is_dir() or any(folder.iterdir()):
                    continue
            return folder
    except OSError as error:
        raise OptionError(
            f"A folder for the run cannot be made in {parent}: {error.strerror}. Another place: --output-dir DIR."
        ) from None


def newest_run(output_dir: Path, experiment: str, strategy: str) -> Path | None:
    """Return the newest folder of that experiment and strategy that has a checkpoint."""
    name = re.compile(rf"{re.escape(strategy)}(_\d+)?$")
    runs = [one for one in (output_dir / experiment).glob("*") if name.match(one.name) and checkpoints_in(one)]
    return max(runs, key=_age, default=None)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run: files of one process, folders of several ranks."""
    return [one for one in (folder / "checkpoints").glob("step_*") if one.suffix in (".pt", ".ranks")]


def _age(folder: Path) -> tuple[float, int]:
    newest = max(one.stat().st_mtime for one in checkpoints_in(folder))
    number = re.search(r"_(\d+)$", folder.name)
    return newest, int(number[1]) if number else 0


def run_folder(path: str | Path) -> Path:
    """Return the folder of a run that a user means by its path, or by that of the log in it."""
    folder = Path(path)
    if not folder.exists():
        raise OptionError(f"There is no folder {path}: hookline run leaves one in runs/EXPERIMENT/STRATEGY.")
    if folder.is_file():
        folder = folder.parent
    if (folder / LOG).exists() or (folder / _FACTS).exists():
        return folder
    below = sorted(one.parent for one in folder.glob(f"**/{LOG}")) if folder.is_dir() else []
    if len(below) == 1:
        return below[0]
    there = f" Runs below it: {', '.join(map(str, below[:8]))}." if below else ""
    raise OptionError(f"{path} is no folder of a run: there is no {LOG} in it.{there}")


class RunFailed(Exception):
    """Say that training raised, and what to do next; its cause is printed first, and the exit code is 1."""


# -- run.json --------------------------------------------------------------------------------------------------


class RunNotes:
    """Write ``run.json`` when a run begins and when it ends, whatever ends it.

    Recipe: ``notes.begin({"experiment": "parity"})``, then ``notes.end("finished", seconds=3.0, result=result)``.
    """

    def __init__(self, folder: Path, manager: Any, sinks: list[Any], *, is_written: bool = True) -> None:
        self._is_written = is_written
        self._folder = folder
        self._manager = manager
        self._sinks = [type(sink).__name__ for sink in sinks]
        self._before = read_run_json(folder) if is_written else {}
        self._facts: dict[str, Any] = {}

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write that it is running."""
        from hookline import __version__

        if not self._is_written:
            return
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
        if not self._is_written:
            return
        found = {
            **self._facts,
            "finished": None if seconds is None else _now(),
            "seconds": seconds,
            "status": status,
            "hooks": _hook_facts(self._manager),
            "sinks": self._sinks,
            "sink_errors": dict(self._manager.fan_out.errors),
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
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the code in a folder, and whether it was changed since; None where there is no git."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit = re.search(r"^# branch.oid ([0-9a-f]+)$", done.stdout, re.MULTILINE)
    changed = re.search(r"^[^#]", done.stdout, re.MULTILINE)
    return None if commit is None else {"commit": commit[1], "dirty": changed is not None}


def model_facts(model: Any) -> dict[str, Any]:
    """Return the class of a model and how many parameters it has; of the first, the device and the dtype."""
    parameters = list(model.parameters())
    device, dtype = (str(parameters[0].device), str(parameters[0].dtype)) if parameters else ("cpu", "float32")
    about = {"class": type(model).__name__, "parameters": sum(one.numel() for one in parameters)}
    return {"device": device, "dtype": dtype.removeprefix("torch."), "model": about}


def _hook_facts(manager: Any) -> dict[str, Any]:
    """Return for each hook of a manager what it is, what its metrics mean, how often it fired and what that took."""
    from hookline.lifecycle.hook import InterventionHook

    costs = manager.hooks.costs()
    return {
        name: {
            "kind": "intervention" if isinstance(hook, InterventionHook) else "observer",
            "description": hook.description or (type(hook).__doc__ or "").strip().partition("\n")[0],
            "metrics": [asdict(metric) for metric in hook.describe_metrics()],
            "fired": manager.hooks.fired[name],
            "failed": manager.hooks.errors.get(name, 0),
            "cost": costs.get(name, {"count": 0, "total_ms": 0.0, "mean_ms": 0.0}),
            "inside_steps": hook.may_work_inside_steps,
        }
        for name, hook in manager.hooks.items()
    }


def read_run_json(folder: Path, *, is_needed: bool = False) -> dict[str, Any]:
    """Return what ``run.json`` says; nothing if there is none. A damaged one says nothing, or raises if `is_needed`."""
    path = folder / _FACTS
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        if is_needed:
            raise ConfigError(
                f"{path} cannot be read: {error}. It says with which options the run began. Next: put a copy back; or "
                f"delete it, and give these options again beside --resume."
            ) from None
        return {}
    return facts


def write_run_json(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``run.json`` in one go: a reader finds the old one or the new one, whole."""
    text = json.dumps(to_plain(facts), indent=2, allow_nan=False, ensure_ascii=False)
    replace_file(folder / _FACTS, text + "\n")
