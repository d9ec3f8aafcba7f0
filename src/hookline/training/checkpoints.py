"""Choose where the checkpoints of a run are, and how often there is one; write and read those of several ranks.

Users make a `Checkpoints` and give it to a loop; `Saving` has it write trees and read the newest. With several ranks a
checkpoint is a folder: each rank writes a file of its own, with its part of each sharded tensor; the parameters and
moments that all ranks hold alike are in that of rank 0 alone. The folder gets its name when all ranks have written.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline import checkpoint_file
from hookline.checkpoint_file import PART, is_sharded, part_of
from hookline.error_policy import warn_user
from hookline.errors import CheckpointError, ResumeError
from hookline.files import FileLock, lock_holder, take_lock
from hookline.training.experiment import whole_number
from hookline.tree import map_tensors

if TYPE_CHECKING:
    import os

    from torch import nn

    from hookline.lifecycle.ranks import OneProcess

__all__ = [
    "SUFFIX", "Checkpoints", "differences", "local_parts", "lock_folder", "map_dicts", "place_parts", "rank_digest",
    "read_checkpoint", "write_ranks",
]  # fmt: skip

logger = logging.getLogger(__name__)

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
        replay: Of a loader that can only be iterated (no length, no ``state_dict()``): whether it gives the same again
            when random streams stand where they stood. Otherwise there are checkpoints only between passes over it.
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
        replay: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.every = None if every is None else whole_number("every", every, 1)
        self.every_steps = None if every_steps is None else whole_number("every_steps", every_steps, 1)
        self.keep = whole_number("keep", keep, 1)
        self.config = config
        self.force = force
        self.replay = replay
        self.seconds = 0.0
        """How long the last one took to write."""
        self.nbytes = 0
        """How large it is."""
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

    def add(self, steps: int, suffix: str, write_to: Callable[[Path], int], removes: bool = True) -> Path:
        """Have one more written, a file or a folder, and remove the oldest; ``write_to`` returns its bytes."""
        began = time.perf_counter()
        path = self.folder / f"step_{steps:08d}{suffix}"
        self.nbytes = write_to(path)
        self.seconds = time.perf_counter() - began
        self.count += 1
        for old in self.paths()[: -self.keep] if removes else ():
            _remove(old)
        logger.debug("Saved %s: %.1f MB in %.2f s", path, self.nbytes / 1e6, self.seconds)
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
                warn_user(f"{why} The run goes on from {path.name} instead.")
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
        names = [*saved, *(name for name in now if name not in saved)]
        return [
            line
            for name in names
            for line in differences(
                saved.get(name, _NOT_THERE), now.get(name, _NOT_THERE), f"{path}.{name}" if path else str(name)
            )
        ]
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (saved, now))
    if saved == now or (path.rpartition(".")[2] in _MAY_GROW and numbers and now > saved):
        return []
    was, found = (one if one is _NOT_THERE else repr(one) for one in (saved, now))
    return [f"{path or 'config'}: {was} → {found}"]


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


def rank_digest(tree: Any) -> int:
    """Return a number that is the same on two ranks only if they hold the same, each on a device of its own."""
    return checkpoint_file.digest(map_tensors(local_parts(tree), lambda _, tensor: tensor.cpu()))


def write_ranks(path: Path, tree: dict[str, Any], model: nn.Module, ranks: OneProcess) -> int:
    """Write the state of this rank; return the bytes of all. All ranks call it.

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
    return sum(file.stat().st_size for file in path.iterdir())


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
    path: Path, model: nn.Module, home: Callable[[torch.device], torch.device], rank: int, count: int
) -> dict[str, Any]:
    """Return the tree of a checkpoint for one of `count` ranks, with sharded tensors laid out like the model's."""
    is_folder = path.suffix == SUFFIX
    first = checkpoint_file.read(path / "rank0.pt" if is_folder else path, home)
    saved = first.get("ranks", 1)
    if is_folder and len(list(path.glob("rank*.pt"))) != saved:
        raise CheckpointError(f"{path} is not whole: it has not the files of {saved} ranks.")
    if saved != count:
        raise ResumeError(
            f"{path} was saved by {_processes(saved)}, and {_processes(count)} would go on with it. Next: resume with "
            f"{_processes(saved)}, or begin a run in another folder."
        )
    tree = first
    if rank > 0:
        tree = checkpoint_file.read(path / f"rank{rank}.pt", home)
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
