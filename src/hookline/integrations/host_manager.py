"""Make the manager of a host's run: from hooks as objects, from their names, or from a run file.

`HostRun` calls it with what the user gave to an adapter; the callbacks of trainers check their arguments here first.
What a run file says of training itself (experiment, seed, device) is the host's to decide, and is passed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hookline.errors import OptionError
from hookline.integrations.resources import ResourcesHook
from hookline.lifecycle.manager import HookManager
from hookline.messages import type_name, unknown_name_text
from hookline.records.sink import MetricSink, Record
from hookline.records.values import mean, number, numbers, step_axis, values_in
from hookline.runs.build import ALWAYS
from hookline.sinks.jsonl_sink import JSONLSink

if TYPE_CHECKING:
    from hookline.specs.hook_spec import HookSpec

__all__ = [
    "HostLog",
    "HostLogSink",
    "check_alone",
    "check_callback",
    "check_options",
    "check_report_to",
    "hook_names",
    "make_manager",
    "recorder_of",
    "sinks_or_usual",
]

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
        given = {"hooks": hooks, "sinks": sinks, "run_file": run_file, **options}
        _check_manager(manager, [name for name, value in given.items() if value is not None])
        return manager, []
    names, objects = _split(hooks)
    specs: list[HookSpec] = []
    if run_file is not None:
        from hookline.runs.build import build
        from hookline.runs.read import read_file

        built = build(read_file(run_file))
        objects, specs = [*built.hooks, *objects], built.specs
        sinks = [*built.make_sinks(), *(sinks or ())]
        options = {**built.options, **options}
    if all(getattr(one, "name", "") != ALWAYS for one in objects):
        names = [ALWAYS, *names]
    if options.get("log") is not None:
        names += recorder_of([*names, *objects])
    usual = {"on_error": "raise", "flush_every": _STEPS_TO_FLUSH}
    return HookManager(names, [*objects, ResourcesHook()], sinks, loop_type=loop, **{**usual, **options}), specs


def recorder_of(hooks: Iterable[Any]) -> list[str]:
    """Return the name of the hook that a run with a log has too: it writes the last steps when something happens."""
    return [] if _RECORDER in hook_names(list(hooks)) else [_RECORDER]


def check_options(options: Mapping[str, Any], *adapters: Callable[..., Any]) -> None:
    """Raise if one is not an option of a manager; say where the options of watches and schedules go.

    Args:
        options: What an adapter was given beyond its own parameters.
        adapters: The adapter, and those that it hands options on to; their parameters are named in the error too.
    """
    taken = dict.fromkeys(name for one in (*adapters, HookManager) for name in inspect.signature(one).parameters)
    known = [name for name in taken if name not in ("hook_names", "loop_type", "options")]
    for name in options:
        if name in ("every", "on", "stats"):
            raise OptionError(
                f"{name}= belongs to the watch: hooks=[hookline.watch(model, {name}=...)]. How often it reports: "
                "loop='step', snapshot_every=10."
            )
        if name not in known:
            raise OptionError(f"There is no option {name}= here.{unknown_name_text(name, known)}")


def _check_manager(manager: Any, given: list[str]) -> None:
    if not isinstance(manager, HookManager):
        raise OptionError(f"manager= is a HookManager(hooks=[...], sinks=[...]); got {type_name(manager)}.")
    if given:
        raise OptionError(
            f"manager= has its hooks and sinks already, and {', '.join(f'{name}=' for name in given)} was given beside "
            "it. Next: give them to the manager."
        )


def _split(hooks: Iterable[Any] | str | None) -> tuple[list[str], list[Any]]:
    """Return the hooks that are named, and the others; one alone need not be in a list."""
    if hooks is None:
        return [], []
    given = list(hooks) if isinstance(hooks, (list, tuple, set, frozenset)) else [hooks]
    return [hook for hook in given if isinstance(hook, str)], [hook for hook in given if not isinstance(hook, str)]


# -- callbacks of trainers -----------------------------------------------------------------------------------


def check_report_to(report_to: str | None, host: str) -> None:
    """Raise if ``report_to`` is neither ``"sinks"`` nor what this host calls its own logger."""
    if report_to not in ("sinks", host):
        raise OptionError(f"report_to= is 'sinks' or {host!r}; got {report_to!r}. W&B's own sink goes into sinks=.")


def check_callback(hooks: Any, report_to: str, options: Mapping[str, Any]) -> None:
    """Raise if a ``HooklineCallback`` was given no hooks, or an unknown ``report_to``."""
    check_report_to(report_to, "trainer")
    if hooks is None and not _brings_its_own(options):
        raise OptionError(
            "HooklineCallback() has no hooks. Next: callbacks=[HooklineCallback(['norms'])], an object and not the "
            "class; or run_file=, or manager=."
        )


def check_alone(callbacks: Iterable[Any]) -> None:
    """Raise if a trainer has more than one of ours: its checkpoint has one file for the state of hooks."""
    count = len(list(callbacks))
    if count > 1:
        raise OptionError(
            f"The Trainer has {count} HooklineCallbacks, or one twice, and takes one. Next: put all hooks into "
            "one: HooklineCallback([first, second])."
        )


def hook_names(hooks: Iterable[Any] | str | None) -> list[str]:
    """Return what hooks are called that a callback was given, before any is made."""
    names, objects = _split(hooks)
    classes = [one if isinstance(one, type) else type(one) for one in objects]
    return [*names, *(getattr(one, "name", "") or cls.__name__ for one, cls in zip(objects, classes, strict=True))]


def sinks_or_usual(sinks: Iterable[Any] | None, options: Mapping[str, Any], *, reports: bool) -> Iterable[Any] | None:
    """Return ``sinks``; lines of JSON where metrics would go nowhere else."""
    return [JSONLSink()] if sinks is None and not reports and not _brings_its_own(options) else sinks


def _brings_its_own(options: Mapping[str, Any]) -> bool:
    """Return whether a run file or a manager has the hooks and sinks."""
    return options.get("run_file") is not None or options.get("manager") is not None


# -- the logger of a host -----------------------------------------------------------------------------------

HostLog: TypeAlias = Callable[[dict[str, float], int], None]
"""Takes the numbers of one step, and the step."""


class HostLogSink(MetricSink):
    """Give every number to ``log(metrics, step)``; a list becomes its mean, and text is left out.

    Args:
        log: What the host logs with.
        per_step: Call it once for each step. False: once for each record, with the mean over its steps, for hosts that
            log at their current step only.
    """

    def __init__(self, log: HostLog, *, per_step: bool = True) -> None:
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
