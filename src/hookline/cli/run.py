"""Train an experiment, with hooks, one strategy after the other: ``hookline run EXPERIMENT``.

`main` calls `run`, which reads the run, has a `Session` train each strategy, and prints where everything is; with
``--dry-run`` it prints which hook is due when, and which files there would be.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.cli.main import DONE
from hookline.cli.screen import Screen, messages, tell_plan
from hookline.errors import OptionError
from hookline.plain import to_plain
from hookline.runs.find import device_of, is_first_rank, local_device, process_settings, rank_group, rank_prefix
from hookline.runs.folder import LOG, model_facts, newest_run, next_folder, read_run_json
from hookline.runs.read import Asked, read

if TYPE_CHECKING:
    from torch import nn

    from hookline.runs.run import Run
    from hookline.runs.session import Ended
    from hookline.specs.hook_spec import HookSpec

_AFTER_ERROR: Final = {"disable": "was switched off", "warn": "stayed on", "raise": "ended the run"}
Row = dict[str, Any]
_STOPPED: Final = {"SIGINT": 130, "SIGTERM": 143}


def run(arguments: Sequence[str]) -> int:
    """Train, and return the exit code; behind a ``--``, start a script in place of an experiment."""
    with messages(prefix=rank_prefix()):
        asked = read(arguments)
        if asked.how.hooks_list or asked.how.hooks_describe is not None:
            return _show_hooks(asked)
        if asked.how.json and not asked.how.dry_run:
            raise OptionError("--json goes with --dry-run; what a run found is in run.json, in its folder.")
        if asked.run.command:
            from hookline.cli.script import run_script

            return run_script(asked)
        if asked.how.dry_run:
            return _dry_run(asked) if is_first_rank() else DONE
        with (
            process_settings(deterministic=asked.run.determinism, matmul_precision=asked.run.matmul_precision),
            rank_group(device_of(local_device(asked.run.device))),
        ):
            return _train(asked, arguments)


def _show_hooks(asked: Asked) -> int:
    from hookline.cli.commands import show_hooks
    from hookline.runs.find import find_experiment

    if asked.run.experiment is not None:
        find_experiment(asked.run.experiment)  # a file may register hooks of its own
    return show_hooks(None if asked.how.hooks_list else asked.how.hooks_describe, as_json=asked.how.json)


def _train(asked: Asked, arguments: Sequence[str]) -> int:
    """Train each strategy, and say what came of it; return the exit code."""
    from hookline.runs.session import Session  # and torch, which help does not need

    run, found = asked.run, asked.found
    assert found is not None
    screen = Screen(run, found.live_metrics, quiet=not is_first_rank())
    session = Session(asked, screen, ["hookline", "run", *arguments])
    has_page = bool(run.report and session.hooks and is_first_rank())
    strategies, folders = found.chosen(run.strategy), []
    for strategy in strategies:
        if len(strategies) > 1:
            screen.say(f"{found.name}: {strategy}")
        ended = session.run(strategy)
        folders.append(ended.folder)
        findings = write_page([ended.folder]) if has_page else None
        files = files_of(run, ended.folder, strategy, has_page=findings is not None)
        lines = [] if ended.profiler is None else [str(ended.profiler)]
        lines.append(f"{found.name}/{strategy} {ended.status}: {_figures(ended)}")
        lines += [f"  {label:<13}{path}" for label, path in files.items()]
        for line in [*failed_hooks(run, ended.folder), *lines, *(f"  {line}" for line in findings or ())]:
            screen.say(line)
        if ended.interrupted is not None:
            screen.say(f"Stopped by {ended.interrupted}, and saved. To continue: {_resuming(run, found.path)}")
            return _STOPPED.get(ended.interrupted, 1)
    page = folders[0].parent / "comparison.html"
    if len(folders) > 1 and has_page and write_page(folders, page) is not None:
        screen.say(f"  {'comparison':<13}{page}")
    return DONE


def _resuming(run: Run, experiment: str) -> str:
    """Return the command that resumes a run."""
    where = [] if run.strategy is None else ["--strategy", run.strategy]
    where += ["--output-dir", run.output_dir] if "output_dir" in run.model_fields_set else []
    return shlex.join(["hookline", "run", experiment, *where, "--resume"])


def _figures(ended: Ended) -> str:
    result = ended.result
    parts = [f"{result.steps} steps in {ended.seconds:.1f} s"]
    if result.loss is not None:
        parts.append(f"loss {result.loss:.4g}")
    parts += [f"{name} {value:.4g}" for name, value in result.metrics.items() if isinstance(value, float)]
    return ", ".join(parts)


# -- --dry-run ---------------------------------------------------------------------------------------------------


def _dry_run(asked: Asked) -> int:
    """Print the plan."""
    from hookline.cli.commands import spec_row
    from hookline.runs.build import build
    from hookline.runs.find import make_experiment

    run, found = asked.run, asked.found
    assert found is not None
    strategies = found.chosen(run.strategy)
    made, built = make_experiment(run, found, strategies[0]), build(run, found)
    planned = built.make_manager(loop_type=made.loop).plan
    plan = {
        "experiment": found.name,
        "strategies": strategies,
        made.unit: made.length,
        **model_facts(made.experiment.model),
        "config": {} if made.config is None else to_plain(vars(made.config)),
        "hooks": [row._asdict() for row in planned.rows],
        "left_out": [{"hook": name, "why": why} for name, why in planned.left_out.items()],
        "specs": [spec_row(spec) | {"matches": _matches(made.experiment.model, spec)} for spec in built.specs],
        "files": [_files(asked, found.name, strategy, has_hooks=bool(built.hooks)) for strategy in strategies],
    }
    tell_plan("dry-run", plan, as_json=asked.how.json)
    return DONE


def _matches(model: nn.Module, spec: HookSpec) -> str:
    """Return the names of the modules that a spec is on."""
    from hookline.specs.apply_specs import find_sites

    sites = find_sites(model, spec) if spec.enabled else None
    return "nothing" if sites is None else ", ".join(name or "(the model)" for name in sites.names)


def _files(asked: Asked, name: str, strategy: str, *, has_hooks: bool) -> Row:
    run, output_dir = asked.run, Path(asked.run.output_dir)
    resumed = newest_run(output_dir, name, strategy) if asked.how.resume else None
    files = ["run.json", "checkpoints/"]
    if has_hooks:
        files += [LOG, *run.sinks.files(strategy).values()]
        files += ["report.html"] if run.report else []
    return {"strategy": strategy, "folder": str(resumed or next_folder(output_dir, name, strategy)), "files": files}


# -- what a run has left behind, of an experiment or a script -------------------------------------------------------


def write_page(folders: Sequence[Path], page: Path | None = None) -> list[str] | None:
    """Write the page of runs; return what was found, None without a page. A run does not fail if it cannot be made."""
    try:
        from hookline.report.report_page import write_page

        return write_page(folders, page).found
    except KeyboardInterrupt:
        print(f"hookline: no report.html: stopped. Later: hookline report {folders[0]}", file=sys.stderr)
        raise
    except ImportError as error:  # says what to install
        print(f"hookline: no report.html: {error}", file=sys.stderr)
    except Exception as error:
        print(f"hookline: report.html could not be made: {type(error).__name__}: {error}", file=sys.stderr)
    return None


def files_of(run: Run, folder: Path, strategy: str, *, has_page: bool) -> dict[str, Path]:
    """Return the files of a run by what they are; a page that an earlier part of the run left is out of date."""
    names = {"report": "report.html"} if has_page else {}
    names |= {"records": LOG, **run.sinks.files(strategy), "checkpoints": "checkpoints"}
    return {label: folder / name for label, name in names.items() if (folder / name).exists()}


def failed_hooks(run: Run, folder: Path) -> list[str]:
    """Return a sentence about each hook that raised while the run went on; one that never fired was not attached."""
    found = []
    for name, told in (read_run_json(folder).get("hooks") or {}).items():
        if told.get("failed") and told.get("fired"):
            times = "once" if told["failed"] == 1 else f"{told['failed']} times"
            became = _AFTER_ERROR[run.hooks.on_error]
            found.append(f"The hook {name} raised {times} and {became}: its metrics are incomplete.")
    return found
