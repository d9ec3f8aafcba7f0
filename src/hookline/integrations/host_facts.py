"""Tell what a run is made with that hookline does not own: the script and its arguments, model, optimizer.

`HostRun` writes it into ``run.json``. It imports nothing that reads flags, which would take 0.4 s
of 0.84 s at the first step of a script.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookline.distributed.ranks import rank_count
from hookline.errors import HooklineWarning, OptionError
from hookline.integrations.host_manager import HostLogSink
from hookline.messages import caller_stacklevel
from hookline.runs.folder import LOG, STRATEGY, RunNotes, model_facts
from hookline.training.loops import LoopResult

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager
    from hookline.training.run import Run

__all__ = ["HostNotes", "arguments_by_name", "command_name", "host_facts", "script_name"]


def script_name() -> str:
    """Return what the script of this process is called."""
    return Path(sys.argv[0]).stem or "run"


def command_name(command: Sequence[str]) -> str:
    """Return the name of the script in a command: of the first Python file, of the module, or of the program."""
    for place, word in enumerate(command):
        if word.endswith(".py"):
            return Path(word).stem
        if word == "-m" and place + 1 < len(command) and not command[place + 1].startswith("torch."):
            return command[place + 1].rpartition(".")[2]
    return Path(command[0]).name


def host_facts(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return what ``run.json`` says of a run when it begins."""
    first = next(model.parameters(), torch.empty(0))
    return {
        "experiment": script_name(),
        "path": sys.argv[0],
        "strategy": STRATEGY,
        "command": [sys.executable, *sys.argv],
        "config": arguments_by_name(sys.argv[1:]),
        "optimizer": type(optimizer).__name__,
        "ranks": rank_count(),
        "threads": torch.get_num_threads(),
        "device": str(first.device),
        "dtype": str(first.dtype).removeprefix("torch."),
        "model": model_facts(model),
    }


class HostNotes:
    """Write ``run.json`` beside the log of a run that a host trains, as ``hookline run`` does for its own.

    Recipe: ``open(run_context)`` before the run is told its context, ``begin(model, optimizer)``, ``end(run, error)``.

    Args:
        manager: Has the log.
        is_own: Whether it was made for this run; one that was given is its maker's to describe.
    """

    def __init__(self, manager: HookManager, *, is_own: bool) -> None:
        self._manager, self._is_own = manager, is_own
        self._name: str | None = None
        self._notes: RunNotes | None = None
        self._began = 0.0

    def open(self, context: Mapping[str, Any]) -> None:
        """Open a log in the folder of the run, where a sink writes there too and no other log was asked for."""
        self._name = context.get("experiment_name")
        fan_out = self._manager.fan_out
        if self._is_own and "run_dir" in context and not all(isinstance(each, HostLogSink) for each in fan_out.sinks):
            try:
                fan_out.open_log(Path(context["run_dir"]) / LOG)
            except OptionError as error:  # a Trainer that was interrupted in the same notebook has it open
                text = f"This run has no log, and no page: {error}"
                warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Write what the run is made with."""
        fan_out = self._manager.fan_out
        if self._is_own and fan_out.log is not None and fan_out.log.name == LOG:
            self._notes = RunNotes(fan_out.log.parent, self._manager, fan_out.sinks)
            self._began = time.perf_counter()
            name = {} if self._name is None else {"experiment": self._name}
            self._notes.begin({**host_facts(model, optimizer), **name})

    def add(self, **facts: Any) -> None:
        """Write more about the run."""
        if self._notes is not None:
            self._notes.add(**facts)

    def end(self, run: Run, error: BaseException | None) -> None:
        """Write how it ended."""
        notes, self._notes = self._notes, None
        if notes is None:
            return
        notes.add(silent=_why_silent(self._manager))
        status = "finished" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        loss = None if run.loss is None else float(run.loss)
        result = LoopResult(run.num_epochs, run.step + 1, stopped_early=False, loss=loss)
        notes.end(status, time.perf_counter() - self._began, result=result, error=error)


def _why_silent(manager: HookManager) -> dict[str, str]:
    """Return the hooks that have not fired, and when they are due; not those that raised or were left out."""
    plan = manager.plan
    told = {*manager.hooks.errors, *plan.left_out}
    found = {}
    for name in (name for name in manager.hooks if not manager.hooks.fired[name] and name not in told):
        due = [f"{row.point}, {row.when}" if row.when else row.point for row in plan.rows if row.hook == name]
        found[name] = f"it is due at {' and '.join(due)}"
    return found


def arguments_by_name(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a script by name, so that those of two runs can be compared.

    Recipe: ``arguments_by_name(["--lr", "1e-3", "--amp"])`` is ``{"lr": "1e-3", "amp": True}``.

    Nobody knows which words a flag takes: all up to the next flag are its value. Words before the first flag are
    together the ``arguments``.
    """
    found: dict[str, Any] = {}
    name = "arguments"
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True
        else:
            found[name] = word if found.get(name, True) is True else f"{found[name]} {word}"
    return found
