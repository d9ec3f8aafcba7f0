"""One strategy of a run, from its seed to its closing lines.

Takes what `run` has prepared, hands back how it ended. The order: seed, experiment, device, compilation, hooks on
modules, folder, manager, training, page.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from hookline.cli.error_messages import RunFailed
from hookline.cli.folder import LOG, new_folder, newest_run, plain
from hookline.cli.hook_objects import HookObjects
from hookline.cli.prepared_experiment import Made, make_experiment
from hookline.cli.process_settings import seed_everything
from hookline.cli.progress_bar import FigureSink, steps_counted, steps_in_all
from hookline.cli.run_facts import model_facts
from hookline.cli.run_json import RunNotes
from hookline.cli.run_request import Request
from hookline.cli.screen import Screen
from hookline.errors import HooklineWarning, OptionError, ResumeError

__all__ = ["Ended", "Prepared", "Session"]


@dataclass
class Prepared:
    """What all strategies of a run have in common."""

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
    """The hook objects, once the first strategy has made them: each strategy has the same, reset."""


@dataclass(frozen=True)
class Ended:
    """How a strategy ended."""

    folder: Path
    result: Any
    seconds: float
    status: str
    profile: str = ""
    """What each hook took, if that was asked for."""

    @property
    def interrupted(self) -> str | None:
        """The signal that stopped it, if one did."""
        return getattr(self.result, "interrupted", None)


class Session:
    """The run of one strategy."""

    def __init__(self, prepared: Prepared, strategy: str, *, may_be_new: bool) -> None:
        self.prepared = prepared
        self.strategy = strategy
        self.request = prepared.request
        self._may_be_new = may_be_new
        self._figures = FigureSink()
        self._sinks: list[Any] = []

    def run(self) -> Ended:
        """Make it, train it, write down what it was."""
        made = self.make()
        from hookline.training.checkpoints.checkpoints import lock_folder

        with ExitStack() as stack:
            stack.enter_context(
                made.hooks_on_modules(self.prepared.specs)
            )  # first: a factory that raises leaves nothing
            folder, resume = self._folder()
            stack.enter_context(lock_folder(folder))  # before the log is opened: another process may be writing it
            manager = self._manager(made, folder)
            if manager is not None:
                stack.callback(_close, manager)
            notes = RunNotes(folder, manager, self._sinks)
            notes.begin(self._facts(made))
            return self._train(made, folder, manager, notes, resume=resume)

    def make(self) -> Made:
        """The experiment, seeded, on its device."""
        request = self.request
        seed_everything(request.options.training.seed)
        made = make_experiment(request, self.strategy)
        for tracker in self.prepared.hook_objects.trackers:
            tracker.check(made.experiment.model)
        made.move(self.prepared.device, self.prepared.dtype)
        if request.options.training.with_compile:
            made.experiment.model.compile()
        return made

    # -- before ----------------------------------------------------------------------------------------------

    def _folder(self) -> tuple[Path, bool]:
        """Where it goes, and whether there is a run there to go on with."""
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

    def _manager(self, made: Made, folder: Path) -> Any:
        """The hooks, with sinks behind them; None if there are none."""
        prepared = self.prepared
        own = self._own_hooks(made)
        if not prepared.hook_objects.names and not own and not prepared.hooks:
            _warn_of_unused(self.request)
            prepared.screen.say("No hooks: metrics are not recorded, and there is no page. --hooks records the loss.")
            return None
        from hookline.sinks.fan_out import FanOut
        from hookline.training.manager import HookManager

        self._sinks = [*prepared.screen.sinks(made.epochs_to_snapshot), *prepared.make_sinks()]
        sinks = FanOut([*self._sinks, self._figures], log=folder / LOG)
        manager = HookManager(
            (),
            prepared.hooks or [*prepared.hook_objects.make(), *own],
            sinks,
            self.request.options.hook.hook_offload_state,
            prepared.hook_objects.reference,
            profile_hooks=self.request.options.hook.profile_hooks,
            loop_type=made.loop,
            on_error=self.request.options.hook.on_hook_error,
        )
        prepared.hooks[:] = manager.hooks.values()
        made.report_trackers_to(manager)
        return manager

    def _own_hooks(self, made: Made) -> list[Any]:
        hooks = list(made.hooks)
        if self.request.options.output.record_trajectory:
            from hookline.cli.trajectory import TrajectoryHook

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
        found: dict[str, Any] = plain(values)
        return found

    def _facts(self, made: Made) -> dict[str, Any]:
        """What is known of the run before it begins."""
        request = self.request
        return {
            "experiment": request.found.name,
            "path": request.found.path,
            "strategy": self.strategy,
            "command": self.prepared.command,
            "config": self._config(),
            "options": request.saved(self.prepared.hook_objects.config) | {"run_group": self.prepared.run_group},
            "seed": request.options.training.seed,
            "device": str(made.device),
            "dtype": str(made.dtype).removeprefix("torch."),
            "model": model_facts(made.experiment.model),
        }

    # -- training --------------------------------------------------------------------------------------------

    def _train(self, made: Made, folder: Path, manager: Any, notes: RunNotes, *, resume: bool) -> Ended:
        began = time.perf_counter()
        try:
            with self._bar(made, folder if resume else None):
                result = self._loop(made, folder, manager, resume=resume)
        except ResumeError as error:  # nothing was begun: what the folder says of the run stays
            notes.take_back()
            raise ResumeError(str(error).replace("Checkpoints(..., force=True)", "--force")) from error
        except Exception as error:
            notes.end("failed", time.perf_counter() - began, error=error)
            raise RunFailed(self._after_failure(folder, manager)) from error
        except BaseException as error:  # a second Ctrl-C
            notes.end("stopped", time.perf_counter() - began, error=error)
            self.prepared.screen.say(_left_at_once(folder))
            raise
        if manager is not None:
            self.prepared.screen.say_what_is_missing(self._figures.names)
            self._say_who_failed(manager)
        status = "stopped" if getattr(result, "interrupted", None) else "finished"
        seconds = time.perf_counter() - began
        notes.end(status, seconds, result=result)
        profile = str(manager.profiler) if manager is not None and manager.profiler.enabled else ""
        return Ended(folder, result, seconds, status, profile)

    def _after_failure(self, folder: Path, manager: Any) -> str:
        """What a user does next: where the run is, how to go on, and without whom."""
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

    def _say_who_failed(self, manager: Any) -> None:
        """Tell of hooks that raised while the run went on."""
        off = manager.plan().left_out
        for name, count in manager.hook_errors.items():
            became = "was switched off" if name in off else "stayed on"
            times = "once" if count == 1 else f"{count} times"
            self.prepared.screen.say(f"The hook {name} raised {times} and {became}: its metrics are incomplete.")

    def _loop(self, made: Made, folder: Path, manager: Any, *, resume: bool) -> Any:
        checkpoints = self._checkpoints(made, folder / "checkpoints")
        return made.train(manager, self._context(folder), checkpoints, resume=resume)

    def _checkpoints(self, made: Made, folder: Path) -> Any:
        asked = self.request.options.checkpoint
        options: dict[str, Any] = {
            "config": self._config() | {made.unit: made.length, "seed": self.request.options.training.seed},
            "force": asked.force,
        }
        if asked.validate_checkpoints is not None:
            from hookline.cli.checkpoint_validation import ValidatedCheckpoints

            every = _every(asked.validate_checkpoints, made.loop)
            return ValidatedCheckpoints(folder, every=every, say=self.prepared.screen.say, **options)
        from hookline.training.checkpoints.checkpoints import Checkpoints

        return Checkpoints(folder, every=_every(asked.save_checkpoints, made.loop), **options)

    @contextmanager
    def _bar(self, made: Made, resumed: Path | None) -> Iterator[None]:
        bar = self.prepared.screen.bar()
        total = steps_in_all(made.experiment, made.loop, made.length)
        if bar is None or total is None:
            yield
            return
        bar.start(total, "steps", done=_steps_done(resumed))
        try:
            with steps_counted(made.experiment, bar, self._figures.figures):
                yield
        finally:
            bar.stop()


def _every(asked: tuple[int, ...] | None, loop: str) -> int | None:
    if asked is None:
        return None
    return asked[0] if asked else (1 if loop == "epoch" else 100)


def _warn_of_unused(request: Request) -> None:
    """Sinks that were asked for, and have nothing to take."""
    chosen = [name for name, value in vars(request.options.sink).items() if value not in (None, False, ())]
    if chosen or request.settings.sinks:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in chosen) or "The sinks of the run file"
        warnings.warn(
            f"{flags} will write nothing: no hooks are on, so there are no metrics. Next: turn some on, --hooks norms "
            "or --with-hooks GROUP.",
            HooklineWarning,
            stacklevel=2,
        )


def _close(manager: Any) -> None:
    manager.close()


def _steps_done(folder: Path | None) -> int:
    newest = None if folder is None else _newest_checkpoint(folder)
    return 0 if newest is None else int(newest.stem.removeprefix("step_"))


def _newest_checkpoint(folder: Path) -> Path | None:
    return max((folder / "checkpoints").glob("step_*.safetensors"), default=None)


def _left_at_once(folder: Path) -> str:
    newest = _newest_checkpoint(folder)
    there = "there is no checkpoint to go on from" if newest is None else f"--resume goes on from {newest}"
    return f"Stopped at once, without saving; {there}."
