"""Train an experiment, with hooks, one strategy after the other: ``hookline run EXPERIMENT``.

`main` calls `run`, which checks everything first, runs a `Session` for each strategy, and prints where everything is.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hookline.cli.json_output import tell_json
from hookline.cli.main import DONE
from hookline.cli.process_settings import (
    device_of,
    dtype_of,
    is_first_rank,
    local_device,
    process_settings,
    rank_group,
    rank_prefix,
)
from hookline.cli.run_request import Request, first_look, read_request
from hookline.cli.run_session import Ended, Prepared, Session
from hookline.cli.screen import Screen, messages
from hookline.errors import OptionError
from hookline.runs.folder import LOG, to_plain
from hookline.runs.named_sinks import sink_files, sink_maker

__all__ = ["prepare_run", "run"]

_STOPPED: Final = {"SIGINT": 130, "SIGTERM": 143}


def run(arguments: Sequence[str]) -> int:
    """Train, and return the exit code; behind a ``--``, start a script in place of an experiment."""
    if "--" in arguments:
        return _run_script(arguments)
    options, joined = first_look(arguments)
    if options.hook.hooks_list or options.hook.hooks_describe is not None:
        return _show_hooks(options)
    request = read_request(options, joined)
    if request.settings.command:
        return _run_script(arguments)
    with messages(prefix=rank_prefix()):
        prepared = prepare_run(request, arguments)
        if request.options.output.dry_run:
            from hookline.cli.dry_run import dry_run

            return dry_run(prepared) if is_first_rank() else DONE
        training, as_json = request.options.training, request.options.output.json
        with (
            process_settings(deterministic=not training.no_determinism, matmul_precision=training.matmul_precision),
            rank_group(prepared.device),
            contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(),
        ):
            code, told = _run_all(prepared)
        if as_json and is_first_rank():
            tell_json("run", told)
        return code


def _run_script(arguments: Sequence[str]) -> int:
    from hookline.cli.script_command import run_script

    with messages():
        return run_script(arguments)


def _show_hooks(options: Any) -> int:
    from hookline.cli import hooks_command as hooks
    from hookline.cli.find_experiment import find_experiment

    if options.experiment is not None:
        find_experiment(options.experiment)  # a file may register hooks of its own
    if options.output.json:
        return hooks.tell_hooks(() if options.hook.hooks_list else options.hook.hooks_describe)
    if options.hook.hooks_list:
        return hooks.list_hooks()
    return hooks.describe_hooks(options.hook.hooks_describe)


def prepare_run(request: Request, arguments: Sequence[str]) -> Prepared:
    """Check everything that can be wrong, before anything is trained or written."""
    options, found, settings = request.options, request.found, request.settings
    if options.training.threads is not None and options.training.threads < 1:
        raise OptionError(f"--threads takes a number of at least 1, got {options.training.threads}.")
    _check_every(options.checkpoint.save_checkpoints, options.checkpoint.validate_checkpoints)
    return Prepared(
        request=request,
        hook_objects=request.hook_objects(),
        make_sinks=sink_maker(vars(options.sink), settings.sinks),
        specs=request.module_specs(),
        device=device_of(local_device(options.training.device)),
        dtype=dtype_of(options.training.dtype),
        screen=Screen(options.output, found.live_metrics, quiet=options.output.json or not is_first_rank()),
        run_group=settings.flags.get("run_group") or f"{found.name}_{time.strftime('%Y%m%d-%H%M%S')}",
        command=["hookline", "run", *arguments],
    )


def _check_every(saved: tuple[int, ...] | None, validated: tuple[int, ...] | None) -> None:
    if saved is not None and validated is not None:
        raise OptionError("--save-checkpoints and --validate-checkpoints do not go together: the second saves as well.")
    for flag, asked in (("--save-checkpoints", saved), ("--validate-checkpoints", validated)):
        if asked and (len(asked) > 1 or asked[0] < 1):
            raise OptionError(f"{flag} takes one number of at least 1, or none; got {' '.join(map(str, asked))}.")


def _run_all(prepared: Prepared) -> tuple[int, dict[str, Any]]:
    """Train each strategy, and say what came of it; return the exit code, and the same for ``--json``."""
    name = prepared.request.found.name
    strategies = prepared.request.found.chosen(prepared.request.options.training.strategy)
    ended: list[Ended] = []
    told: dict[str, Any] = {"experiment": name, "runs": [], "comparison": None}
    for strategy in strategies:
        if len(strategies) > 1:
            prepared.screen.say(f"{name}: {strategy}")
        ended.append(Session(prepared, strategy, may_be_new=len(strategies) > 1).run())
        found = _report(prepared, [ended[-1]])
        files = _files(prepared, strategy, ended[-1].folder, has_page=found is not None)
        _say_where(prepared, strategy, ended[-1], files)
        for line in found or ():
            prepared.screen.say(f"  {line}")
        told["runs"].append(_plain(strategy, ended[-1], files))
        if ended[-1].interrupted is not None:
            return _stopped(prepared, ended[-1]), told
    told["comparison"] = _compare(prepared, ended)
    return DONE, told


def _stopped(prepared: Prepared, ended: Ended) -> int:
    again = shlex.join(["hookline", "run", prepared.request.options.experiment or "", *_where(prepared), "--resume"])
    prepared.screen.say(f"Stopped by {ended.interrupted}, and saved. To go on: {again}")
    return _STOPPED.get(ended.interrupted or "", 1)


def _where(prepared: Prepared) -> list[str]:
    """Return the flags that are needed to find the run again."""
    options = prepared.request.options
    found = [] if options.training.strategy is None else ["--strategy", options.training.strategy]
    return found + ([] if options.output.output_dir == "runs" else ["--output-dir", options.output.output_dir])


# -- closing lines ---------------------------------------------------------------------------------------------


def _compare(prepared: Prepared, ended: Sequence[Ended]) -> str | None:
    """Write one page of all strategies beside their folders, if there were several; return where it is."""
    page = ended[0].folder.parent / "comparison.html"
    if len(ended) == 1 or _report(prepared, ended, page) is None:
        return None
    prepared.screen.say(f"  {'comparison':<13}{page}")
    return str(page)


def _report(prepared: Prepared, ended: Sequence[Ended], page: Path | None = None) -> list[str] | None:
    """Write the page; return what was found, None without a page. The run does not fail if it cannot be made."""
    if prepared.request.options.output.no_report or not prepared.hooks or not is_first_rank():
        return None
    try:
        from hookline.report.report_page import write_page

        return write_page([one.folder for one in ended], page).found
    except KeyboardInterrupt:
        print(f"hookline: no report.html: stopped. Later: hookline report {ended[0].folder}", file=sys.stderr)
        raise
    except ImportError as error:  # says what to install
        print(f"hookline: no report.html: {error}", file=sys.stderr)
    except Exception as error:
        print(f"hookline: report.html could not be made: {type(error).__name__}: {error}", file=sys.stderr)
    return None


def _files(prepared: Prepared, strategy: str, folder: Path, *, has_page: bool) -> dict[str, str]:
    """Return the files of a run by what they are; a page that an earlier part of the run has left is out of date."""
    names = {"report": "report.html"} if has_page else {}
    names |= {"records": LOG, **sink_files(prepared.request.options.sink, strategy), "checkpoints": "checkpoints"}
    return {label: str(folder / name) for label, name in names.items() if (folder / name).exists()}


def _say_where(prepared: Prepared, strategy: str, ended: Ended, files: dict[str, str]) -> None:
    say = prepared.screen.say
    if ended.profiler is not None:
        say(str(ended.profiler))
    say(f"{prepared.request.found.name}/{strategy} {ended.status}: {_figures(ended)}")
    for label, path in files.items():
        say(f"  {label:<13}{path}")


def _plain(strategy: str, ended: Ended, files: dict[str, str]) -> dict[str, Any]:
    profiled = {} if ended.profiler is None else ended.profiler.report()
    return {
        "strategy": strategy,
        "status": ended.status,
        "folder": str(ended.folder),
        "files": files,
        "steps": ended.result.steps,
        "seconds": ended.seconds,
        "loss": to_plain(ended.result.loss),
        "metrics": to_plain(ended.result.metrics),
        "profile": [{"section": name, **times} for name, times in profiled.items()],
    }


def _figures(ended: Ended) -> str:
    result = ended.result
    parts = [f"{result.steps} steps in {ended.seconds:.1f} s"]
    if result.loss is not None:
        parts.append(f"loss {result.loss:.4g}")
    parts += [f"{name} {value:.4g}" for name, value in result.metrics.items() if isinstance(value, float)]
    return ", ".join(parts)
