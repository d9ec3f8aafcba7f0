"""Has one process at a time do a thing: a file beside it that is locked meanwhile, and goes when all is done.

Asked by the record log (one writer) and by the helper process (one deliverer).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Guard", "taken_guard"]

_FLAGS: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
_OURS: Final[dict[tuple[int, int], int]] = {}
"""Which files this process has locked, and which process that was: the system refuses locks to other processes alone,
and of a forked child it forgets them."""


class Guard:
    """A lock that is held until it is let go of."""

    def __init__(self, path: Path, file: int, key: tuple[int, int]) -> None:
        self._path, self._file, self._key = path, file, key

    def release(self) -> None:
        """Let go, and take the file away; once or more often."""
        if self._file < 0:
            return
        if _OURS.get(self._key) == os.getpid():  # a forked child has no lock: the file is its parent's
            _OURS.pop(self._key)
            # While the lock is held: whoever opened the file before sees then that its name leads elsewhere.
            with suppress(OSError):
                self._path.unlink()
        os.close(self._file)
        self._file = -1


def taken_guard(path: Path) -> Guard | None:
    """The lock of that name, if nobody has it; None if somebody has. Waits for nobody."""
    # A lock of the process, not of the open file: workers that were forked from a killed run do not hold it. To open
    # and close a file that is locked by ourselves would give the lock up, so that is asked first.
    while not _is_ours(path):
        file = os.open(path, _FLAGS, 0o666)
        if not _lock(file):
            os.close(file)
            return None
        found = os.fstat(file)
        if _leads_to(path, found):
            _OURS[_key(found)] = os.getpid()
            return Guard(path, file, _key(found))
        os.close(file)  # somebody has let go, and taken the file away, in between
    return None


def _is_ours(path: Path) -> bool:
    try:
        return _OURS.get(_key(os.stat(path))) == os.getpid()
    except FileNotFoundError:
        return False


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _lock(file: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _leads_to(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), found)
    except FileNotFoundError:
        return False
