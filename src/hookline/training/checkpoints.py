"""Save a run as it goes, go on from what was saved, and stop when a signal comes.

Users make a `Checkpoints`, a folder, and give it to a loop. A `Run` calls `Saving` after steps, passes and epochs: it
collects the states of model, experiment, loader, hooks and streams in one tree, which `Checkpoints` writes.

With several ranks a checkpoint is a folder: each rank writes a file of its own, with its part of each sharded tensor;
the parameters and moments that all ranks hold alike are in that of rank 0 alone. The folder gets its name when all
ranks have written.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from hookline.error_policy import error_text, warn_user
from hookline.errors import CheckpointError, OptionError, RankError, ResumeError
from hookline.files import FileLock, lock_holder, take_lock
from hookline.lifecycle import checkpoint_file
from hookline.lifecycle.checkpoint_file import PART, is_sharded, part_of
from hookline.messages import type_name
from hookline.plain import to_plain
from hookline.records.log import has_ranks
from hookline.training.experiment import whole_number
from hookline.training.run import NotSaved, Run
from hookline.training.state import RunState, SavedPasses, set_streams, unwrapped
from hookline.tree import map_tensors

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.ranks import OneProcess

_MAY_GROW: Final = ("epochs", "steps")
"""A run may be asked to go on for longer."""
_NOT_THERE: Final = "(not there)"
SUFFIX: Final = ".ranks"
"""How the folder of a checkpoint of several ranks ends."""
_NAME: Final = re.compile(r"step_(\d+)\.(pt|ranks)")


class Checkpoints:
    """A folder of checkpoints, ``step_00000120.pt`` being the run after 120 steps.

    Recipe::

        checkpoints = hookline.Checkpoints("runs/parity/checkpoints", every=1)
        hookline.epoch_loop(experiment, epochs=100, manager=manager, checkpoints=checkpoints, resume=True)

    With ``resume=True`` the run goes on from the newest, or begins if there is none: the same line starts it, and goes
    on after it was killed. It ends as it would have ended without, bit for bit. SIGINT (Ctrl-C) and SIGTERM let the
    step finish and save; a second one ends the process as ever.

    Args:
        folder: Where they are; one run to a folder.
        every: How many epochs from one to the next, at their ends; in the step loop, steps. None: one at the start, one
            at the end, one when a signal comes.
        every_steps: Count steps instead, in the epoch loop as well.
        keep: How many of the newest stay.
        config: The settings of the run; going on with others is refused. If left out, ``experiment.config``.
        force: Go on with other settings all the same.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        every_steps: int | None = None,
        keep: int = 2,
        config: Mapping[str, Any] | Any = None,
        force: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.every = None if every is None else whole_number("every", every, 1)
        self.every_steps = None if every_steps is None else whole_number("every_steps", every_steps, 1)
        self.keep = whole_number("keep", keep, 1)
        self.config = config
        self.force = force
        self.count = 0
        """How many were written."""

    def paths(self) -> list[Path]:
        """Return the checkpoints that there are, the oldest first."""
        found = [(int(match[1]), path) for path in self.folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def newest(self) -> Path | None:
        """Return the newest, whether whole or not; None if there is none."""
        paths = self.paths()
        return paths[-1] if paths else None

    # -- for the loops -----------------------------------------------------------------------------------------

    def write(self, tree: Mapping[str, Any], steps: int) -> Path:
        """Write one more, and remove the oldest."""
        return self.add(steps, ".pt", lambda path: checkpoint_file.write(path, tree))

    def add(self, steps: int, suffix: str, write_to: Callable[[Path], object], removes: bool = True) -> Path:
        """Have one more written, a file or a folder, and remove the oldest."""
        path = self.folder / f"step_{steps:08d}{suffix}"
        write_to(path)
        self.count += 1
        for old in self.paths()[: -self.keep] if removes else ():
            _remove(old)
        return path

    def read(self, load: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest that is whole, and rename damaged ones with a warning; None if there is none at all.

        Args:
            load: Reads one; raises `CheckpointError` if it is damaged, with several ranks on all of them.
        """
        failed: list[tuple[Path, CheckpointError]] = []
        for path in reversed(self.paths()):
            try:
                tree = load(path)
            except CheckpointError as error:
                failed.append((path, error))
                continue
            for damaged, why in failed:
                with suppress(OSError):  # or it would be the newest again
                    damaged.replace(damaged.with_name(f"{damaged.name}.damaged"))
                warn_user(f"{why} The run continues from {path.name} instead.")
            return path, tree
        if failed:
            tried = "\n".join(f"  {why}" for _, why in failed)
            raise ResumeError(f"None of the checkpoints in {self.folder} is whole:\n{tried}\nBegin a run elsewhere.")
        return None

    def begin(self) -> None:
        """Make the folder, and remove what a killed process has left half written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"The folder {self.folder} of checkpoints cannot be made ({error}).") from error
        for draft in self.folder.glob(".step_*"):
            _remove(draft)

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, every={self.every}, keep={self.keep})"


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def lock_folder(folder: Path) -> FileLock:
    """Return the lock of a run's folder, for a ``with`` block; raise if another run writes its checkpoints there."""
    folder = folder.resolve()
    path = folder / "lock"
    try:
        lock = take_lock(path)
    except OSError as error:
        raise CheckpointError(f"No checkpoints can be written to {folder} ({error}): give another folder.") from error
    if lock is None:
        holder = lock_holder(path)
        who = "another process" if holder is None else f"process {holder}"
        raise ResumeError(f"{folder} is in use: {who} writes its checkpoints there. Wait, or give another folder.")
    return lock


