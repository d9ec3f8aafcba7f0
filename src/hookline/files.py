"""Write a file as a whole, and let one process at a time work on something.

`replace_file` writes what others may read meanwhile: pages, ``run.json``, how far each sink has read, checkpoints,
tensors of traces and exports, among others. A reader finds the old content or the new one, never half of it. That holds
while the machine runs: there is no fsync here. Who needs the file after a loss of power does that in the function it
passes as ``write``, as lifecycle/checkpoint_file.py does. A file that only grows is records/append_file.py.

`take_lock` is for a record log (records/log.py: one writer), for the helper process of the sinks (records/helper.py)
and for a run's folder of checkpoints (training/checkpoints.py, which also asks `lock_holder` whose lock it is). The
lock is a file, removed on release. The system frees the lock of a process that died. If a process closes any handle of
a locked file, the system frees that process's lock too. So a lock is a file of its own, beside what it is for, that
nobody else opens. Tests: tests/test_files.py; for locks tests/sinks/test_log.py and
tests/training/loops/test_checkpoints.py.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeAlias

_LONGEST: Final = 50
"""Characters of a file's name that its draft keeps: with process and thread, a name has at most 255 bytes."""


def replace_file(path: Path, write: str | bytes | Callable[[Path], object]) -> None:
    """Write a draft beside ``path``, and put it in the place of the file that is there.

    Recipe: ``replace_file(Path("runs/x/run.json"), json.dumps(facts))``, or, with a function that writes the draft,
    ``replace_file(path, lambda draft: save_file(tensors, draft))``.

    The folder has to be there. If writing fails, the old file stays as it is, and nothing is left beside it. A process
    that is killed meanwhile leaves its draft, a file whose name begins with a dot.

    Args:
        path: The file.
        write: What it is to hold, text as UTF-8; or a function that is called with the path of the draft.
    """
    # The process and the thread: two that write the same file at once have a draft each, and the last one wins.
    draft = path.with_name(f".{path.name[:_LONGEST]}.{os.getpid()}.{threading.get_ident()}")
    try:
        if callable(write):
            write(draft)
        else:
            draft.write_bytes(write.encode() if isinstance(write, str) else write)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


# -- locks ----------------------------------------------------------------------------------------------------

_Key: TypeAlias = tuple[int, int] | None
"""The device and number of a file, which tell files apart whatever their names; None for one that is not there."""
_OURS: Final[dict[_Key, int]] = {}
"""The files that this process has locked, each with its process number: the system refuses a lock only to other
processes, and a forked child does not inherit it."""
_TAKING: Final = threading.Lock()
"""Held while a thread asks whether this process has locked a file, and locks it."""
# A forked child has only the thread that forked: another thread could hold `_TAKING` there for ever.
os.register_at_fork(before=_TAKING.acquire, after_in_parent=_TAKING.release, after_in_child=_TAKING.release)


class FileLock:
    """A lock that is held until `release`, or until the end of a ``with`` block; the file holds our process number."""

    def __init__(self, path: Path, file: int, key: _Key) -> None:
        self._path, self._file, self._key = path, file, key

    def release(self) -> None:
        """Free the lock and remove the file; may be called again."""
        if self._file < 0:
            return
        if _OURS.get(self._key) == os.getpid():  # a forked child has no lock: the file is its parent's
            _OURS.pop(self._key)
            # While the lock is held: a process that opened the file before notices that its name leads elsewhere.
            with suppress(OSError):
                self._path.unlink()
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def take_lock(path: Path) -> FileLock | None:
    """Return the lock of the file at `path`, or None if it is held already, here or elsewhere; does not wait."""
    # A lock of the process, not of the open file: workers that were forked from a killed run do not hold it. To open
    # and close a file that we have locked would free the lock, so `_is_ours` comes first.
    with _TAKING:
        while not _is_ours(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            if not _lock(file):
                os.close(file)
                return None
            key = _key(file)
            if _key(path) == key:
                os.ftruncate(file, 0)
                os.write(file, str(os.getpid()).encode())
                _OURS[key] = os.getpid()
                return FileLock(path, file, key)
            os.close(file)  # its holder released it in between, and removed the file: try again with a new one
    return None


def lock_holder(path: Path) -> int | None:
    """Return the number of the process that holds the lock at `path`; None if the file is gone or has no number."""
    if _is_ours(path):
        return os.getpid()
    try:
        text = path.read_bytes()[:20]
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _is_ours(path: Path) -> bool:
    return _OURS.get(_key(path)) == os.getpid()


def _key(file: Path | int) -> _Key:
    """Return the key of the file of that name, or of that descriptor."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _lock(file: int) -> bool:
    """Lock an open file; return False if another process has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass  # a file system without locks
    return True
