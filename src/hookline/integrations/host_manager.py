"""Make the manager of a host's run, hand metrics to the host's logger, and write ``run.json`` beside the log.

`HostRun` calls it with what the user gave to an adapter: hooks as objects, their names, or a run file. What that says
of training itself (experiment, seed, device) is the host's to decide, and is passed over.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from hookline.distributed.ranks import rank_count
from hookline.error_policy import warn_user
from hookline.errors import OptionError
from hookline.integrations.resources import ResourcesHook
from hookline.lifecycle.manager import HookManager
from hookline.messages import type_name, unknown_name_text
from hookline.records.sink import MetricSink, Record
from hookline.records.values import mean, number, numbers, step_axis, values_in
from hookline.runs.build import ALWAYS, Built, build
from hookline.runs.folder import LOG, STRATEGY, RunNotes, model_facts
from hookline.training.loops import LoopResult

if TYPE_CHECKING:
    from hookline.specs.hook_spec import HookSpec
    from hookline.training.run import Run

_RECORDER: Final = "flight_recorder"
_STEPS_TO_FLUSH: Final = 100


def make_manager(
    hooks: Iterable[Any] | str | None,
    sinks: Iterable[Any] | None,
    run_file: str | Path | None,
    manager: HookManager | None,
    loop: str | None,
    options: dict[str, Any],
) -> tuple[HookManager, list[HookSpec]]:
    """Return the manager that was given, or one that is made of everything else; and hooks for modules of the model."""
    if loop not in (None, "epoch", "step"):
        raise OptionError(f"loop= is 'epoch' or 'step': what the run counts; got {loop!r}.")
    options = {name: value for name, value in options.items() if value is not None}
    if manager is not None:
        others = {"hooks": hooks, "sinks": sinks, "run_file": run_file, **options}
        _check_manager(manager, [f"{name}=" for name, value in others.items() if value is not None])
        return manager, []
    built = _built(run_file)
    given = list(hooks) if isinstance(hooks, list | tuple | set | frozenset) else [] if hooks is None else [hooks]
    listed = [*built.hooks, *given]
    if not _has(ALWAYS, listed):
        listed = [ALWAYS, *listed]
    if options.get("log") is not None:
        listed = with_recorder(listed)
    made = built.make_manager(
        [*(hook for hook in listed if not isinstance(hook, str)), ResourcesHook()],
        hook_names=[hook for hook in listed if isinstance(hook, str)],
        sinks=[*built.make_sinks(), *(sinks or ())],
        loop_type=loop,
        **{"flush_every": _STEPS_TO_FLUSH, **options},
    )
    return made, built.specs


def _built(run_file: str | Path | None) -> Built:
    """Return what a run file names; it is read by what takes 0.4 s to import."""
    if run_file is None:
        return Built()
    from hookline.runs.read import read_file

    return build(read_file(run_file))


def with_recorder(hooks: Iterable[Any]) -> list[Any]:
    """Return the hooks of a run with a log: it has one too that writes the last steps when something happens."""
    listed = list(hooks)
    return listed if _has(_RECORDER, listed) else [*listed, _RECORDER]


def _has(name: str, hooks: Iterable[Any]) -> bool:
    return any(name == (hook if isinstance(hook, str) else getattr(hook, "name", "")) for hook in hooks)


def check_options(options: Mapping[str, Any], *adapters: Callable[..., Any]) -> None:
    """Raise if one is not an option of a manager.

    Args:
        options: What an adapter was given beyond its own parameters.
        adapters: The adapter, and those that it hands options on to; their parameters are named in the error too.
    """
    taken = dict.fromkeys(name for one in (*adapters, HookManager) for name in inspect.signature(one).parameters)
    known = [name for name in taken if name not in ("hook_names", "loop_type", "options")]
    for name in options:
        if name in ("every", "on", "stats"):
            raise OptionError(f"{name}= belongs to the watch: hooks=[hookline.watch(model, {name}=...)].")
        if name not in known:
            raise OptionError(f"There is no option {name}= here.{unknown_name_text(name, known)}")


def _check_manager(manager: Any, given: list[str]) -> None:
    if not isinstance(manager, HookManager):
        raise OptionError(f"manager= is a HookManager(hooks=[...], sinks=[...]); got {type_name(manager)}.")
    if given:
        raise OptionError(
            f"manager= has its hooks and sinks already, and {', '.join(given)} was given beside it. Next: give them to "
            "the manager."
        )


# -- the logger of a host -----------------------------------------------------------------------------------


def check_report_to(report_to: str | None, host: str) -> None:
    """Raise if ``report_to`` is neither ``"sinks"`` nor what this host calls its own logger."""
    if report_to not in ("sinks", host):
        raise OptionError(f"report_to= is 'sinks' or {host!r}; got {report_to!r}. W&B's own sink goes into sinks=.")


class HostLogSink(MetricSink):
    """Give every number to the logger of a host; a list becomes its mean, and text is left out.

    Args:
        log: Takes the numbers of one step, and the step.
        per_step: Call it once for each step. False: once for each record, with the mean over its steps, for hosts that
            log at their current step only.
    """

    def __init__(self, log: Callable[[dict[str, float], int], None], *, per_step: bool = True) -> None:
        self._log = log
        self._per_step = per_step

    def write(self, record: Record) -> None:
        """Log the numbers of ``record``."""
        rows: dict[int, dict[str, list[float]]] = {}
        last = step_axis(record)
        for name, value, step in values_in(record):
            single = number(value)
            if single is None:
                several = numbers(value)
                name, single = f"{name}_mean", mean(several) if several else None
            if single is not None:
                rows.setdefault(step if self._per_step else last, {}).setdefault(name, []).append(single)
        for step in sorted(rows):
            self._log({name: mean(values) for name, values in rows[step].items()}, step)


# -- run.json -------------------------------------------------------------------------------------------------


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
            warn_user(f"This run has no log, and no page: {error}")
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
