"""Choose where the checkpoints of a run are, and how often there is one.

Users make a `Checkpoints` and give it to a loop; `Saving` has it write trees and read the newest.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.checkpoint_file import write
from hookline.error_policy import warn_user
from hookline.errors import CheckpointError, ResumeError
from hookline.files import FileLock, lock_holder, take_lock
from hookline.training.experiment import whole_number

if TYPE_CHECKING:
    import os

__all__ = ["Checkpoints", "differences", "lock_folder"]

logger = logging.getLogger(__name__)

_MAY_GROW: Final = ("epochs", "steps")
"""A run may be asked to go on for longer."""
_NOT_THERE: Final = "(not there)"
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
        return self.add(steps, ".pt", lambda path: write(path, tree))

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
