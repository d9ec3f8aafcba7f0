"""Save a run as it goes, and go on from what was saved.

A `Run` with `Checkpoints` calls it after steps, passes and epochs. It collects the states of model, experiment,
loader, hooks and streams in one tree, which `Checkpoints` writes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.errors import CheckpointError, Hint, HooklineWarning, OptionError, RankError, ResumeError
from hookline.messages import caller_stacklevel, type_name
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer
from hookline.training.checkpoints import Checkpoints, differences, lock_folder, to_plain
from hookline.training.loader import LoaderPosition
from hookline.training.model_state import CoreState, set_streams, streams, unwrapped
from hookline.training.rank_changes import adapt_to_ranks
from hookline.training.rank_checkpoint import SUFFIX, read_alone, read_ranks, saved_ranks
from hookline.training.sharded_tensors import is_sharded, local_parts
from hookline.training.stop_signals import StopSignals
from hookline.training.user_state import UserState

if TYPE_CHECKING:
    from hookline.lifecycle.manager import HookManager
    from hookline.training.run import Run

__all__ = ["Saving"]

_PARTS: Final = ("made", "loop", "settings", "run", "core", "before_epoch", "loader", "manager", "demand")
"""What a checkpoint of a run has."""


class Saving:
    """Save a run, and load one."""

    def __init__(self, run: Run, checkpoints: Checkpoints, settings: Mapping[str, Any]) -> None:
        _check(checkpoints)
        self._run = run
        self._ranks = run.ranks
        self._adapter = adapter = run.adapter
        # FSDP2 on a mesh of one rank; a plain Parameter is whole.
        others = [each for each in adapter.model.parameters() if type(each) is not torch.nn.Parameter]
        self._is_split = any(map(is_sharded, others))
        self._checkpoints = checkpoints
        self._own = UserState(adapter)
        self._core = CoreState(adapter, self._own)
        self._position = LoaderPosition(adapter, self._own, replay=checkpoints.replay)
        config = adapter.config if checkpoints.config is None else checkpoints.config
        self._settings = {
            "config": to_plain(config),
            "loop": {**settings, "accumulate": adapter.accumulate, "clip_norm": adapter.clip_norm},
        }
        self._signals = StopSignals()
        self._loaded: dict[str, Any] | None = None
        self._saved_at: tuple[int, bool] | None = None
        self._warned: set[str] = set()
        self._failures = 0
        """How often the run could not be saved."""
        self._every_steps = checkpoints.every_steps or (None if run.in_epochs else checkpoints.every)

    # -- the beginning -----------------------------------------------------------------------------------------

    @contextmanager
    def active(self, *, resume: bool) -> Iterator[None]:
        """Lock the folder and hold signals back for as long as the block lasts; load the model before."""
        with ExitStack() as stack:
            first = self._ranks.rank == 0
            self._ranks.together("locking the checkpoints", lambda: self._lock(stack) if first else None)
            stack.enter_context(self._signals)
            newest = self._checkpoints.newest()
            if newest is not None and not resume:
                raise ResumeError(
                    f"A run is to begin in {self._checkpoints.folder}, and a run was saved there ({newest.name}). "
                    "Next: resume=True goes on with it; a new one takes another folder."
                )
            if resume:
                self._read()
            yield

    def _lock(self, stack: ExitStack) -> None:
        self._checkpoints.begin()
        stack.enter_context(lock_folder(self._checkpoints.folder))

    def _read(self) -> None:
        found = self._checkpoints.read(self._load)
        if found is None:
            return
        path, saved = found
        self._check(path, saved)
        lost = self._carry_over(path, saved)
        if lost:
            self._warn(lost)
        if saved["before_epoch"] is not None and self._run.retention is not None:
            self._core.load(saved["before_epoch"])
            self._run.retention.take_pre_epoch()
        self._core.load(saved["core"])
        self._loaded = saved

    def _load(self, path: Path) -> dict[str, Any]:
        """Return the tree of a checkpoint for this rank; of one that another number of ranks wrote, that of rank 0."""
        ranks = self._ranks
        before, _ = saved_ranks(path)
        rank = ranks.rank if before == ranks.size else 0
        tree: dict[str, Any] = {}

        def load() -> None:
            model, optimizer = unwrapped(self._adapter.model), unwrap_optimizer(self._adapter.optimizer)
            if path.suffix == SUFFIX:
                same = before == ranks.size
                tree.update(read_ranks(path, model, optimizer, rank, self._home, same_ranks=same))
            else:
                tree.update(read_alone(path, model, optimizer, self._home))

        try:
            ranks.together(f"reading {path.name}", load)
        except RankError as error:
            raise CheckpointError(str(error)) from error
        return tree

    def _carry_over(self, path: Path, saved: dict[str, Any]) -> str:
        """Drop what another number of ranks cannot use; return what that is, in a sentence."""
        before, differing = saved_ranks(path)
        now = self._ranks.size
        return "" if before == now else adapt_to_ranks(saved, before, now, differing, streams(self._adapter.model))

    def _home(self, device: torch.device) -> torch.device:
        """Return the device for tensors that were on `device`; a run may go on on another kind of device."""
        first = next(self._adapter.model.parameters(), None)
        here = torch.device("cpu") if first is None else first.device
        return device if device.type in ("cpu", here.type) else here

    def _check(self, path: Path, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that does not fit, before anything is loaded."""
        missing = [name for name in _PARTS if name not in saved]
        if missing:
            raise ResumeError(f"{path} is whole, but no checkpoint of a run: it has no {', '.join(missing)}.")
        if saved["loop"] != self._adapter.loop:
            raise ResumeError(f"{path} is of the {saved['loop']} loop, and the {self._adapter.loop} loop is to go on.")
        changed = differences(saved["settings"], self._settings)
        if changed and not self._checkpoints.force:
            lines = "\n".join(f"  {line}" for line in changed)
            raise ResumeError(
                f"The run in {path.parent} was saved with other settings (saved → now):\n{lines}\nNext: set them back, "
                "or begin a run in another folder.",
                hint=Hint.RESUME_ANYWAY,
            )
        self._core.check(saved["core"], force=self._checkpoints.force)
        if saved["made"]["torch"] != str(torch.__version__):
            self._warn(
                f"The run was saved with torch {saved['made']['torch']} and goes on with {torch.__version__}: numbers "
                "may differ in the last bits from here on."
            )

    def begin(self) -> bool:
        """Load the state of hooks, or save the beginning; return whether the run goes on from a checkpoint."""
        saved = self._loaded
        if saved is None:
            self._save()
            return False
        run = self._run
        if run.manager is not None:
            no_hooks = {"global_step": saved["run"]["step"], "hooks": {}, "step_metrics": {}}
            run.manager.load_state_dict(saved["manager"] or no_hooks)
        if run.retention is not None and saved["demand"] is not None:
            run.retention.load_state_dict(saved["demand"])
        run.load_state_dict(saved["run"])
        self._position.load(saved["loader"], within=run.is_within)
        set_streams(saved["core"]["streams"], self._adapter.model)
        self._saved_at = (run.num_steps, run.is_within)
        if self._adapter.has_no_data:
            self._loaded = {"run": saved["run"]}
        return True

    # -- on its way --------------------------------------------------------------------------------------------

    def before_loader(self) -> None:
        """Save the streams before a pass over the data begins."""
        self._position.before_loader()

    def batches(self, *, resumed: bool) -> Iterator[Any]:
        """Return the batches of the pass, or those that are left of it."""
        if resumed:
            assert self._loaded is not None
            loader, core = self._loaded["loader"], self._loaded["core"]
            batches = self._position.go_on(loader, self._run.epoch, self._run.done)
            self._own.load(core["own"])  # to make the loader again may have changed what the experiment counts
            self._position.set_now(loader)
            set_streams(core["streams"], self._adapter.model)
            self._loaded = None
            return self._until_stopped(batches)
        self._loaded = None
        self._position.begin()
        return self._until_stopped(self._adapter.batches())

    def _until_stopped(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception:
                if self._signals.came is None or not self._ranks.is_single:
                    raise
                # Ctrl-C goes to the workers of the loader as well, and those that were not forked end by it.
                self._stop(within=True)
                return
            yield batch

    def save_after_step(self) -> bool:
        """Save after a step if one is due; return whether the run stops here."""
        if self._signal() is not None:
            self._stop(within=self._is_within())
            return True
        if self._every_steps is not None and self._run.num_steps % self._every_steps == 0:
            self._save_within()
        return False

    def _signal(self) -> str | None:
        """Return the signal that came; with several ranks, once all know that it came to one of them."""
        self._ranks.signal = self._signals.came
        return self._ranks.agreed_signal

    def _is_within(self) -> bool:
        return not self._adapter.has_no_data

    def save_after_pass(self) -> None:
        """Save between two passes over data that cannot be entered in the middle; the step loop calls this."""
        if not self._position.can_go_on:
            self._save()

    def save_after_epoch(self) -> bool:
        """Save after an epoch if one is due; return whether the run stops here."""
        if self._signal() is not None:
            self._stop(within=False)
            return True
        every = self._checkpoints.every
        if (every is not None and (self._run.epoch + 1) % every == 0) or not self._position.can_go_on:
            self._save()
        return False

    def finish(self) -> None:
        """Save the complete run."""
        run = self._run
        if run.interrupted is None:
            if self._loaded is not None and self._loaded["run"]["num_steps"] == run.num_steps:
                self._warn(
                    f"The run in {self._checkpoints.folder} is complete: {run.num_steps} steps were made before, and "
                    "none is left. Ask for more, or begin a run in another folder."
                )
            else:
                self._flush()
                self._save(within=not run.in_epochs and run.done > 0 and self._position.can_go_on)
            run.interrupted = self._signal()  # too late to stop anything, but it is not swallowed

    def _stop(self, *, within: bool) -> None:
        self._run.interrupted = self._signal()
        self._flush()
        if within:
            self._save_within()
        else:
            self._save()

    def _flush(self) -> None:
        """Write metrics of steps before the last save: a sink that has had them gets them once."""
        manager = self._run.manager
        if manager is not None and manager.flush_step_metrics(self._run.position):
            self._saved_at = None

    def _save_within(self) -> None:
        """Save in the middle of a pass, if the loader can get there again."""
        within = self._is_within()
        if within and not self._position.can_go_on:
            self._warn(
                f"The loader, {type_name(self._adapter.current_loader)}, cannot be brought back into the middle of a "
                "pass over the data: there are checkpoints between passes only, and a resumed run begins the pass anew."
                " Give it state_dict() and load_state_dict(), or see replay= of Checkpoints."
            )
            return
        self._save(within=within)

    # -- saving ------------------------------------------------------------------------------------------------

    def _save(self, *, within: bool = False) -> None:
        run = self._run
        if self._saved_at == (run.num_steps, within):
            return
        try:
            state = self._state(within=within)
            if self._ranks.is_single:
                self._checkpoints.write(local_parts(state) if self._is_split else state, run.step + 1)
            else:
                self._checkpoints.write_ranks(state, run.step + 1, unwrapped(self._adapter.model), self._ranks)
        except Exception as error:
            if self._ranks.is_lost:
                raise
            if self._checkpoints.count == 0 and isinstance(error, CheckpointError):
                raise  # at the start, where it costs nothing to mend
            self._failures += 1
            if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: a week of failures is no single line
                newest = self._checkpoints.newest()
                self._warn(
                    f"The run could not be saved after {run.num_steps} steps ({type(error).__name__}: {error}), which "
                    f"makes {self._failures} times. It goes on; the newest checkpoint is "
                    f"{'none' if newest is None else newest.name}."
                )
            return
        self._saved_at = (run.num_steps, within)

    def _state(self, *, within: bool) -> dict[str, Any]:
        run, manager = self._run, self._run.manager
        if within and (silent := _unsaved_trackers(manager, self._adapter.experiment)):
            self._warn(
                f"What {', '.join(map(repr, silent))} counted since the last report is not saved: a tracker is saved "
                "if it has state_dict() and load_state_dict(). Between epochs there is nothing to save."
            )
        return {
            "made": {"torch": str(torch.__version__), "time": time.time()},
            "loop": self._adapter.loop,
            "settings": self._settings,
            "run": run.state_dict(within=within),
            "core": self._core.save(run.manager),
            "before_epoch": self._core.before_epoch(run.retention, run.manager) if within else None,
            "loader": self._position.save(within=within, begun=run.num_epochs > 0),
            "manager": None if manager is None else manager.state_dict(),
            "demand": None if run.retention is None else run.retention.state_dict(),
        }

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())


def _check(checkpoints: Any) -> None:
    if not isinstance(checkpoints, Checkpoints):
        raise OptionError(f"checkpoints= is Checkpoints(folder, every=...), got {type_name(checkpoints)}.")


def _unsaved_trackers(manager: HookManager | None, experiment: Any) -> list[str]:
    """Return the names of trackers that have no ``state_dict()``, so that what they have counted is lost."""
    hooks = {} if manager is None else manager.hooks
    trackers = {name: getattr(hook, "tracker", None) for name, hook in hooks.items()}
    context = getattr(experiment, "context", None)
    metrics = getattr(context, "model_metrics", None)  # of Metta's `ComponentContext`
    if isinstance(metrics, Mapping):
        trackers |= metrics
    return [name for name, tracker in trackers.items() if tracker is not None and not hasattr(tracker, "state_dict")]
