"""Run the strategies of a run, each from its seed to the end of training.

``hookline run`` makes a `Session` and calls `run` for each strategy; it gets `Ended`. The order: experiment, hooks on
modules, folder, manager, training, ``run.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.errors import OptionError, ResumeError
from hookline.guard.digest import changed, digest
from hookline.lifecycle import checkpoint_file
from hookline.lifecycle.hook import TrainingHook
from hookline.plain import to_plain
from hookline.records.log import FanOut
from hookline.runs.build import build
from hookline.runs.find import RunExperiment, from_rank_zero, is_first_rank, launched_ranks, make_experiment
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
from hookline.runs.read import placed_files
from hookline.training.checkpoints import Checkpoints, lock_folder
from hookline.training.experiment import bare_model
from hookline.tree import leaves
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.context import CheckpointProfiler, RunDataContext
    from hookline.lifecycle.manager import HookManager
    from hookline.runs.read import Asked


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
        self._asked, self._found, self._run = asked, asked.found, asked.run
        self._shown, self._command = shown, list(command)
        self._group = asked.run.run_group or f"{asked.found.name}_{time.strftime('%Y%m%d-%H%M%S')}"
        self._built = build(asked.run, asked.found)
        self.hooks = [*self._built.hooks, *([TrajectoryHook()] if asked.run.record_trajectory else ())]
        """The hooks of all strategies."""

    def run(self, strategy: str) -> Ended:
        """Make the experiment, train it, and write ``run.json``."""
        made = make_experiment(self._run, self._found, strategy)
        with ExitStack() as stack:
            stack.enter_context(self._built.attached(made))  # first, as factories and sinks may raise
            sinks = self._make_sinks(made)
            folder, resume = from_rank_zero(lambda: self._folder(strategy), "choosing the folder of the run")
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            if resume and (threads := read_run_json(folder).get("threads")):
                torch.set_num_threads(threads)  # another number may change the last bits of sums
            if is_first_rank():
                stack.enter_context(lock_folder(folder))  # before the log is opened: another process may be writing it
            log = folder / LOG if self.hooks else None
            manager = self._built.make_manager(self.hooks, loop_type=made.loop, sinks=FanOut(sinks, log=log))
            stack.callback(manager.close)
            notes = RunNotes(folder, manager, sinks, is_written=is_first_rank())
            notes.begin(self._facts(made, strategy))
            return self._train(made, strategy, folder, manager, notes, resume=resume)

    # -- before ----------------------------------------------------------------------------------------------

    def _make_sinks(self, made: RunExperiment) -> list[Any]:
        """Return the sinks of a strategy; without hooks there are none."""
        if not self.hooks:
            self._shown.say("No hooks: metrics are not recorded, and there is no page. --hooks records the loss.")
        if not self.hooks or not is_first_rank():  # some sinks begin a run somewhere when they are made
            return []
        return [*self._shown.sinks(made.epochs_to_snapshot), *self._built.make_sinks()]

    def _folder(self, strategy: str) -> tuple[Path, bool]:
        """Return the folder of the run, and whether there is a run in it to resume."""
        output_dir, name = Path(self._run.output_dir), self._found.name
        folder = newest_run(output_dir, name, strategy) if self._asked.how.resume else None
        return (new_folder(output_dir, name, strategy), False) if folder is None else (folder, True)

    def _facts(self, made: RunExperiment, strategy: str) -> dict[str, Any]:
        """Return what is known of the run before it begins."""
        run = self._run
        return {
            "experiment": self._found.name,
            "name": run.name,
            "path": self._found.path,
            "strategy": strategy,
            "command": self._command,
            "config": _plain_config(made),
            "run": placed_files(run.model_dump(exclude_unset=True), Path.cwd()) | {"run_group": self._group},
            "flags": placed_files(self._asked.flags, Path.cwd()),
            "seed": run.seed,
            "threads": torch.get_num_threads(),
            "ranks": launched_ranks()[1],
            **model_facts(bare_model(made.experiment.model)),
        }

    # -- training --------------------------------------------------------------------------------------------

    def _train(
        self, made: RunExperiment, strategy: str, folder: Path, manager: HookManager, notes: RunNotes, *, resume: bool
    ) -> Ended:
        began = time.perf_counter()
        context = {
            "strategy": strategy,
            "output_dir": self._run.output_dir,
            "experiment_name": self._found.name,
            "run_dir": str(folder),
            "run_group": self._group,
            "config": _plain_config(made),
        }
        try:
            checkpoints = self._checkpoints(made, folder / "checkpoints")
            progress = self._shown.progress()
            result = made.train(manager, context, checkpoints=checkpoints, resume=resume, progress=progress)
        except ResumeError:  # nothing was begun: what the folder says of the run stays
            notes.undo()
            raise
        except Exception as error:
            notes.end("failed", time.perf_counter() - began, error=error)
            raise RunFailed(_after_failure(folder, manager)) from error
        except BaseException as error:  # a second Ctrl-C
            notes.end("stopped", time.perf_counter() - began, error=error)
            newest = max(checkpoints_in(folder), default=None)
            there = "there is no checkpoint to continue from" if newest is None else f"--resume continues from {newest}"
            self._shown.say(f"Stopped at once, without saving; {there}.")
            raise
        status = "stopped" if getattr(result, "interrupted", None) else "finished"
        seconds = time.perf_counter() - began
        notes.end(status, seconds, result=result)
        return Ended(folder, result, seconds, status, manager.profiler if manager.profiler.enabled else None)

    def _checkpoints(self, made: RunExperiment, folder: Path) -> Checkpoints:
        run = self._run
        kind: Callable[..., Checkpoints] = Checkpoints
        if run.validate_checkpoints:
            if launched_ranks()[1] > 1:
                raise OptionError("--validate-checkpoints is for one process; with several, use --save-checkpoints.")
            kind = partial(ValidatedCheckpoints, say=self._shown.say)
        every = _every(run.validate_checkpoints or run.save_checkpoints, made.loop)
        config = _plain_config(made) | {made.unit: made.length, "seed": run.seed}
        return kind(folder, every=every, config=config, force=self._asked.how.force)


def _plain_config(made: RunExperiment) -> dict[str, Any]:
    found: dict[str, Any] = {} if made.config is None else to_plain(asdict(made.config))
    return found


def _every(asked: bool | int, loop: str) -> int | None:
    """Return how many epochs or steps there are from one checkpoint to the next; None for none but the last."""
    if asked is False:
        return None
    return (1 if loop == "epoch" else 100) if asked is True else asked


def _after_failure(folder: Path, manager: HookManager) -> str:
    """Return what a user can do next: where the run is, how to resume it, and without which hook."""
    lines = [f"The run failed; what it recorded until then is in {folder}."]
    if failed := " or ".join(manager.hooks.errors):
        lines.append(
            f"Next: to train on when {failed} raises: --on-hook-error disable (it is switched off) or warn (it stays "
            "on)."
        )
    if checkpoints_in(folder):
        lines.append("To continue from its last checkpoint: --resume.")
    return " ".join(lines)


# -- --record-trajectory and --validate-checkpoints ------------------------------------------------------------


class TrajectoryHook(TrainingHook):
    """Save the model's parameters at every snapshot: ``trajectory/step_00000120.safetensors``."""

    name = "trajectory"
    description = "saves the parameters at every snapshot"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    pure = True

    def set_run_context(self, **context: Any) -> None:
        """Take the folder of the run, for the files."""
        self._folder = Path(context["run_dir"]) / "trajectory"

    def compute(self, ctx: RunDataContext) -> None:
        """Write a file."""
        from safetensors.torch import save_file

        assert ctx.model is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous().clone() for name, value in ctx.model.named_parameters()}
        save_file(weights, self._folder / f"step_{ctx.step or 0:08d}.safetensors")


class ValidatedCheckpoints(Checkpoints):
    """Read each checkpoint back when it is written, and say OK or what differs, bit for bit."""

    def __init__(self, folder: str | Path, *, say: Callable[[str], None], **options: Any) -> None:
        super().__init__(folder, **options)
        self._say = say

    def write(self, tree: Mapping[str, Any], steps: int) -> Path:
        """Write a checkpoint, read it, compare."""
        path = super().write(tree, steps)
        wrong = differing(tree, checkpoint_file.read(path))
        self._say(f"{path.name}: {'OK' if not wrong else 'MISMATCH at ' + ', '.join(wrong[:5])}")
        return path


def differing(saved: Any, found: Any) -> list[str]:
    """Return the places where two trees differ, by a bit."""
    return changed(*({path: digest(leaf) for path, leaf in leaves(tree)} for tree in (saved, found)))