# -- settings -----------------------------------------------------------------------------------------------------


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Return a line for each setting that differs: ``lr: 0.1 → 0.2``."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        above = f"{path}." if path else ""
        pairs = {f"{above}{key}": (saved.get(key, _NOT_THERE), now.get(key, _NOT_THERE)) for key in {**saved, **now}}
        return [line for name, (was, found) in pairs.items() for line in differences(was, found, name)]
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (saved, now))
    if saved == now or (path.rpartition(".")[2] in _MAY_GROW and numbers and now > saved):
        return []
    was, found = (one if one is _NOT_THERE else repr(one) for one in (saved, now))
    return [f"{path}: {was} → {found}"]


# -- several ranks -------------------------------------------------------------------------------------------------


def local_parts(tree: Any) -> Any:
    """Return the same structure with this rank's part of each sharded tensor."""
    return map_tensors(tree, lambda _, tensor: part_of(tensor) if is_sharded(tensor) else tensor)


def place_parts(tree: Any, like: Iterable[Tensor]) -> Any:
    """Return the structure that was saved, with sharded tensors laid out as those of ``like``."""
    sharded: list[Any] = [tensor for tensor in like if is_sharded(tensor)]

    def place(one: dict[Any, Any]) -> Any:
        if PART not in one:
            return None
        from torch.distributed.tensor import DTensor

        part, shape = one[PART], torch.Size(one["shape"])
        for each in sharded:
            if each.shape == shape and part.shape == each.to_local().shape:
                layout = {"run_check": False, "shape": shape, "stride": each.stride()}
                return DTensor.from_local(part, each.device_mesh, each.placements, **layout)
        raise ResumeError(
            f"A sharded tensor of shape {tuple(shape)} was saved, and the model has none of that shape and layout. "
            "Next: shard the model as it was, or begin a run in another folder."
        )

    return map_dicts(tree, place)


def map_dicts(value: Any, change: Callable[[dict[Any, Any]], Any]) -> Any:
    """Return the same structure with what `change` makes of a dictionary in its place; None leaves it as it is."""
    if type(value) is dict:
        changed = change(value)
        return {key: map_dicts(item, change) for key, item in value.items()} if changed is None else changed
    if type(value) in (list, tuple):
        return type(value)(map_dicts(item, change) for item in value)
    return value


def write_ranks(path: Path, tree: dict[str, Any], model: nn.Module, ranks: OneProcess) -> None:
    """Write the state of this rank. All ranks call it.

    Whatever fails on one rank is raised on all. Until all have written, the folder has another name.
    """
    draft = path.with_name(f".{path.name}")

    def begin() -> None:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)

    def write() -> None:
        own = tree if ranks.rank == 0 else {**tree, "core": _without_shared(tree["core"], model)}
        checkpoint_file.write(draft / f"rank{ranks.rank}.pt", own)

    def commit() -> None:
        if ranks.rank == 0:
            checkpoint_file.sync_folder(draft)
            shutil.rmtree(path, ignore_errors=True)
            draft.replace(path)

    ranks.together("beginning a checkpoint", begin)
    ranks.together("writing a checkpoint", write)
    ranks.together("naming a checkpoint", commit)


