"""Write and read the record log: every record of a run, one line of JSON each, before any sink receives it.

`ResilientLog` appends to a `RecordLog`; the helper process, ``replay`` and the report read it. A line is
``{"n":17,"time":…,"epoch":3,"step":119,"point":"POST_EPOCH","strategy":"random","rank":0,"metrics":{…}}``, with
``"steps"`` (of each step series) and ``"nonfinite"`` (where null replaces NaN or infinity) if there are any. A line
``{"context": {…}, "time": …}`` says which run follows. `LineFile` is also the file of the JSONL sink.
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from hookline.errors import OptionError
from hookline.files import FileLock, take_lock
from hookline.records.sink import Record, StepSeries
from hookline.records.values import JsonCleaner, all_finite, dumps, loads, restore_nonfinite
from hookline.when import HookPoint

__all__ = ["Context", "LineFile", "RecordLog", "parse_line", "read_lines", "read_log", "record_number", "size_of"]

_NUMBER: Final = re.compile(rb'\{"n": ?(\d+)')
_POINTS: Final = HookPoint.__members__
_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Context:
    """The run that the records after it belong to.

    Recipe: ``[found.context for found in read_log(path) if isinstance(found, Context)]``.
    """

    context: Mapping[str, Any]
    """The arguments of ``set_run_context``, as JSON holds them."""
    time: float = 0.0
    """When, in seconds since 1970."""


Entry: TypeAlias = Record | Context


class LineFile:
    """A file to which whole lines of JSON are appended, one system call each, and which can be cut back.

    A line survives the death of the process once it is written, and a power failure after ``sync``. A last line that a
    killed process has left half-written is cut off when the file is opened. ``alone`` locks the file for this process.
    """

    def __init__(self, path: str | Path, *, alone: bool = False) -> None:
        self._lock: FileLock | None = None
        self._file = -1
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            if alone:
                self._lock = _lock_for(self.path)
            self._file = os.open(self.path, flags, 0o666)
            self._cut_half_line()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes so far; asked of the system, as Ctrl-C may come between the writing of a line and any counting."""
        return os.fstat(self._file).st_size

    def write(self, line: bytes) -> None:
        """Append a line, which ends with its newline: wholly, or not at all and raise `OSError`."""
        done = os.write(self._file, line)
        if done != len(line):
            self._write_rest(line, done)

    def _write_rest(self, line: bytes, done: int) -> None:
        """Write what is left of a line after a full disk or a signal; take back what is written if that fails."""
        before = self.size - done
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except BaseException:
            os.ftruncate(self._file, before)
            raise

    def cut(self, size: int) -> None:
        """Drop what was written after ``size`` bytes."""
        if size < self.size:
            os.ftruncate(self._file, size)
            self._cut_half_line()

    def sync(self) -> None:
        """Write what the system holds to the disk."""
        os.fsync(self._file)

    def last(self) -> bytes:
        """Return the last line; nothing of an empty file."""
        return self._last_line(self.size)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file and release its lock. May be called more than once."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        if self._lock is not None:
            self._lock.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            self.close()
        except Exception:
            if not is_finalizing():  # then the names that closing needs may be gone, and the system closes the file
                raise

    def _cut_half_line(self) -> None:
        size = there = self.size
        while (last := self._last_line(size)) and not _is_whole(last):
            size -= len(last)
        if size < there:
            os.ftruncate(self._file, size)

    def _last_line(self, size: int) -> bytes:
        """Return the last line of the first ``size`` bytes, with its newline if it has one."""
        start, found = size, b""
        while start:
            step = min(_BLOCK, start)
            start -= step
            found = os.pread(self._file, step, start) + found
            newline = found.rfind(b"\n", 0, len(found) - 1)
            if newline >= 0:
                return found[newline + 1 :]
        return found


def _lock_for(path: Path) -> FileLock:
    """Return the lock that says that this process alone writes to ``path``."""
    if path.exists() and not path.is_file():  # a device or a pipe cannot be read back, and /dev/full has no end
        raise OptionError(f"The log is a file that is read again, and {path} is none; name another.")
    beside = path.with_name(f".{path.name}.lock")  # not the log: whoever reads and closes that would release the lock
    lock = take_lock(beside)
    if lock is None:
        gc.collect()  # a manager that was not closed and has no reference left
        lock = take_lock(beside)
    if lock is None:
        raise OptionError(
            f"{path} is being written already, here or by another process, so records would be numbered twice. Close "
            "the manager that writes it, or give this run a folder of its own."
        )
    return lock


def _is_whole(line: bytes) -> bool:
    """Return whether ``line`` is one JSON object; after a power failure there may be zeros in it."""
    try:
        return line.endswith(b"}\n") and isinstance(loads(line), dict)
    except ValueError:
        return False


