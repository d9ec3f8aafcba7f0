"""One run to a folder.

Held by a loop for as long as it writes checkpoints there. The system takes the lock of a process that died; where it
has no such locks, the number of the process is looked up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Self

from hookline.errors import CheckpointError, ResumeError

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderLock"]

_HELD: Final[set[Path]] = set()
"""Folders that this process works in: the system's locks are between processes."""


class FolderLock:
    """A file ``lock`` with the number of the process that holds it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._path = self._folder / "lock"
        self._file: Any = None

    def __enter__(self) -> Self:
        if self._folder in _HELD:
            raise self._taken(os.getpid())
        # A lock of this kind is not shared with processes that are forked: a worker that outlives a killed run does
        # not hold it.
        try:
            self._file = self._path.open("a+", encoding="ascii")
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints are to go to {self._folder}, and nothing can be written there ({error}). Next: give "
                "another folder."
            ) from error
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        _HELD.add(self._folder)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _HELD.discard(self._folder)
        self._file.truncate(0)
        self._file.close()

    def _lock(self) -> None:
        holder = self._holder()
        if fcntl is None:  # pragma: no cover
            if holder is not None and _is_alive(holder):
                raise self._taken(holder)
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._taken(holder) from error

    def _holder(self) -> int | None:
        self._file.seek(0)
        text = self._file.read(20)
        return int(text) if text.isdigit() else None

    def _taken(self, holder: int | None) -> ResumeError:
        who = "another process" if holder is None else f"process {holder}"
        return ResumeError(
            f"{self._folder} is in use: {who} writes its checkpoints there. Next: wait for it, end it, or give another "
            "folder."
        )


def _is_alive(process: int) -> bool:  # pragma: no cover
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