def _without_shared(core: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the state without the parameters, and the optimizer's tensors, that all ranks hold alike."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def own(held: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        shared = {name for name in names if isinstance(held.get(name), Tensor) and not is_sharded(held[name])}
        return {name: value for name, value in held.items() if name not in shared}

    tensors, optimizer = core["model"]["tensors"], core["optimizer"]
    found = {**core, "model": {**core["model"], "tensors": own(tensors, parameters)}}
    if optimizer is not None and "state" in optimizer["state"]:
        moments = {index: own(held, held) for index, held in optimizer["state"]["state"].items()}
        found["optimizer"] = {**optimizer, "state": {**optimizer["state"], "state": moments}}
    return found


def read_checkpoint(
    path: Path, model: nn.Module, home: Callable[[torch.device], torch.device], ranks: OneProcess
) -> dict[str, Any]:
    """Return the tree of a checkpoint for this rank, with sharded tensors laid out like the model's."""
    is_folder = path.suffix == SUFFIX
    first = checkpoint_file.read(path / "rank0.pt" if is_folder else path, home)
    if "core" not in first:
        raise ResumeError(f"{path} is whole, but no checkpoint of a run.")
    saved = first.get("ranks", 1)
    if is_folder and len(list(path.glob("rank*.pt"))) != saved:
        raise CheckpointError(f"{path} is not whole: it has not the files of {saved} ranks.")
    if saved != ranks.size:
        raise ResumeError(
            f"{path} was saved by {_processes(saved)}, and {_processes(ranks.size)} would continue with it. Next: "
            f"resume with {_processes(saved)}, or begin a run in another folder."
        )
    tree = first
    if ranks.rank > 0:
        tree = checkpoint_file.read(path / f"rank{ranks.rank}.pt", home)
        for held, shared in zip(_holders(tree["core"]), _holders(first["core"]), strict=True):
            held |= {key: value for key, value in shared.items() if key not in held}
    placed: dict[str, Any] = place_parts(tree, model.parameters())
    return placed


def _holders(core: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the dictionaries of the tensors of the model, and of the optimizer's for each parameter."""
    optimizer = core["optimizer"] or {"state": {}}
    return [core["model"]["tensors"], *optimizer["state"].get("state", {}).values()]


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"


# -- saving and going on -------------------------------------------------------------------------------------------


class Saving(NotSaved):
    """Save a run, and load one."""

    def __init__(self, run: Run, checkpoints: Checkpoints, settings: Mapping[str, Any]) -> None:
        if not isinstance(checkpoints, Checkpoints):
            raise OptionError(f"checkpoints= is Checkpoints(folder, every=...), got {type_name(checkpoints)}.")
        super().__init__(run)
        self._ranks = run.ranks
        self._experiment = run.experiment
        self._checkpoints = checkpoints
        self._core = RunState(self._experiment)
        run.passes = self._passes = SavedPasses(self._experiment, self._core)
        config = self._experiment.config if checkpoints.config is None else checkpoints.config
        self._settings = {
            "config": to_plain(config),
            "loop": {**settings, "accumulate": self._experiment.accumulate, "clip_norm": self._experiment.clip_norm},
        }
        self._signals = StopSignals()
        self._loaded: dict[str, Any] | None = None
        self._saved_at: tuple[int, bool] | None = None
        self._warned: set[str] = set()
        self._failures = 0
        """How often the run could not be saved."""
        self._is_last = False
        """Whether the run ends, so that it will not be saved again."""
        self._every_steps = checkpoints.every_steps or (None if run.loop == "epoch" else checkpoints.every)

    # -- the beginning -----------------------------------------------------------------------------------------

    @contextmanager
    def active(self, *, resume: bool) -> Iterator[None]:
        """Lock the folder and hold signals back for as long as the block lasts; load the model before."""
        with ExitStack() as stack:
            self._ranks.together("locking the checkpoints", lambda: self._lock(stack))
            stack.enter_context(self._signals)
            newest = self._checkpoints.newest()
            if newest is not None and not resume:
                raise ResumeError(f"{newest} is of another run: resume=True continues with it, or take another folder.")
            fan_out = self._run.manager.fan_out
            if not fan_out.is_empty:  # files of sinks can be made again from a log alone
                fan_out.open_log(self._checkpoints.folder / "records.jsonl")
            if resume:
                self._read()
            yield

    def _lock(self, stack: ExitStack) -> None:
        if self._ranks.rank == 0:
            self._checkpoints.begin()
            stack.enter_context(lock_folder(self._checkpoints.folder))

    def _read(self) -> None:
        found = self._checkpoints.read(self._load)
        if found is None:
            return
        path, saved = found
        self._check(path, saved)
        self._core.load(saved["core"])
        self._loaded = saved

    def _load(self, path: Path) -> dict[str, Any]:
        """Return the tree of a checkpoint for this rank."""
        model, tree = unwrapped(self._experiment.model), {}

        def load() -> None:
            try:
                tree.update(read_checkpoint(path, model, self._home, self._ranks))
            except (CheckpointError, ResumeError):
                raise
            except Exception as error:  # the same class on this rank as on the others, which go on to an older one
                raise CheckpointError(f"{path} cannot be read ({error_text(error)}).") from error

        try:
            self._ranks.together(f"reading {path.name}", load)
        except RankError as error:
            raise CheckpointError(str(error)) from error
        return tree

    def _home(self, device: torch.device) -> torch.device:
        """Return the device for tensors that were on `device`; a run may go on on another kind of device."""
        first = next(self._experiment.model.parameters(), None)
        here = torch.device("cpu") if first is None else first.device
        return device if device.type in ("cpu", here.type) else here

    def _check(self, path: Path, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that does not fit, before anything is loaded."""
        if saved["loop"] != self._run.loop:
            raise ResumeError(f"{path} is of the {saved['loop']} loop, and the {self._run.loop} loop is to continue.")
        changed = differences(saved["settings"], self._settings)
        if changed and not self._checkpoints.force:
            lines = "\n".join(f"  {line}" for line in changed)
            raise ResumeError(
                f"The run in {path.parent} was saved with other settings (saved → now):\n{lines}\nNext: set them back, "
                "or begin a run in another folder. To continue anyway: --force, or Checkpoints(..., force=True)."
            )
        self._core.check(saved["core"], force=self._checkpoints.force)
        if saved["made"]["torch"] != str(torch.__version__):
            versions = f"torch {saved['made']['torch']} and continues with {torch.__version__}"
            self._warn(f"The run was saved with {versions}: numbers may differ in the last bits from here on.")

    def begin(self) -> bool:
        """Load the state of hooks, or save the beginning; return whether the run goes on from a checkpoint."""
        saved = self._loaded
        if saved is None:
            self._save()
            return False
        run = self._run
        state = saved["manager"]
        if not run.manager.hooks and run.manager.fan_out.is_empty:  # the run goes on without its hooks and sinks
            state = {"global_step": state["global_step"], "hooks": {}, "step_metrics": {}}
        run.manager.load_state_dict(state)
        run.retention.load_state_dict(saved["demand"])
        run.load_state_dict(saved["run"])
        self._passes.load(saved["loader"], within=run.is_within)
        set_streams(saved["core"]["streams"], self._experiment.model)
        self._saved_at = (run.num_steps, run.is_within)
        if self._passes.has_no_data:
            self._loaded = {"run": saved["run"]}
        return True

    # -- on its way --------------------------------------------------------------------------------------------

    def batches(self, *, resumed: bool) -> Iterator[Any]:
        """Return the batches of the pass, or those that are left of it."""
        loaded, self._loaded = self._loaded, None
        if not resumed:
            return self._until_stopped(super().batches(resumed=False))
        assert loaded is not None
        loader, core = loaded["loader"], loaded["core"]
        batches = self._passes.go_on(loader, self._run.epoch, self._run.done)
        self._core.load_own(core["own"])  # to make the loader again may have changed what the experiment counts
        self._passes.set_now(loader)
        set_streams(core["streams"], self._experiment.model)
        return self._until_stopped(batches)

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
                self._stop(self._save_within)
                return
            yield batch

    def save_after_step(self) -> bool:
        """Save after a step if one is due; return whether the run stops here."""
        if self._signal() is not None:
            self._stop(self._save_within)
            return True
        if self._every_steps is not None and self._run.num_steps % self._every_steps == 0:
            self._save_within()
        return False

    def _signal(self) -> str | None:
        """Return the signal that came; with several ranks, once all know that it came to one of them."""
        if self._ranks.is_single:
            return self._signals.came
        self._ranks.signal = self._signals.came
        return self._ranks.agreed_signal

    @property
    def _why_not_within(self) -> str:
        """Why the run cannot be saved in the middle of a pass; empty if it can."""
        if self._run.retention.pre_epoch is not None:
            return "A hook may go back to before the epoch, and that is not saved"
        if self._passes.can_go_on:
            return ""
        return (
            f"The loader, {type_name(self._passes.loader)}, cannot be brought back into the middle of a pass (give it "
            "state_dict() and load_state_dict())"
        )

    def save_after_pass(self) -> None:
        """Save between two passes over data that cannot be entered in the middle; the step loop calls this."""
        if self._why_not_within:
            self._save()

    def save_after_epoch(self) -> bool:
        """Save after an epoch if one is due; return whether the run stops here."""
        if self._signal() is not None:
            self._stop(self._save)
            return True
        every = self._checkpoints.every
        if (every is not None and (self._run.epoch + 1) % every == 0) or self._why_not_within:
            self._save()
        return False

    def finish(self) -> None:
        """Save the complete run."""
        run = self._run
        self._is_last = True
        if run.interrupted is None:
            if self._loaded is not None and self._loaded["run"]["num_steps"] == run.num_steps:
                self._warn(f"The run in {self._checkpoints.folder} is complete: {run.num_steps} steps.")
            else:
                self._flush()
                self._save(within=run.loop == "step" and run.done > 0 and not self._why_not_within)
            run.interrupted = self._signal()  # too late to stop anything, but it is not swallowed

    def _stop(self, save: Callable[[], None]) -> None:
        self._run.interrupted, self._is_last = self._signal(), True
        self._flush()
        save()

    def _flush(self) -> None:
        """Write metrics of steps before the last save: a sink that has had them gets them once."""
        if self._run.manager.flush_step_metrics(self._run.position):
            self._saved_at = None

    def _save_within(self) -> None:
        """Save in the middle of a pass, if the run can get there again."""
        within = not self._passes.has_no_data
        if within and (why := self._why_not_within):
            self._warn(f"{why}: there are checkpoints between passes only.")
            return
        self._save(within=within)

    # -- saving ------------------------------------------------------------------------------------------------

    def _save(self, *, within: bool = False) -> None:
        run = self._run
        if self._saved_at == (run.num_steps, within):
            return
        try:
            state: dict[str, Any] = {}
            self._ranks.together("collecting a checkpoint", lambda: state.update(self._state(within=within)))
            self._write(state, run.step + 1)
        except Exception as error:
            if self._ranks.is_lost:
                raise
            if self._checkpoints.count == 0 and (not self._ranks.is_single or isinstance(error, CheckpointError)):
                raise  # at the start, where it costs nothing to mend
            self._failures += 1
            # The 1st, 2nd, 4th, 8th: a week of failures is no single line.
            if self._is_last or self._failures.bit_count() == 1:
                newest = self._checkpoints.newest()
                times = "for the first time" if self._failures == 1 else f"{self._failures} times so far"
                self._warn(
                    f"The run could not be saved after {run.num_steps} steps ({error_text(error)}; "
                    f"{times}); the newest checkpoint is {newest.name if newest else 'none'}."
                )
            return
        self._saved_at = (run.num_steps, within)

    def _write(self, state: dict[str, Any], steps: int) -> None:
        ranks, model = self._ranks, unwrapped(self._experiment.model)
        if ranks.is_single:
            self._checkpoints.write(state, steps)
        else:
            self._checkpoints.add(steps, SUFFIX, lambda path: write_ranks(path, state, model, ranks), ranks.rank == 0)

    def _state(self, *, within: bool) -> dict[str, Any]:
        run, manager = self._run, self._run.manager
        trackers = {name: hook.tracker for name, hook in manager.hooks.items() if hasattr(hook, "tracker")}
        silent = [repr(name) for name, tracker in trackers.items() if not hasattr(tracker, "state_dict")]
        if within and silent:
            self._warn(f"What {', '.join(silent)} counted since the last report is not saved: it has no state_dict().")
        return {
            "made": {"torch": str(torch.__version__), "time": time.time()},
            "ranks": self._ranks.size,
            "loop": self._run.loop,
            "settings": self._settings,
            "run": run.state_dict(within=within),
            "core": self._core.save(gradients=bool(manager.hooks)),
            "loader": self._passes.save(within=within, begun=run.num_epochs > 0),
            "manager": manager.state_dict(),
            "demand": run.retention.state_dict(),
        }

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn_user(text)


# -- signals ---------------------------------------------------------------------------------------------------------

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """Note the first SIGINT or SIGTERM; the second does what it would have done without.

    Only the main thread may set handlers, so in others nothing is noted. A signal that is ignored (``nohup``) stays
    ignored. A handler of the user's own is called as well, at once.
    """

    def __init__(self) -> None:
        self.came: str | None = None
        """The name of the signal that came."""
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before is not signal.SIG_IGN:  # None: set by another language
                    self._before[number] = before
                    signal.signal(number, self._take)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._put_back()

    def _put_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:  # else someone has set another one meanwhile
                signal.signal(number, before)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if os.getpid() != self._process:  # a worker of a loader: the run decides when to stop
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if self.came is not None and has_ranks() and signal.Signals(number).name != self.came:
            return  # of torchrun, which passes on what it was sent itself
        if self.came is not None:  # pressed again
            self._put_back()
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, before)
                signal.raise_signal(number)
            return
        self.came = signal.Signals(number).name
        if before not in _DEFAULTS and callable(before):
            before(number, frame)
