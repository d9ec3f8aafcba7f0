"""Append bytes to a file so that a process may die at any moment.

`LineFile` of a record log derives from `AppendFile`, and `FileSink` writes by it: both cut a file back that ends with
half of something. The record log reads ``descriptor`` and calls `AppendFile.write_rest` itself.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class AppendFile:
    """A file to which bytes are appended by one system call: all of them or none, and which can be cut back.

    What is written survives the death of the process, and a power failure after ``sync``.
    """

    def __init__(self, path: str | Path) -> None:
        self.descriptor = -1
        """The record log calls ``os.write`` with it, to save a call, and `write_rest` if that did not write all."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def size(self) -> int:
        """Bytes so far. The system is asked: a count of our own would be wrong if Ctrl-C comes after a write."""
        return os.fstat(self.descriptor).st_size

    def write(self, content: bytes | bytearray) -> None:
        """Append all of ``content``, or nothing of it and raise `OSError`."""
        done = os.write(self.descriptor, content)
        if done != len(content):
            self.write_rest(content, done)

    def write_rest(self, content: bytes | bytearray, done: int) -> None:
        """Write ``content`` from byte ``done`` on, after a write that a full disk or a signal cut short.

        If that fails, cut the file back to where it was before ``content``.
        """
        before = self.size - done
        try:
            while done < len(content):
                done += os.write(self.descriptor, content[done:])
        except BaseException:
            os.ftruncate(self.descriptor, before)
            raise

    def truncate(self, size: int) -> None:
        """Drop what was written after ``size`` bytes."""
        os.ftruncate(self.descriptor, size)

    def sync(self) -> None:
        """Write what the system holds to the disk."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file. May be called more than once."""
        file, self.descriptor = self.descriptor, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process names may be gone, and the system closes the file
            self.close()
