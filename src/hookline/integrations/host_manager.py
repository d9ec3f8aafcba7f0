"""Make the manager of a host's run: from hooks as objects, from their names, or from a run file.

`HostRun` calls it with what the user gave to an adapter; the callbacks of trainers check their arguments here first.
What a run file says of training itself (experiment, seed, device) is the host's to decide, and is passed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
        _check_manager(manager, [f"{name}=" for name, value in given.items() if value is not None])
        return manager, []
    listed = list(hooks or ()) if isinstance(hooks, list | tuple | set | frozenset | None) else [hooks]
    specs: list[HookSpec] = []
    if run_file is not None:
        from hookline.runs.build import build
        from hookline.runs.read import read_file

        built = build(read_file(run_file))
        listed, specs = [*built.hooks, *listed], built.specs
        sinks = [*built.make_sinks(), *(sinks or ())]
        options = {**built.options, **options}
    if not _has(ALWAYS, listed):
        listed = [ALWAYS, *listed]
    if options.get("log") is not None:
        listed = with_recorder(listed)
    named = [hook for hook in listed if isinstance(hook, str)]
    made = [hook for hook in listed if not isinstance(hook, str)]
    usual = {"on_error": "raise", "flush_every": _STEPS_TO_FLUSH, "loop_type": loop}
    return HookManager(named, [*made, ResourcesHook()], sinks, **{**usual, **options}), specs


def with_recorder(hooks: Iterable[Any]) -> list[Any]:
    """Return the hooks of a run with a log: it has one too that writes the last steps when something happens."""
    listed = list(hooks)
    return listed if _has(_RECORDER, listed) else [*listed, _RECORDER]


def _has(name: str, hooks: Iterable[Any]) -> bool:
    return any(name == (hook if isinstance(hook, str) else getattr(hook, "name", "")) for hook in hooks)


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
            f"manager= has its hooks and sinks already, and {', '.join(given)} was given beside it. Next: give them to "
            "the manager."
        )


# -- callbacks of trainers -----------------------------------------------------------------------------------


def check_report_to(report_to: str | None, host: str) -> None:
    """Raise if ``report_to`` is neither ``"sinks"`` nor what this host calls its own logger."""
    if report_to not in ("sinks", host):
        raise OptionError(f"report_to= is 'sinks' or {host!r}; got {report_to!r}. W&B's own sink goes into sinks=.")


def sinks_of_callback(
    hooks: Any, sinks: Iterable[Any] | None, report_to: str, options: Mapping[str, Any]
) -> Iterable[Any] | None:
    """Return the sinks of a ``HooklineCallback``; lines of JSON where metrics would go nowhere else.

    Raises:
        OptionError: if it was given no hooks, or an unknown ``report_to``.
    """
    check_report_to(report_to, "trainer")
    has_own = options.get("run_file") is not None or options.get("manager") is not None
    if hooks is None and not has_own:
        raise OptionError(
            "HooklineCallback() has no hooks. Next: callbacks=[HooklineCallback(['norms'])], an object and not the "
            "class; or run_file=, or manager=."
        )
    return [JSONLSink()] if sinks is None and report_to == "sinks" and not has_own else sinks


def check_alone(callbacks: Iterable[Any], kind: type) -> None:
    """Raise if a trainer has more than one of ours: its checkpoint has one file for the state of hooks."""
    count = sum(isinstance(each, kind) for each in callbacks)
    if count > 1:
        raise OptionError(
            f"The Trainer has {count} HooklineCallbacks, or one twice, and takes one. Next: put all hooks into "
            "one: HooklineCallback([first, second])."
        )


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
