"""Run one strategy, from its seed to the end of training.

`run_command` makes a `Session` of what it has prepared, and gets `Ended`. The order: seed, experiment, device,
compilation, hooks on modules, folder, threads, manager, training.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.cli.main import RunFailed
from hookline.cli.prepared_experiment import PreparedExperiment, make_experiment
from hookline.cli.process_settings import choose_threads, from_rank_zero, is_first_rank, launched_ranks, seed_everything
from hookline.cli.run_hooks import HookObjects
from hookline.cli.run_request import Request
from hookline.cli.screen import Screen
from hookline.errors import HooklineWarning, OptionError, ResumeError
from hookline.runs.folder import (
    LOG,
    RunNotes,
    checkpoints_in,
    model_facts,
    new_folder,
    newest_run,
    read_run_json,
    to_plain,
)
from hookline.runs.run_options import flat, manager_options

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager
    from hookline.lifecycle.profiler import CheckpointProfiler

__all__ = ["Ended", "Prepared", "Session"]

_SEEDS_APART: Final = 1_000_003
"""What the seeds of two ranks differ by; a prime that is no usual distance of the seeds of two runs."""


@dataclass
class Prepared:
    """Hold what all strategies of a run have in common."""

    request: Request
    hook_objects: HookObjects
    """What makes the hooks."""
    make_sinks: Callable[[], list[Any]]
    specs: list[dict[str, Any]]
    device: Any
    dtype: Any
    screen: Screen
    run_group: str
    command: list[str]
    hooks: list[Any] = field(default_factory=list)
    """The hook objects, once the first strategy has made them; each strategy resets them."""

    def make_manager(self, hooks: Sequence[Any], loop: str, **others: Any) -> HookManager:
        """Return a manager of these hooks with all that was asked for; `others` come before that."""
        from hookline.lifecycle.manager import HookManager

        asked = manager_options(flat(self.request.options), self.hook_objects.config)
        return HookManager(hooks=hooks, loop_type=loop, **(asked | others))


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
    """Run one strategy."""

    def __init__(self, prepared: Prepared, strategy: str, *, may_be_new: bool) -> None:
        self.prepared = prepared
        self.strategy = strategy
        self.request = prepared.request
        self._may_be_new = may_be_new
        self._bar_metrics: Any = None
        self._sinks: list[Any] = []
        self._threads = 0

    def run(self) -> Ended:
        """Make the experiment, train it, and write ``run.json``."""
        made = self.make()
        from hookline.cli.run_observers import BarMetricsSink
        from hookline.training.checkpoints import lock_folder

        self._bar_metrics = BarMetricsSink()
        with ExitStack() as stack:
            stack.enter_context(made.hooks_on_modules(self.prepared.specs))  # first: a factory may raise
            folder, resume = from_rank_zero(self._folder, "choosing the folder of the run")
            self._set_threads(made, folder)
            if is_first_rank():
                stack.enter_context(lock_folder(folder))  # before the log is opened: another process may be writing it
            manager = self._manager(made, folder)
            if manager is not None:
                stack.callback(manager.close)
            notes = RunNotes(folder, manager, self._sinks, is_written=is_first_rank())
            notes.begin(self._facts(made))
            return self._train(made, folder, manager, notes, resume=resume)

    def make(self) -> PreparedExperiment:
        """Return the experiment, seeded, on its device."""
        request = self.request
        seed_everything(request.options.training.seed)
        made = make_experiment(request, self.strategy)
        for tracker in self.prepared.hook_objects.trackers:
            tracker.check(made.experiment.model)
        made.move(self.prepared.device, self.prepared.dtype)
        if request.options.training.with_compile:
            made.experiment.model.compile()
        rank, ranks = launched_ranks()
        if ranks > 1:
            from hookline.training.ranks import share_experiment

            share_experiment(made.experiment, rank=rank, ranks=ranks, seed=request.options.training.seed)
            if rank > 0:  # the ranks began alike, so that they have the same data; they drop out different units
                seed_everything(request.options.training.seed + _SEEDS_APART * rank)
        return made

    # -- before ----------------------------------------------------------------------------------------------

    def _folder(self) -> tuple[Path, bool]:
        """Return the folder of the run, and whether there is a run in it to resume."""
        output_dir = Path(self.request.options.output.output_dir)
        name = self.request.found.name
        if self.request.options.checkpoint.resume:
            folder = newest_run(output_dir, name, self.strategy)
            if folder is not None:
                return folder, True
            if not self._may_be_new:
                raise OptionError(
                    f"There is nothing to resume: no checkpoints in {output_dir / name / self.strategy}. Start without "
                    "--resume, or say where the run is: --output-dir DIR."
                )
        return new_folder(output_dir, name, self.strategy), False

    def _set_threads(self, made: PreparedExperiment, folder: Path) -> None:
        """Set the number of torch threads, and say what was chosen and why."""
        recorded = read_run_json(folder).get("threads")
        count = model_facts(made.bare_model)["parameters"]
        self._threads, reason = choose_threads(
            self.request.options.training.threads, count, on_cpu=str(made.device) == "cpu", recorded=recorded
        )
        if reason:
            self.prepared.screen.say(reason)

    def _manager(self, made: PreparedExperiment, folder: Path) -> Any:
        """Return the manager of the hooks, with its sinks; None if there are no hooks."""
        prepared = self.prepared
        own = self._own_hooks(made)
        if not prepared.hook_objects.names and not own and not prepared.hooks:
            _warn_of_unused(self.request)
            prepared.screen.say("No hooks: metrics are not recorded, and there is no page. --hooks records the loss.")
            return None
        from hookline.records.readers import FanOut

        if is_first_rank():  # some sinks begin a run somewhere when they are made
            self._sinks = [*prepared.screen.sinks(made.epochs_to_snapshot), *prepared.make_sinks()]
        sinks = FanOut([*self._sinks, self._bar_metrics], log=folder / LOG)
        hooks = prepared.hooks or [*prepared.hook_objects.make(), *own]
        manager = prepared.make_manager(hooks, made.loop, sinks=sinks)
        prepared.hooks[:] = manager.hooks.values()
        made.report_trackers_to(manager)
        return manager

    def _own_hooks(self, made: PreparedExperiment) -> list[Any]:
        hooks = list(made.hooks)
        if self.request.options.output.record_trajectory:
            from hookline.cli.run_observers import TrajectoryHook

            hooks.append(TrajectoryHook())
        return hooks

    def _context(self, folder: Path) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "output_dir": self.request.options.output.output_dir,
            "experiment_name": self.request.found.name,
            "run_dir": str(folder),
            "run_group": self.prepared.run_group,
            "config": self._config(),
        }

    def _config(self) -> dict[str, Any]:
        config = self.request.config
        values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
        found: dict[str, Any] = to_plain(values)
        return found

    def _facts(self, made: PreparedExperiment) -> dict[str, Any]:
        """Return what is known of the run before it begins."""
        request = self.request
        return {
            "experiment": request.found.name,
            "name": request.options.output.name,
            "path": request.found.path,
            "strategy": self.strategy,
            "command": self.prepared.command,
            "config": self._config(),
            "options": request.saved(self.prepared.hook_objects.config) | {"run_group": self.prepared.run_group},
            "seed": request.options.training.seed,
            "threads": self._threads,
            "ranks": launched_ranks()[1],
            "device": str(made.device),
            "dtype": str(made.dtype).removeprefix("torch."),
            "model": model_facts(made.bare_model),
        }

    # -- training --------------------------------------------------------------------------------------------

    def _train(self, made: PreparedExperiment, folder: Path, manager: Any, notes: RunNotes, *, resume: bool) -> Ended:
        began = time.perf_counter()
        try:
            with self._bar(made, folder if resume else None):
                result = self._loop(made, folder, manager, resume=resume)
        except ResumeError:  # nothing was begun: what the folder says of the run stays
            notes.undo()
            raise
        except Exception as error:
            notes.end("failed", time.perf_counter() - began, error=error)
            raise RunFailed(self._after_failure(folder, manager)) from error
        except BaseException as error:  # a second Ctrl-C
            notes.end("stopped", time.perf_counter() - began, error=error)
            self.prepared.screen.say(_left_at_once(folder))
            raise
        if manager is not None:
            self.prepared.screen.say_what_is_missing(self._bar_metrics.names)
            self._say_what_failed(manager)
        status = "stopped" if getattr(result, "interrupted", None) else "finished"
        seconds = time.perf_counter() - began
        notes.end(status, seconds, result=result)
        profiler = manager.profiler if manager is not None and manager.profiler.enabled else None
        return Ended(folder, result, seconds, status, profiler)

    def _after_failure(self, folder: Path, manager: Any) -> str:
        """Return what a user can do next: where the run is, how to resume it, and without which hook."""
        lines = [f"The run failed; what it recorded until then is in {folder}."]
        failed = [] if manager is None else list(manager.hook_errors)
        if failed:
            lines.append(
                f"Next: to train on when {' or '.join(failed)} raises: --on-hook-error disable (it is switched off) or "
                "warn (it stays on)."
            )
        if _newest_checkpoint(folder) is not None:
            lines.append("To go on from its last checkpoint: --resume.")
        return " ".join(lines)

    def _say_what_failed(self, manager: Any) -> None:
        """Tell of hooks that raised while the run went on."""
        off = manager.plan().left_out
        for name, count in manager.hook_errors.items():
            became = "was switched off" if name in off else "stayed on"
            times = "once" if count == 1 else f"{count} times"
            self.prepared.screen.say(f"The hook {name} raised {times} and {became}: its metrics are incomplete.")

    def _loop(self, made: PreparedExperiment, folder: Path, manager: Any, *, resume: bool) -> Any:
        checkpoints = self._checkpoints(made, folder / "checkpoints")
        return made.train(manager, self._context(folder), checkpoints, resume=resume)

    def _checkpoints(self, made: PreparedExperiment, folder: Path) -> Any:
        asked = self.request.options.checkpoint
        options: dict[str, Any] = {
            "config": self._config() | {made.unit: made.length, "seed": self.request.options.training.seed},
            "force": asked.force,
        }
        if asked.validate_checkpoints is not None and launched_ranks()[1] > 1:
            raise OptionError("--validate-checkpoints is for one process; with several, use --save-checkpoints.")
        if asked.validate_checkpoints is not None:
            from hookline.cli.run_observers import ValidatedCheckpoints

            every = _every(asked.validate_checkpoints, made.loop)
            return ValidatedCheckpoints(folder, every=every, say=self.prepared.screen.say, **options)
        from hookline.training.checkpoints import Checkpoints

        return Checkpoints(folder, every=_every(asked.save_checkpoints, made.loop), **options)

    @contextmanager
    def _bar(self, made: PreparedExperiment, resumed: Path | None) -> Iterator[None]:
        from hookline.cli.run_observers import steps_counted, steps_in_all

        bar = self.prepared.screen.bar()
        total = steps_in_all(made.experiment, made.loop, made.length)
        if bar is None or total is None:
            yield
            return
        bar.start(total, "steps", done=_steps_done(resumed))
        try:
            with steps_counted(made.experiment, bar, self._bar_metrics.newest):
                yield
        finally:
            bar.stop()


def _every(asked: tuple[int, ...] | None, loop: str) -> int | None:
    if asked is None:
        return None
    return asked[0] if asked else (1 if loop == "epoch" else 100)


def _warn_of_unused(request: Request) -> None:
    """Warn of sinks that were asked for, and get nothing."""
    chosen = [
        name for name, value in vars(request.options.sink).items() if value is not False and value not in (None, ())
    ]
    if chosen or request.settings.sinks:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in chosen) or "The sinks of the run file"
        warnings.warn(
            f"{flags} will write nothing: no hooks are on, so there are no metrics. Next: turn some on, --hooks norms "
            "or --with-hooks GROUP.",
            HooklineWarning,
            stacklevel=2,
        )


def _steps_done(folder: Path | None) -> int:
    newest = None if folder is None else _newest_checkpoint(folder)
    return 0 if newest is None else int(newest.stem.removeprefix("step_"))


def _newest_checkpoint(folder: Path) -> Path | None:
    return max(checkpoints_in(folder), default=None)


def _left_at_once(folder: Path) -> str:
    newest = _newest_checkpoint(folder)
    there = "there is no checkpoint to go on from" if newest is None else f"--resume goes on from {newest}"
    return f"Stopped at once, without saving; {there}."
