"""Choose where the checkpoints of a run are, and how often there is one.

Users make a `Checkpoints` and give it to a loop; `Saving` has it write trees and read the newest.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.error_policy import error_text
from hookline.errors import CheckpointError, HooklineWarning, ResumeError
from hookline.files import FileLock, lock_holder, take_lock
from hookline.messages import caller_stacklevel
from hookline.training.checkpoint_file import write
from hookline.training.experiment_adapter import whole_number
from hookline.training.rank_checkpoint import SUFFIX, write_ranks

if TYPE_CHECKING:
    import os

    from torch import nn

    from hookline.lifecycle.ranks import OneProcess

__all__ = ["Checkpoints", "differences", "lock_folder", "to_plain"]

logger = logging.getLogger(__name__)

_MAY_GROW: Final = ("epochs", "steps")
"""A run may be asked to go on for longer."""
_DEEPEST: Final = 20
_NOT_THERE: Final = "(not there)"
_NAME: Final = re.compile(r"step_(\d+)\.(safetensors|ranks)")


class Checkpoints:
    """A folder of checkpoints, ``step_00000120.safetensors`` being the run after 120 steps.

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
        began = time.perf_counter()
        path = self.folder / f"step_{steps:08d}.safetensors"
        self.nbytes = write(path, tree)
        self._count_and_prune(path, began)
        return path

    def write_ranks(self, tree: Mapping[str, Any], steps: int, model: nn.Module, ranks: OneProcess) -> Path:
        """Write one more with the other ranks, as a folder, and have rank 0 remove the oldest; all ranks call it."""
        began = time.perf_counter()
        path = self.folder / f"step_{steps:08d}{SUFFIX}"
        try:
            write_ranks(path, tree, model, ranks)
        except Exception as error:
            if ranks.is_lost or isinstance(error, CheckpointError):
                raise
            raise CheckpointError(error_text(error)) from error  # one class on all ranks, so that all do the same
        self.nbytes = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        self._count_and_prune(path, began, removes=ranks.rank == 0)
        return path

    def _count_and_prune(self, path: Path, began: float, *, removes: bool = True) -> None:
        self.seconds = time.perf_counter() - began
        self.count += 1
        for old in self.paths()[: -self.keep] if removes else ():
            with suppress(OSError):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        logger.debug("Saved %s: %.1f MB in %.2f s", path, self.nbytes / 1e6, self.seconds)

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
                self._put_aside(damaged, why, path)
            return path, tree
        if failed:
            tried = "\n".join(f"  {why}" for _, why in failed)
            raise ResumeError(f"None of the checkpoints in {self.folder} is whole:\n{tried}\nBegin a run elsewhere.")
        return None

    def _put_aside(self, damaged: Path, error: CheckpointError, path: Path) -> None:
        """Rename a damaged checkpoint, or it would be the newest again."""
        with suppress(OSError):
            damaged.replace(damaged.with_name(f"{damaged.name}.damaged"))
        warnings.warn(
            f"{error} The run goes on from {path.name} instead.", HooklineWarning, stacklevel=caller_stacklevel()
        )

    def begin(self) -> None:
        """Make the folder, and remove what a killed process has left half written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints are to go to {self.folder}, and that folder cannot be made ({error}). Next: give one "
                "that can be written to."
            ) from error
        for part in self.folder.glob("step_*.part"):
            with suppress(OSError):
                shutil.rmtree(part) if part.is_dir() else part.unlink()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, every={self.every}, keep={self.keep})"


def lock_folder(folder: Path) -> FileLock:
    """Return the lock of a run's folder, for a ``with`` block; raise if another run writes its checkpoints there."""
    folder = folder.resolve()
    path = folder / "lock"
    try:
        lock = take_lock(path)
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints are to go to {folder}, and nothing can be written there ({error}). Next: give another folder."
        ) from error
    if lock is None:
        holder = lock_holder(path)
        who = "another process" if holder is None else f"process {holder}"
        raise ResumeError(
            f"{folder} is in use: {who} writes its checkpoints there. Next: wait for it, end it, or give another "
            "folder."
        )
    return lock


# -- settings -----------------------------------------------------------------------------------------------------


def to_plain(config: Any, depth: int = 0) -> Any:
    """Return a configuration as dictionaries, lists, numbers and texts; of anything else, its type."""
    if depth > _DEEPEST:  # it may contain itself
        return "…"
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    elif callable(getattr(config, "model_dump", None)):
        config = config.model_dump()
    if isinstance(config, Mapping):
        return {str(key): to_plain(value, depth + 1) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(value, depth + 1) for value in config]
    if isinstance(config, (set, frozenset)):
        return sorted((to_plain(value, depth + 1) for value in config), key=repr)
    if isinstance(config, Path):
        return str(config)
    if type(config).__name__ in ("dtype", "device"):
        return str(config)
    inside = getattr(config, "__dict__", None)
    if inside and not callable(config):
        return {name: to_plain(value, depth + 1) for name, value in inside.items() if not name.startswith("_")}
    return f"a {getattr(config, '__qualname__', None) or type(config).__qualname__}"


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
    if saved == now or (isinstance(saved, float) and isinstance(now, float) and math.isnan(saved) and math.isnan(now)):
        return []
    if path.rpartition(".")[2] in _MAY_GROW and _is_number(saved) and _is_number(now) and now > saved:
        return []
    return [f"{path or 'config'}: {_shown(saved)} → {_shown(now)}"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return value if value is _NOT_THERE else repr(value)
