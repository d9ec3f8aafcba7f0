"""Train an experiment, with hooks, one strategy after the other: ``hookline run EXPERIMENT``.

`main` calls `run`, which reads the run, has a `Session` train each strategy, and prints where everything is.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.cli.closing import failed_hooks, files_of, write_page
from hookline.cli.main import DONE
from hookline.cli.screen import Screen, messages, tell_json
from hookline.plain import to_plain
from hookline.runs.process import device_of, is_first_rank, local_device, process_settings, rank_group, rank_prefix
from hookline.runs.read import Asked, read

if TYPE_CHECKING:
    from hookline.runs.session import Ended

__all__ = ["run"]

_STOPPED: Final = {"SIGINT": 130, "SIGTERM": 143}


def run(arguments: Sequence[str]) -> int:
    """Train, and return the exit code; behind a ``--``, start a script in place of an experiment."""
    with messages(prefix=rank_prefix()):
        asked = read(arguments)
        if asked.how.hooks_list or asked.how.hooks_describe is not None:
            return _show_hooks(asked)
        if asked.run.command:
            from hookline.cli.script import run_script

            return run_script(asked)
        if asked.how.dry_run:
            from hookline.cli.dry_run import dry_run

            return dry_run(asked) if is_first_rank() else DONE
        as_json = asked.how.json
        with (
            process_settings(deterministic=asked.run.determinism, matmul_precision=asked.run.matmul_precision),
            rank_group(device_of(local_device(asked.run.device))),
            contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(),
        ):
            code, told = _Command(asked, arguments).run_all()
        if as_json and is_first_rank():
            tell_json("run", told)
        return code


def _show_hooks(asked: Asked) -> int:
    from hookline.cli.hooks import show_hooks
    from hookline.runs.find import find_experiment

    if asked.run.experiment is not None:
        find_experiment(asked.run.experiment)  # a file may register hooks of its own
    return show_hooks(None if asked.how.hooks_list else asked.how.hooks_describe, as_json=asked.how.json)


class _Command:
    """Train each strategy of a run, and say what came of it."""

    def __init__(self, asked: Asked, arguments: Sequence[str]) -> None:
        from hookline.runs.session import Session  # and torch, which help does not need

        assert asked.found is not None
        self._run, self._found = asked.run, asked.found
        self._screen = Screen(asked.run, self._found.live_metrics, quiet=asked.how.json or not is_first_rank())
        self._session = Session(asked, self._screen, ["hookline", "run", *arguments])

    def run_all(self) -> tuple[int, dict[str, Any]]:
        """Return the exit code, and what is said at the end, for ``--json``."""
        name, strategies = self._found.name, self._found.chosen(self._run.strategy)
        folders: list[Path] = []
        told: dict[str, Any] = {"experiment": name, "runs": [], "comparison": None}
        for strategy in strategies:
            if len(strategies) > 1:
                self._screen.say(f"{name}: {strategy}")
            ended = self._session.run(strategy, may_be_new=len(strategies) > 1)
            folders.append(ended.folder)
            told["runs"].append(self._close(strategy, ended))
            if ended.interrupted is not None:
                return self._stopped(ended), told
        page = folders[0].parent / "comparison.html"
        if len(folders) > 1 and self._has_page and write_page(folders, page) is not None:
            self._screen.say(f"  {'comparison':<13}{page}")
            told["comparison"] = str(page)
        return DONE, told

    def _stopped(self, ended: Ended) -> int:
        run = self._run
        where = [] if run.strategy is None else ["--strategy", run.strategy]
        where += ["--output-dir", run.output_dir] if "output_dir" in run.model_fields_set else []
        again = shlex.join(["hookline", "run", self._found.path, *where, "--resume"])
        self._screen.say(f"Stopped by {ended.interrupted}, and saved. To go on: {again}")
        return _STOPPED.get(ended.interrupted or "", 1)

    @property
    def _has_page(self) -> bool:
        return bool(self._run.report and self._session.hooks and is_first_rank())

    def _close(self, strategy: str, ended: Ended) -> dict[str, Any]:
        """Write the page of a strategy, and say where everything is; return it for ``--json``."""
        found = write_page([ended.folder]) if self._has_page else None
        files = files_of(self._run, ended.folder, strategy, has_page=found is not None)
        lines = failed_hooks(self._run, ended.folder)
        lines += [] if ended.profiler is None else [str(ended.profiler)]
        lines.append(f"{self._found.name}/{strategy} {ended.status}: {_figures(ended)}")
        lines += [f"  {label:<13}{path}" for label, path in files.items()]
        for line in [*lines, *(f"  {line}" for line in found or ())]:
            self._screen.say(line)
        return _plain(strategy, ended, files)


def _plain(strategy: str, ended: Ended, files: dict[str, Path]) -> dict[str, Any]:
    profiled = {} if ended.profiler is None else ended.profiler.report()
    return {
        "strategy": strategy,
        "status": ended.status,
        "folder": str(ended.folder),
        "files": to_plain(files),
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
