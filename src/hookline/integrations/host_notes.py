"""Tell what a run is made with that hookline does not own: the script and its arguments, model, optimizer.

`HostRun` writes it into ``run.json``. It imports nothing that reads flags, which would take 0.4 s
of 0.84 s at the first step of a script.
"""

from __future__ import annotations

import sys
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


def open_notes(manager: HookManager, context: Mapping[str, Any], *, is_own: bool) -> RunNotes:
    """Return what writes ``run.json`` beside the log of a run, as ``hookline run`` does; nothing where there is no log.

    Args:
        manager: Has the log. It is opened in the folder of the run, where a sink writes there too and no other log was
            asked for.
        context: What hooks and sinks are told of the run.
        is_own: Whether the manager was made for this run; one that was given is its maker's to describe.
    """
    fan_out = manager.fan_out
    if is_own and "run_dir" in context and not all(isinstance(each, HostLogSink) for each in fan_out.sinks):
        try:
            fan_out.open_log(Path(context["run_dir"]) / LOG)
        except OptionError as error:  # a Trainer that was interrupted in the same notebook has it open
            text = f"This run has no log, and no page: {error}"
            warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
    log = fan_out.log
    if not is_own or log is None or log.name != LOG:
        return RunNotes(Path(), manager, [], is_written=False)
    return RunNotes(log.parent, manager, fan_out.sinks)


def host_facts(model: nn.Module, optimizer: Any, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``run.json`` says of a run when it begins."""
    first = next(model.parameters(), torch.empty(0))
    return {
        "experiment": context.get("experiment_name") or Path(sys.argv[0]).stem or "run",
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


def close_notes(notes: RunNotes, run: Run, seconds: float, error: BaseException | None) -> None:
    """Write how a run ended, and which hooks have not fired."""
    notes.add(silent=_why_silent(run.manager))
    status = "finished" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    loss = None if run.loss is None else float(run.loss)
    notes.end(
        status, seconds, result=LoopResult(run.num_epochs, run.step + 1, stopped_early=False, loss=loss), error=error
    )


def _why_silent(manager: HookManager) -> dict[str, str]:
    """Return the hooks that have not fired, and when they are due; not those that raised or were left out."""
    plan = manager.plan
    told = {*manager.hooks.errors, *plan.left_out}
    found = {}
    for name in (name for name in manager.hooks if not manager.hooks.fired[name] and name not in told):
        due = [f"{row.point}, {row.when}" if row.when else row.point for row in plan.rows if row.hook == name]
        found[name] = f"it is due at {' and '.join(due)}"
    return found


def command_name(command: Sequence[str]) -> str:
    """Return the name of the script in a command: of the first Python file, of the module, or of the program."""
    for place, word in enumerate(command):
        if word.endswith(".py"):
            return Path(word).stem
        if word == "-m" and place + 1 < len(command) and not command[place + 1].startswith("torch."):
            return command[place + 1].rpartition(".")[2]
    return Path(command[0]).name


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