def size_of(path: Path) -> int:
    """Return the bytes of a file that is not open; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class RecordLog:
    """Appends records to a file, each by one system call: a process that is killed loses none of them.

    Recipe::

        log = hookline.records.RecordLog("runs/records.jsonl")
        log.append(hookline.records.Record({"loss": 0.5}, epoch=0, hook_point="POST_EPOCH"))
        [found.metrics for found in hookline.records.read_log("runs/records.jsonl")]  # [{'loss': 0.5}]

    A line that was half written when a process died is cut off when the log is opened again; numbers go on. What JSON
    cannot hold never raises: it is written as text, and its name is in ``altered``. A full disk is an `OSError`, with
    the log as it was before. Not synced to the disk record by record: a power failure may take the last seconds.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        """Where it is."""
        self._file = LineFile(self.path, alone=True)
        self.number = self._next_number()
        """How many records there are: the number of the next one."""
        self.altered: dict[str, None] = {}
        """Names of metrics of which something was written as text, or in less precision."""

    def append(self, record: Record) -> Record:
        """Write ``record``; return the same with its number."""
        number = self.number
        line, altered = _encode(record, number)
        self.number += 1  # first: Ctrl-C may skip a number, and must not use one twice
        try:
            self._file.write(line)
        except Exception:
            self.number = number
            raise
        for name in altered:
            self.altered[name] = None
        return Record(
            record.metrics, record.epoch, record.hook_point, record.step, record.strategy, record.rank, record.time,
            number,
        )  # fmt: skip

    def append_context(self, context: Mapping[str, Any]) -> None:
        """Write which run the next records belong to; what is no JSON, as text."""
        self._file.write(dumps({"context": JsonCleaner().clean(context), "time": time.time()}) + b"\n")

    def state_dict(self) -> dict[str, int]:
        """Return how much there is, for a run that is resumed from now."""
        return {"bytes": self._file.size, "number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off what was written after ``state``; raise if the log is shorter."""
        size, number = int(state["bytes"]), int(state["number"])
        if size > self._file.size:
            self.number = max(self.number, number)
            raise OptionError(
                f"{self.path} was to be cut back to {size:,} bytes ({number:,} records), and has {self._file.size:,}: "
                "it is not the log of that run, or was shortened. The records from now on are added to it."
            )
        self._file.cut(size)
        self.number = number

    def sync(self) -> None:
        """Write everything to the disk."""
        self._file.sync()

    def is_in_place(self) -> bool:
        """Return whether the file is still there under its name."""
        return self._file.is_in_place()

    def close(self) -> None:
        """Close the file. May be called more than once."""
        self._file.close()

    def _next_number(self) -> int:
        number = record_number(self._file.last())
        if number is None:  # empty, or contexts at its end
            numbers = map(record_number, read_lines(self.path))
            number = max((found for found in numbers if found is not None), default=-1)
        return number + 1

    def __repr__(self) -> str:
        return f"<RecordLog {self.path}, {self.number} records>"


def _encode(record: Record, number: int) -> tuple[bytes, list[str]]:
    """Return the line of ``record``, and the names of what could not be written as it is."""
    metrics = record.metrics
    head: dict[str, Any] = {
        "n": number,
        "time": record.time,
        "epoch": record.epoch,
        "step": record.step,
        "point": record.point,
        "strategy": record.strategy,
        "rank": record.rank,
        "metrics": metrics,
    }
    if not (is_simple := all_finite(metrics.values())):  # else there may be series among them
        steps = {name: value.steps for name, value in metrics.items() if type(value) is StepSeries}
        if steps:
            head["steps"] = steps
        is_simple = all(map(_is_simple, metrics.values()))
    if is_simple:
        with suppress(TypeError, ValueError, OverflowError, RecursionError):  # an odd name, or more than 64 bits
            return dumps(head) + b"\n", []
    del head["metrics"]
    in_metrics, in_head = JsonCleaner(), JsonCleaner()
    line = in_head.clean(head) | {"metrics": in_metrics.clean(metrics)}
    if in_metrics.flags:
        line["nonfinite"] = in_metrics.flags
    return dumps(line) + b"\n", in_metrics.altered + [f"({name})" for name in in_head.altered]


def _is_simple(value: Any) -> bool:
    """Return whether JSON holds ``value`` as it is, but perhaps for an integer of more than 64 bits."""
    cls = type(value)
    if cls in (StepSeries, list):
        return all_finite(value)
    return math.isfinite(value) if cls is float else cls in (int, str, bool, type(None))


def record_number(line: bytes) -> int | None:
    """Return the number of the record in ``line``, without parsing the rest; None for a context."""
    match = _NUMBER.match(line)
    return int(match[1]) if match else None


def parse_line(line: bytes) -> Entry | None:
    """Return what ``line`` holds; None if it is half written, or something else."""
    try:
        found = loads(line)
        if "context" in found:
            return Context(found["context"], found.get("time") or 0.0)
        metrics = found["metrics"]
        for name, flag in found.get("nonfinite", {}).items():
            metrics[name] = restore_nonfinite(metrics[name], flag)
        for name, steps in found.get("steps", {}).items():
            metrics[name] = StepSeries(metrics[name], steps)
        point = _POINTS.get(found["point"], found["point"])
        return Record(
            metrics, found["epoch"], point, found["step"], found["strategy"], found["rank"], found["time"], found["n"],
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_log(path: str | Path, start: int = 0) -> Iterator[Entry]:
    """Yield everything in a log, in order; of a run that goes on, everything so far.

    Recipe: ``for found in read_log(path): print(found)``.

    Args:
        path: The log, or the folder of a run.
        start: The number of the first record wanted. The context that it belongs to comes first.
    """
    context: dict[str, Any] | None = None
    for line in read_lines(_log_path(path)):
        number = record_number(line)
        if start and number is not None and number < start:
            continue
        found = parse_line(line)
        if isinstance(found, Context) and start:
            context = {**(context or {}), **found.context}
        elif found is not None:
            if start:
                start = 0
                if context is not None:
                    yield Context(context)
            yield found


def _log_path(path: str | Path) -> Path:
    path = Path(path)
    found = path / "records.jsonl" if path.is_dir() else path
    if not found.is_file():
        why = "the folder has no records.jsonl" if path.is_dir() else "there is no such file"
        raise OptionError(f"No record log at {path}: {why}. Give the folder of a run, or its log.")
    return found


def read_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the whole lines from ``offset`` on; one without a newline is being written, or never will be."""
    with path.open("rb") as file:
        file.seek(offset)
        yield from (line for line in file if line.endswith(b"\n"))
