"""A file of lines that grows, a line per system call, and can be cut back.

Takes bytes from the record log and the JSONL sink. What was handed to the system survives the death of the process;
it is on the disk after ``sync``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hookline.errors import OptionError
from hookline.file_lock import FileLock, take_lock
from hookline.sinks.strict_json import loads

__all__ = ["LineFile", "last_line", "size_of"]

_BLOCK: Final = 1 << 16


class LineFile:
    """Appends lines; a last line that a killed process has left half-written is cut off when it is opened."""

    def __init__(self, path: str | Path, *, alone: bool = False) -> None:
        self._lock: FileLock | None = None
        self._file = -1
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            if alone:
                _check_regular(self.path)
                self._lock = _locked(self.path)
            self._file = os.open(self.path, flags, 0o666)
            self._mend()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes so far; asked of the system, as Ctrl-C may come between the writing of a line and any counting."""
        return os.fstat(self._file).st_size

    def write(self, line: bytes) -> None:
        """Append a line, which ends with its newline: wholly, or not at all and an `OSError`."""
        done = os.write(self._file, line)
        if done != len(line):
            self._write_rest(line, done)

    def _write_rest(self, line: bytes, done: int) -> None:
        """The disk is full, or a signal came in between."""
        before = self.size - done
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except BaseException:
            os.ftruncate(self._file, before)
            raise

    def cut(self, size: int) -> None:
        """Drop what was written after that many bytes; more than there are is all of them."""
        if size < self.size:
            os.ftruncate(self._file, size)
            self._mend()

    def sync(self) -> None:
        """Have the system write what it holds to the disk."""
        os.fsync(self._file)

    def last(self) -> bytes:
        """The last line; nothing of an empty file."""
        return last_line(self._file, self.size)

    def is_in_place(self) -> bool:
        """Whether the file is still what its path leads to."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the file; once or more often."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        if self._lock is not None:
            self._lock.release()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            self.close()
        except Exception:
            if not is_ending():  # then the names that closing needs may be gone, and the system closes the file
                raise

    def _mend(self) -> None:
        size = there = self.size
        while (last := last_line(self._file, size)) and not _is_whole(last):
            size -= len(last)
        if size < there:
            os.ftruncate(self._file, size)


def _check_regular(path: Path) -> None:
    """A device or a pipe cannot be read back, and ``/dev/full`` has no end."""
    if path.exists() and not path.is_file():
        raise OptionError(f"The log is a file that is read again, and {path} is none; name another.")


def _locked(path: Path) -> FileLock:
    """Says that this process alone writes to the path."""
    # A file beside it: whoever reads the log and closes it does not give the lock up.
    beside = path.with_name(f".{path.name}.lock")
    lock = take_lock(beside)
    if lock is None:
        gc.collect()  # a manager that was not closed and that nobody has any more
        lock = take_lock(beside)
    if lock is None:
        raise OptionError(
            f"{path} is being written already, here or by another process, so records would be numbered twice. Close "
            "the manager that writes it, or give this run a folder of its own."
        )
    return lock


def _is_whole(line: bytes) -> bool:
    """Every line of ours is one JSON object; after a power failure there may also be zeros in it."""
    if not line.endswith(b"}\n"):
        return False
    try:
        return isinstance(loads(line), dict)
    except ValueError:
        return False


def size_of(path: Path) -> int:
    """The bytes of a file that is not open; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_line(file: int, size: int) -> bytes:
    """The last line of the first ``size`` bytes, with its newline if it has one."""
    start, found = size, b""
    while start:
        step = min(_BLOCK, start)
        start -= step
        found = os.pread(file, step, start) + found
        newline = found.rfind(b"\n", 0, len(found) - 1)
        if newline >= 0:
            return found[newline + 1 :]
    return found
