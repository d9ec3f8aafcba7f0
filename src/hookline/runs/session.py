"""Run the strategies of a run, each from its seed to the end of training.

``hookline run`` makes a `Session` and calls `run` for each strategy; it gets `Ended`. The order: experiment, hooks on
modules, folder, threads, manager, training, ``run.json``.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineWarning, OptionError, ResumeError
from hookline.plain import to_plain
from hookline.records.readers import FanOut
from hookline.runs.build import Built, build
from hookline.runs.experiment import RunExperiment, make_experiment
from hookline.runs.folder import (
    LOG,
    RunFailed,
    RunNotes,
    checkpoints_in,
    model_facts,
    new_folder,
    newest_run,
    read_run_json,
)
from hookline.runs.process import choose_threads, from_rank_zero, is_first_rank, launched_ranks
from hookline.runs.run_observers import TrajectoryHook, ValidatedCheckpoints
from hookline.training.checkpoints import Checkpoints, lock_folder

if TYPE_CHECKING:
    from hookline.lifecycle.context import CheckpointProfiler
    from hookline.lifecycle.manager import HookManager
    from hookline.runs.read import Asked

__all__ = ["Ended", "Session"]


@dataclass(frozen=True)
class Ended:
    """Hold how a strategy ended."""

    folder: Path
    result: Any
    seconds: float
    status: str
    profiler: CheckpointProfiler | None = None
    """What each hook took, if that was asked for."""

    @property
    def interrupted(self) -> str | None:
        """The signal that stopped it, if one did."""
        return getattr(self.result, "interrupted", None)


class Session:
    """Run the strategies of a run, one after the other; hooks are made once, and each strategy resets them.

    Args:
        asked: The run, its experiment, and how it is run.
        shown: What shows it, a `Screen`.
        command: The words of the command, for ``run.json``.
    """

    def __init__(self, asked: Asked, shown: Any, command: Sequence[str]) -> None:
        assert asked.found is not None
        self.run_value, self.found, self.how = asked.run, asked.found, asked.how
        self._shown, self._command = shown, list(command)
        self._group = asked.run.run_group or f"{self.found.name}_{time.strftime('%Y%m%d-%H%M%S')}"
        self.hooks: list[Any] = []
        """The hooks, once the first strategy has made them."""
        self._built: Built | None = None
        self._sinks: list[Any] = []

    def run(self, strategy: str, *, may_be_new: bool) -> Ended:
        """Make the experiment, train it, and write ``run.json``."""
        made = make_experiment(self.run_value, self.found, strategy)
        built = self._built = self._built or build(self.run_value, self.found, model=made.experiment.model)
        with ExitStack() as stack:
            stack.enter_context(made.attached(built))  # first: a factory may raise
            folder, resume = from_rank_zero(
                lambda: self._folder(strategy, may_be_new=may_be_new), "choosing the folder of the run"
            )
            threads = self._set_threads(made, folder)
            if is_first_rank():
                stack.enter_context(lock_folder(folder))  # before the log is opened: another process may be writing it
            manager = self._manager(made, built, folder)
            if manager is not None:
                stack.callback(manager.close)
            notes = RunNotes(folder, manager, self._sinks, is_written=is_first_rank())
            notes.begin(self._facts(made, strategy, threads))
            return self._train(made, strategy, folder, manager, notes, resume=resume)

    # -- before ----------------------------------------------------------------------------------------------

    def _folder(self, strategy: str, *, may_be_new: bool) -> tuple[Path, bool]:
        """Return the folder of the run, and whether there is a run in it to resume."""
        output_dir, name = Path(self.run_value.output_dir), self.found.name
        if self.how.resume:
            folder = newest_run(output_dir, name, strategy)
            if folder is not None:
                return folder, True
            if not may_be_new:
                raise OptionError(
                    f"There is nothing to resume: no checkpoints in {output_dir / name / strategy}. Start without "
                    "--resume, or say where the run is: --output-dir DIR."
                )
        return new_folder(output_dir, name, strategy), False

    def _set_threads(self, made: RunExperiment, folder: Path) -> int:
        """Set the number of torch threads, and say what was chosen and why."""
        recorded = read_run_json(folder).get("threads")
        count = model_facts(made.bare_model)["parameters"]
        threads, reason = choose_threads(
            self.run_value.threads, count, on_cpu=str(made.device) == "cpu", recorded=recorded
        )
        if reason:
            self._shown.say(reason)
        return threads

    def _manager(self, made: RunExperiment, built: Built, folder: Path) -> HookManager | None:
        """Return the manager of the hooks, with its sinks; None if there are no hooks."""
        own = [*made.hooks, *([TrajectoryHook()] if self.run_value.record_trajectory else ())]
        if not built.hooks and not own and not self.hooks:
            self._warn_of_unused()
            self._shown.say("No hooks: metrics are not recorded, and there is no page. --hooks records the loss.")
            return None
        if is_first_rank():  # some sinks begin a run somewhere when they are made
            self._sinks = [*self._shown.sinks(made.epochs_to_snapshot), *built.make_sinks()]
        sinks = FanOut(self._sinks, log=folder / LOG)
        manager = built.make_manager(self.hooks or [*built.hooks, *own], loop_type=made.loop, sinks=sinks)
        self.hooks = list(manager.hooks.values())
        made.report_trackers_to(manager)
        return manager

    def _warn_of_unused(self) -> None:
        """Warn of sinks that were asked for, and get nothing."""
        sinks = self.run_value.sinks
        flags = [f"--hook-{name}" for name in sinks.chosen()] + [other.sink for other in sinks.others]
        if flags:
            warnings.warn(
                f"{', '.join(flags)} will write nothing: no hooks are on, so there are no metrics. Next: turn some on, "
                "--hooks norms or --with-hooks GROUP.",
                HooklineWarning,
                stacklevel=2,
            )

    def _facts(self, made: RunExperiment, strategy: str, threads: int) -> dict[str, Any]:
        """Return what is known of the run before it begins."""
        run = self.run_value
        return {
            "experiment": self.found.name,
            "name": run.name,
            "path": self.found.path,
            "strategy": strategy,
            "command": self._command,
            "config": _plain_config(made),
            "run": run.model_dump(exclude_unset=True) | {"run_group": self._group},
            "seed": run.seed,
            "threads": threads,
            "ranks": launched_ranks()[1],
            "device": str(made.device),
            "dtype": str(made.dtype).removeprefix("torch."),
            "model": model_facts(made.bare_model),
        }

    # -- training --------------------------------------------------------------------------------------------

    def _train(
        self, made: RunExperiment, strategy: str, folder: Path, manager: Any, notes: RunNotes, *, resume: bool
    ) -> Ended:
        began = time.perf_counter()
        context = {
            "strategy": strategy,
            "output_dir": self.run_value.output_dir,
            "experiment_name": self.found.name,
            "run_dir": str(folder),
            "run_group": self._group,
            "config": _plain_config(made),
        }
        try:
            checkpoints = self._checkpoints(made, folder / "checkpoints")
            result = made.train(manager, context, checkpoints, resume=resume, progress=self._shown.progress())
        except ResumeError:  # nothing was begun: what the folder says of the run stays
            notes.undo()
            raise
        except Exception as error:
            notes.end("failed", time.perf_counter() - began, error=error)
            raise RunFailed(_after_failure(folder, manager)) from error
        except BaseException as error:  # a second Ctrl-C
            notes.end("stopped", time.perf_counter() - began, error=error)
            self._shown.say(_left_at_once(folder))
            raise
        if manager is not None:
            self._shown.say_what_is_missing()
            self._say_what_failed(manager)
        status = "stopped" if getattr(result, "interrupted", None) else "finished"
        seconds = time.perf_counter() - began
        notes.end(status, seconds, result=result)
        profiler = manager.profiler if manager is not None and manager.profiler.enabled else None
        return Ended(folder, result, seconds, status, profiler)

    def _checkpoints(self, made: RunExperiment, folder: Path) -> Checkpoints:
        run = self.run_value
        options: dict[str, Any] = {
            "config": _plain_config(made) | {made.unit: made.length, "seed": run.seed},
            "force": self.how.force,
        }
        if run.validate_checkpoints is False:
            return Checkpoints(folder, every=_every(run.save_checkpoints, made.loop), **options)
        if launched_ranks()[1] > 1:
            raise OptionError("--validate-checkpoints is for one process; with several, use --save-checkpoints.")
        every = _every(run.validate_checkpoints, made.loop)
        return ValidatedCheckpoints(folder, every=every, say=self._shown.say, **options)

    def _say_what_failed(self, manager: Any) -> None:
        """Tell of hooks that raised while the run went on."""
        off = manager.plan().left_out
        for name, count in manager.hook_errors.items():
            became = "was switched off" if name in off else "stayed on"
            times = "once" if count == 1 else f"{count} times"
            self._shown.say(f"The hook {name} raised {times} and {became}: its metrics are incomplete.")


def _plain_config(made: RunExperiment) -> dict[str, Any]:
    config = made.config
    values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    found: dict[str, Any] = to_plain(values)
    return found


def _every(asked: bool | int, loop: str) -> int | None:
    """Return how many epochs or steps there are from one checkpoint to the next; None for none but the last."""
    if asked is False:
        return None
    return (1 if loop == "epoch" else 100) if asked is True else asked


def _after_failure(folder: Path, manager: Any) -> str:
    """Return what a user can do next: where the run is, how to resume it, and without which hook."""
    lines = [f"The run failed; what it recorded until then is in {folder}."]
    failed = [] if manager is None else list(manager.hook_errors)
    if failed:
        lines.append(
            f"Next: to train on when {' or '.join(failed)} raises: --on-hook-error disable (it is switched off) or "
            "warn (it stays on)."
        )
    if checkpoints_in(folder):
        lines.append("To go on from its last checkpoint: --resume.")
    return " ".join(lines)


def _left_at_once(folder: Path) -> str:
    newest = max(checkpoints_in(folder), default=None)
    there = "there is no checkpoint to go on from" if newest is None else f"--resume goes on from {newest}"
    return f"Stopped at once, without saving; {there}."
