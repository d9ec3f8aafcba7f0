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

from hookline.cli.main import DONE
from hookline.cli.screen import Screen, messages, tell_json
from hookline.plain import to_plain
from hookline.runs.folder import LOG
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
    from hookline.cli import hooks
    from hookline.runs.find import find_experiment

    if asked.run.experiment is not None:
        find_experiment(asked.run.experiment)  # a file may register hooks of its own
    names = None if asked.how.hooks_list else asked.how.hooks_describe
    if asked.how.json:
        return hooks.tell_hooks(names or ())
    return hooks.list_hooks() if names is None else hooks.describe_hooks(names)


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
        ended: list[Ended] = []
        told: dict[str, Any] = {"experiment": name, "runs": [], "comparison": None}
        for strategy in strategies:
            if len(strategies) > 1:
                self._screen.say(f"{name}: {strategy}")
            ended.append(self._session.run(strategy, may_be_new=len(strategies) > 1))
            found = self._report([ended[-1]])
            files = self._files(strategy, ended[-1].folder, has_page=found is not None)
            self._say_where(strategy, ended[-1], files)
            for line in found or ():
                self._screen.say(f"  {line}")
            told["runs"].append(_plain(strategy, ended[-1], files))
            if ended[-1].interrupted is not None:
                return self._stopped(ended[-1]), told
        told["comparison"] = self._compare(ended)
        return DONE, told

    def _stopped(self, ended: Ended) -> int:
        run = self._run
        where = [] if run.strategy is None else ["--strategy", run.strategy]
        where += ["--output-dir", run.output_dir] if "output_dir" in run.model_fields_set else []
        again = shlex.join(["hookline", "run", self._found.path, *where, "--resume"])
        self._screen.say(f"Stopped by {ended.interrupted}, and saved. To go on: {again}")
        return _STOPPED.get(ended.interrupted or "", 1)

    # -- closing lines ---------------------------------------------------------------------------------------

    def _compare(self, ended: Sequence[Ended]) -> str | None:
        """Write one page of all strategies beside their folders, if there were several; return where it is."""
        page = ended[0].folder.parent / "comparison.html"
        if len(ended) == 1 or self._report(ended, page) is None:
            return None
        self._screen.say(f"  {'comparison':<13}{page}")
        return str(page)

    def _report(self, ended: Sequence[Ended], page: Path | None = None) -> list[str] | None:
        """Write the page; return what was found, None without a page. The run does not fail if it cannot be made."""
        if not self._run.report or not self._session.hooks or not is_first_rank():
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

    def _files(self, strategy: str, folder: Path, *, has_page: bool) -> dict[str, str]:
        """Return the files of a run by what they are; a page that an earlier part of the run left is out of date."""
        names = {"report": "report.html"} if has_page else {}
        names |= {"records": LOG, **self._run.sinks.files(strategy), "checkpoints": "checkpoints"}
        return {label: str(folder / name) for label, name in names.items() if (folder / name).exists()}

    def _say_where(self, strategy: str, ended: Ended, files: dict[str, str]) -> None:
        if ended.profiler is not None:
            self._screen.say(str(ended.profiler))
        self._screen.say(f"{self._found.name}/{strategy} {ended.status}: {_figures(ended)}")
        for label, path in files.items():
            self._screen.say(f"  {label:<13}{path}")


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
