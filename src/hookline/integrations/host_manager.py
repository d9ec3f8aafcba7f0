"""Make the manager of a host's run: from hooks as objects, from their names, or from a run file.

`HostRun` calls it with what the user gave to an adapter; the callbacks of trainers check their arguments here first.
What a run file says of training itself (experiment, seed, device) is the host's to decide, and is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.training.manager import HookManager

__all__ = ["ManagerAndSpecs", "check_callback", "make_manager", "sinks_or_usual"]

_LOOPS = ("epoch", "step")


class ManagerAndSpecs(NamedTuple):
    """What a host's run works with."""

    manager: HookManager
    specs: list[dict[str, Any]]
    """Hooks on modules, to be attached when the model is known."""


def make_manager(
    hooks: Iterable[Any] | str | None,
    *,
    sinks: Iterable[Any] | None,
    run_file: str | Path | None,
    manager: HookManager | None,
    hook_config: Mapping[str, Mapping[str, Any]] | None,
    loop: str,
    flush_every: int | None,
    on_error: str | None,
    **options: Any,
) -> ManagerAndSpecs:
    """Return the manager that was given, or one that is made of everything else."""
    if loop not in _LOOPS:
        raise OptionError(f"loop= is 'epoch' or 'step': what the run counts; got {loop!r}.")
    if manager is not None:
        given = {"hooks": hooks, "sinks": sinks, "run_file": run_file, "hook_config": hook_config, "on_error": on_error}
        _check_manager(manager, [name for name, value in {**given, **options}.items() if value is not None])
        return ManagerAndSpecs(manager, [])
    names, objects = _split(hooks)
    specs: list[dict[str, Any]] = []
    if run_file is not None:
        from hookline.integrations.host_run_file import HooksOfFile

        file = HooksOfFile(run_file)
        objects, specs = [*file.make_hooks(), *objects], file.specs
        sinks = [*file.make_sinks(), *(sinks or ())]
        on_error = on_error or file.on_error
        options = {**file.options, **options}
    made = HookManager(
        names, objects, sinks, hook_config=hook_config, loop_type=loop, on_error=on_error or "raise",
        flush_every=flush_every, **options,
    )  # fmt: skip
    return ManagerAndSpecs(made, specs)


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


def check_callback(hooks: Any, report_to: str, options: Mapping[str, Any]) -> None:
    """Raise if a ``HooklineCallback`` was given no hooks, or an unknown ``report_to``."""
    if report_to not in ("sinks", "trainer"):
        raise OptionError(f"report_to= is 'sinks' or 'trainer'; got {report_to!r}. W&B's own sink goes into sinks=.")
    if hooks is None and not _brings_its_own(options):
        raise OptionError(
            "HooklineCallback() has no hooks. Next: callbacks=[HooklineCallback(['norms'])], an object and not the "
            "class; or run_file=, or manager=."
        )


def sinks_or_usual(sinks: Iterable[Any] | None, options: Mapping[str, Any], *, reports: bool) -> Iterable[Any] | None:
    """Return ``sinks``; lines of JSON where metrics would go nowhere else."""
    return [JSONLSink()] if sinks is None and not reports and not _brings_its_own(options) else sinks


def _brings_its_own(options: Mapping[str, Any]) -> bool:
    """Return whether a run file or a manager has the hooks and sinks."""
    return options.get("run_file") is not None or options.get("manager") is not None
