"""Write and read the record log, and hand it to sinks: every record of a run, one line of JSON each.

The manager calls `FanOut.write`, which appends to a `RecordLog` first; then each sink has it from its `Reader`, slow
ones in a process of their own. ``replay`` and the report read the log of another run. A line is
``{"n":17,"time":…,"epoch":3,"step":119,"point":"POST_EPOCH","strategy":"random","rank":0,"metrics":{…}}``, with
``"steps"`` (of each step series) if there are any. A line ``{"context": {…}, "time": …}`` says which run follows; the
first line is such a one without a run. NaN and infinity are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson

from hookline.error_policy import ErrorPolicy, error_text
from hookline.errors import HooklineWarning, MissingPackageError, OptionError
from hookline.files import FileLock, replace_file, take_lock
from hookline.messages import type_name
from hookline.records.append_file import AppendFile
from hookline.records.sink import MetricSink, Record, RunSink, StepSeries, check_sink
from hookline.when import HookPoint

if TYPE_CHECKING:
    from hookline.records.helper import HelperProcess

logger = logging.getLogger(__name__)


# -- strict JSON --------------------------------------------------------------------------------------------------

_DEEPEST: Final = 64
"""Containers nested deeper become text; orjson stops at 254."""
_LONGEST: Final = 1000
"""Characters of a text that replaces another value."""
_LARGEST: Final = 2**64
_NUMBERS: Final = frozenset({float, int, bool})
_SIMPLE: Final = _NUMBERS | {str, type(None)}
_NONFINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NONFINITE_WORDS: Final = {repr(value): word for word, value in _NONFINITE.items()}
_OPTIONS: Final = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
"""Dataclasses and dates are refused: they are written as other objects are."""

loads = orjson.loads
"""From bytes."""


def dumps(value: Any) -> bytes:
    """Return strict JSON; raise for what is none. orjson writes null for NaN: ask `is_json`, or use `cleaned`."""
    return orjson.dumps(value, option=_OPTIONS)


def is_json(values: Collection[Any]) -> bool:
    """Return whether strict JSON holds each of ``values`` as it is; False as well for all containers and odd texts."""
    # Only Python's own types are added up: tensors and arrays would run kernels, and code of their own.
    kinds = set(map(type, values))
    if not kinds <= _SIMPLE:
        return False
    if not kinds <= _NUMBERS:
        if not "".join(value for value in values if type(value) is str).isascii():
            return False
        values = [value for value in values if type(value) in _NUMBERS]
    try:
        if not math.isfinite(sum(values)):  # finite only if all are; ten times as fast as asking each
            return False
    except OverflowError:
        return False
    return int not in kinds or (min(values) >= -_LARGEST // 2 and max(values) < _LARGEST)


def json_line(value: Mapping[str, Any]) -> bytes:
    """Return a line of strict JSON, whatever ``value`` holds."""
    return dumps(cleaned(value)) + b"\n"


def cleaned(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as JSON can hold it; never raise because of what it is.

    Tensors and arrays, which are known by their ``tolist``, become numbers and lists; NaN and infinity the strings
    "NaN", "Infinity", "-Infinity"; integers of more than 64 bits the nearest float; what is unknown its text.
    """
    if value is None or isinstance(value, bool) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, str):
        return utf8_text(value)
    try:
        if isinstance(value, int) and -_LARGEST // 2 <= value < _LARGEST:
            return int(value)
        if isinstance(value, int | float):
            return _NONFINITE_WORDS.get(repr(float(value)), float(value))
        return _container(value, depth)
    except OverflowError:
        return hex(value)[:_LONGEST]  # the decimal digits of a very long number take minutes
    except Exception:  # a container of the user's own, or a tensor that cannot be read
        return utf8_text(value)[:_LONGEST]


def _container(value: Any, depth: int) -> Any:
    if type(value) in (list, StepSeries) and is_json(value):
        return value
    if depth >= _DEEPEST:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        return {utf8_text(key)[:_LONGEST]: cleaned(item, depth + 1) for key, item in value.items()}
    if callable(getattr(value, "tolist", None)):  # arrays, tensors and NumPy's numbers
        return cleaned(value.tolist(), depth + 1)
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return [cleaned(item, depth + 1) for item in value]
    return cleaned(float(value), depth) if isinstance(value, Real) else utf8_text(value)[:_LONGEST]


def _restored(value: Any) -> Any:
    """Return ``value`` with the numbers that are not finite in the place of their words."""
    if type(value) is str:
        return _NONFINITE.get(value, value)
    if type(value) is dict:
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if type(value) is list else value


def utf8_text(value: Any) -> str:
    """Return a name, or text, as UTF-8 can hold it: half a surrogate pair is escaped."""
    try:
        text = value if type(value) is str else str(value)
    except Exception:
        text = f"({type(value).__name__})"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


# -- lines --------------------------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(rb'\{"n":(\d+)')
_POINTS: Final = HookPoint.__members__
_PLACES: Final = ("run_dir", "output_dir")


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


def _encode(record: Record, number: int) -> bytes:
    """Return the line of ``record``."""
    metrics = record.metrics
    head: dict[str, Any] = {
        "n": number,
        "time": record.time,
        "epoch": record.epoch,
        "step": record.step,
        "point": record.hook_point,
        "strategy": record.strategy,
        "rank": record.rank,
        "metrics": metrics,
    }
    if is_json(metrics.values()):
        with suppress(TypeError, ValueError):  # an odd name of a metric, or of the point
            return dumps(head) + b"\n"
    head["point"] = record.point
    steps = {name: value.steps for name, value in metrics.items() if type(value) is StepSeries}
    return json_line({**head, "steps": steps} if steps else head)


def _record_number(line: bytes) -> int | None:
    """Return the number of the record in ``line``, without parsing the rest; None for a context."""
    match = _NUMBER.match(line)
    return int(match[1]) if match else None


def _parse(line: bytes) -> Entry | None:
    """Return what ``line`` holds; None if it is half written, or something else, or the first line."""
    try:
        found = loads(line)
        if "context" in found:
            return Context(found["context"], found.get("time") or 0.0) if found["context"] else None
        metrics = found["metrics"]
        if b'NaN"' in line or b'Infinity"' in line:
            metrics = _restored(metrics)
        for name, steps in found.get("steps", {}).items():
            metrics[name] = StepSeries(metrics[name], steps)
        point = _POINTS.get(found["point"], found["point"])
        return Record(
            metrics, found["epoch"], point, found["step"], found["strategy"], found["rank"], found["time"], found["n"],
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


# -- reading ------------------------------------------------------------------------------------------------------


class Log:
    """The log of a run, for reading: also while it is written, and in a folder that was moved or copied.

    Recipe: ``for entry, end in Log(path).entries(): ...``; ``entries(end)`` goes on there.
    """

    newest = size = -1
    """Where the entry begins and ends that was written last; -1 where somebody else writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        """Where it is."""
        self._home: str | None = None

    def entries(self, offset: int = 0) -> Iterator[tuple[Entry, int]]:
        """Yield everything from ``offset`` on, in order, each with the offset after it."""
        for line in self._lines(offset):
            offset += len(line)
            entry = _parse(line)
            if isinstance(entry, Context):
                entry = replace(entry, context=self._here(entry.context))
            if entry is not None:
                yield entry, offset

    def find(self, number: int) -> tuple[int, dict[str, Any]]:
        """Return the offset after the first ``number`` records, and what is known there of the run."""
        offset = end = 0
        context: dict[str, Any] = {}
        since: dict[str, Any] = {}
        is_leading = True  # contexts before the first record stay with it
        for line in self._lines(0):
            found = _record_number(line)
            if found is not None and found >= number:
                break
            offset += len(line)
            if found is None and isinstance(entry := _parse(line), Context):
                since |= self._here(entry.context)
            is_leading = is_leading and found is None
            if found is not None or is_leading:
                end, context = offset, context | since
        return end, context

    def identity(self) -> int:
        """Return what tells one log from another at its place: a checksum of the first line, which holds a time."""
        with self.path.open("rb") as file:
            return zlib.crc32(file.readline(4096))

    def kept(self, sink: str) -> dict[str, Any]:
        """Return what `keep` has written of ``sink``; nothing if that was of another log."""
        try:
            found = loads(self._position_file(sink).read_bytes())
            return dict(found) if found["log"] == self.identity() else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def keep(self, sink: str, number: int, files: Iterable[Path]) -> None:
        """Write beside the log how many records ``sink`` has for good, and which files it has made."""
        home = self.path.parent.absolute()
        absolute = [file.absolute() for file in files]
        names = [str(file.relative_to(home) if file.is_relative_to(home) else file) for file in absolute]
        kept = {"number": number, "log": self.identity(), "files": names}
        replace_file(self._position_file(sink), dumps(kept))

    def _position_file(self, sink: str) -> Path:
        return self.path.parent / f".{re.sub(r'[^A-Za-z0-9_-]+', '_', sink)}.position"

    def _lines(self, offset: int) -> Iterator[bytes]:
        """Yield the whole lines from ``offset`` on; one without a newline is being written, or never will be."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(offset)
            yield from (line for line in file if line.endswith(b"\n"))

    def _here(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``context`` with places in the folder of the log as they are now: it may have been moved."""
        if self._home is None:
            with suppress(OSError, ValueError, AttributeError):
                self._home = loads(next(self._lines(0), b"{}")).get("home")
        home = self._home or ""
        moved = {}
        for key in _PLACES:
            place = context.get(key)
            if home and isinstance(place, str) and (place == home or place.startswith(home + os.sep)):
                moved[key] = str(self.path.parent) + place[len(home) :]
        return {**context, **moved}


def read_log(path: str | Path) -> Iterator[Entry]:
    """Yield everything in a log, or in that of a run's folder, in order; of a run that goes on, everything so far.

    Recipe: ``for found in read_log(path): print(found)``.
    """
    path = Path(path)
    found = path / "records.jsonl" if path.is_dir() else path
    if not found.is_file():
        why = "the folder has no records.jsonl" if path.is_dir() else "there is no such file"
        raise OptionError(f"No record log at {path}: {why}. Give the folder of a run, or its log.")
    yield from (entry for entry, _ in Log(found).entries())


# -- writing ------------------------------------------------------------------------------------------------------


class BackOff:
    """Times to try again: soon at first, then ever later."""

    def __init__(self, first: float = 0.2, last: float = 30.0) -> None:
        self._first, self._last = first, last
        self.attempts = 0
        """How often it failed in a row."""
        self._next = 0.0

    def fail(self) -> None:
        """Note a failure: wait twice as long as before."""
        wait = min(self._first * 2.0 ** min(self.attempts, 20), self._last)
        self.attempts += 1
        self._next = time.monotonic() + wait

    def reset(self) -> None:
        """Note a success, or make the next attempt due at once."""
        self.attempts, self._next = 0, 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to try."""
        return not self._next or time.monotonic() >= self._next


class LineFile(AppendFile):
    """A file of whole lines of JSON: what a killed process has left half-written is cut off when it is opened."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        end = size = 0
        with self.path.open("rb") as file:
            for line in file:
                size += len(line)
                if line.startswith(b"{") and line.endswith(b"}\n"):  # after a power failure there may be zeros
                    end = size
        if end < size:
            self.truncate(end)


class RecordLog(Log):
    """Appends records to a file, each by one system call: a process that is killed loses none of them.

    Recipe::

        log = hookline.records.RecordLog("runs/records.jsonl")
        log.append(hookline.records.Record({"loss": 0.5}, epoch=0, hook_point="POST_EPOCH"))
        [found.metrics for found in hookline.records.read_log("runs/records.jsonl")]  # [{'loss': 0.5}]

    A line that was half written when a process died is cut off when the log is opened again; numbers go on. What JSON
    cannot hold never raises: it is written as text. On a full disk lines wait in memory, and are appended when there
    is room again. Not synced to the disk record by record: a power failure may take the last seconds.

    Args:
        path: The file; the folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.number = 0
        """How many records there are: the number of the next one."""
        self.error: Exception | None = None
        """Why lines wait in memory; None if none do."""
        self.size = self.newest = 0
        self._file: LineFile | None = None
        self._lock: FileLock | None = None
        self._waiting = bytearray()  # the end of the log, which is not in the file yet
        self._back_off = BackOff(first=0.5)
        self._open()

    def append(self, entry: Entry) -> Entry:
        """Write ``entry``, now or when there is room again; return a record with its number."""
        if self._file is None and not self._waiting:
            self.retry()  # it was closed, and others may have written it meanwhile
        if isinstance(entry, Context):
            self._add(json_line({"context": entry.context, "time": entry.time or time.time()}))
            return entry
        number = self.number
        line = _encode(entry, number)
        self.number += 1  # first: Ctrl-C may skip a number, and must not use one twice
        self._add(line)
        return _numbered(entry, number)

    def truncate(self, number: int) -> dict[str, Any]:
        """Keep the first ``number`` records, and return what they know of the run; raise if there are fewer."""
        self.retry()
        if number > self.number:
            there, self.number = self.number, number
            raise OptionError(
                f"{self.path} was to be cut back to {number:,} records, and has {there:,}: it is not the log of that "
                "run, or was shortened. The records from now on are added to it."
            )
        end, context = self.find(number)
        in_file = self.size - len(self._waiting)
        if self._file is not None and end < in_file:
            self._file.truncate(end)
        del self._waiting[max(end - in_file, 0) :]
        self.size, self.number = end, number
        return context

    def retry(self) -> None:
        """Try at once to write what waits; open the file if it was closed."""
        self._back_off.reset()
        self._write_waiting()

    def sync(self) -> None:
        """Write everything to the disk."""
        if self._waiting:
            self.retry()
        if self._file is not None:
            with suppress(OSError):  # a file system that cannot sync
                self._file.sync()

    def close(self) -> None:
        """Write what waits, and close the file; a later record opens it again. May be called more than once."""
        self.sync()
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.release()
        self._file = self._lock = None

    def __del__(self) -> None:
        if self._lock is not None:  # of a manager that was not closed
            self._lock.release()

    # -- the file, and what waits for it -------------------------------------------------------------------------

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock_for(self.path)
        try:
            file = LineFile(self.path)
            if self._waiting and file.size != self.size - len(self._waiting):
                raise FileExistsError(f"{self.path} was written by another process meanwhile")
            if not file.size and not self._waiting:
                # The time tells this log from another one; home tells places in it, should the folder be moved.
                file.write(json_line({"context": {}, "time": time.time(), "home": str(self.path.parent)}))
        except BaseException:
            lock.release()
            raise
        self._file, self._lock = file, lock
        if not self._waiting:
            self.size = self.newest = file.size
            numbers = (_record_number(line) for line in super()._lines(0))
            self.number = max(self.number, 1 + max((n for n in numbers if n is not None), default=-1))

    def _lines(self, offset: int) -> Iterator[bytes]:
        in_file = self.size - len(self._waiting)
        if offset < in_file:
            yield from super()._lines(offset)
        yield from bytes(self._waiting[max(offset - in_file, 0) :]).splitlines(keepends=True)

    def _add(self, line: bytes) -> None:
        self._waiting += line
        self.newest, self.size = self.size, self.size + len(line)
        self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._back_off.is_due:
            return
        lines = self._waiting
        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            self._waiting = bytearray()  # first: Ctrl-C may come when they are written, and none is to be there twice
            done = os.write(self._file.descriptor, lines)
            if done < len(lines):
                self._file.write_rest(lines, done)
        except (OSError, OptionError) as error:  # an OptionError if another process writes a log there by now
            self._waiting, self.error = lines, error
            self._back_off.fail()
        except BaseException:
            self.size = self.newest = self.size if self._file is None else self._file.size
            raise
        else:
            if self.error is not None:
                self.error = None
                self._back_off.reset()


class NoLog:
    """Stands for the log where there is none: numbers records, and keeps none of them."""

    path = error = None
    size = newest = 0

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def append(self, entry: Entry) -> Entry:
        """Return a record with its number."""
        if isinstance(entry, Record):
            entry = _numbered(entry, self.number)
            self.number += 1
        return entry

    def entries(self, offset: int) -> Iterator[tuple[Entry, int]]:
        """Yield nothing."""
        return iter(())

    def truncate(self, number: int) -> None:
        """Go on with ``number``."""
        self.number = number

    def sync(self) -> None:
        """Do nothing."""

    retry = close = sync


def _numbered(record: Record, number: int) -> Record:
    # Not dataclasses.replace, which takes three times as long.
    return Record(
        record.metrics, record.epoch, record.hook_point, record.step, record.strategy, record.rank, record.time, number,
    )  # fmt: skip


def _lock_for(path: Path) -> FileLock:
    """Return the lock that says that this process alone writes to ``path``."""
    beside = path.with_name(f".{path.name}.lock")  # not the log: whoever reads and closes that would release the lock
    lock = take_lock(beside)
    if lock is None:
        gc.collect()  # a manager that was not closed and has no reference left
        lock = take_lock(beside)
    if lock is None:
        raise OptionError(
            f"{path} is being written already, here or by another process, so records would be numbered twice. Close "
            "the manager that writes it, or give this run its own folder."
        )
    return lock


# -- handing over -------------------------------------------------------------------------------------------------

Failed: TypeAlias = Callable[[str, str, Exception], None]
"""Is told which sink could not do what."""


class Reader:
    """One sink, and how far it is in the log.

    An `OSError` (a full disk, a host that is gone) passes: the sink is behind, and tried again, ever later, from the
    log; without one it misses that record. Any other error would be raised again, so that record is skipped.
    """

    def __init__(self, name: str, sink: Any, log: Log | NoLog, failed: Failed) -> None:
        self.name, self.sink, self.log, self._failed = name, sink, log, failed
        self.offset = 0
        """Where in the log it is."""
        self.number = 0
        """The number of the first record that it has not taken."""
        self.kept = 0
        """The number of the first record that has not arrived for good, if that is known."""
        self.back_off = BackOff()

    def advance(self, newest: Entry | None = None, most: int = sys.maxsize, seconds: float = math.inf) -> None:
        """Hand over what follows in the log, ``most`` entries at the most; ``newest`` need not be read from it."""
        log = self.log
        if newest is not None and self.offset == log.newest:
            self.take(newest, log.size)
        elif self.back_off.is_due:
            end = time.monotonic() + seconds
            try:
                for entry, offset in log.entries(self.offset):
                    most -= 1
                    if not self.take(entry, offset) or not most or time.monotonic() > end:
                        return
            except OSError as error:
                self.fail("read the log", error)

    def take(self, entry: Entry, end: int) -> bool:
        """Give ``entry`` to the sink; return False if it has to come again."""
        if isinstance(entry, Record) and entry.number < self.number:  # it has had it: a resumed run makes it again
            self.offset = end
            return True
        # Counted first: Ctrl-C may come when the sink has it already, and nothing is to be there twice.
        before, self.offset = self.offset, end
        try:
            hand(self.sink, entry)
        except OSError as error:
            self.offset = before
            self.fail("take metrics", error)
            return False
        except Exception as error:
            self._failed(self.name, "take metrics of a record, which is skipped", error)
        if isinstance(entry, Record):
            self.number = entry.number + 1
        if self.back_off.attempts:
            self.back_off.reset()
        return True

    def call(self, method: str) -> bool:
        """Call ``flush`` or ``close`` of the sink, if it has it; return whether that has not failed."""
        try:
            getattr(self.sink, method, bool)()
        except Exception as error:
            self.fail(method, error)
            return False
        return True

    def go_to_end(self, log: RecordLog | NoLog) -> None:
        """Continue with what is added to ``log`` from now on."""
        self.log, self.offset, self.number = log, log.size, log.number
        self._begin()

    def go_to(self, number: int) -> None:
        """Continue with the record of that number, and tell the sink which run it is of."""
        assert isinstance(self.log, Log)
        self._begin()
        self.number = number
        self.offset, context = self.log.find(number)
        if context:
            hand(self.sink, Context(context))

    def restart(self, first: int = 0) -> bool:
        """Begin the sink anew, if it can be, with record ``first`` of the log; return whether it is so."""
        if isinstance(self.log, NoLog) or not getattr(self.sink, "restart", bool)():
            return False
        for file in self.log.kept(self.name).get("files", ()):
            path = self.log.path.parent / file
            with suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.kept = 0
        self.go_to(first)
        return True

    def _begin(self) -> None:
        self.back_off.reset()
        if isinstance(self.sink, RunSink):
            self.sink.keep_files = self.keep

    def keep(self) -> None:
        """Write beside the log how far the sink is, and which files it has made or is about to make."""
        if isinstance(self.log, Log) and self.log.path.exists():
            self.log.keep(self.name, self.kept, getattr(self.sink, "files", ()))

    def fail(self, what: str, error: Exception) -> None:
        """Report that the sink could not do ``what``, and wait before the next try."""
        self.back_off.fail()
        self._failed(self.name, what, error)


def hand(sink: Any, entry: Entry) -> None:
    """Give ``entry`` to ``sink``, which may be an object with ``emit`` alone."""
    if isinstance(entry, Context):
        getattr(sink, "set_run_context", dict)(**entry.context)
    elif isinstance(sink, MetricSink):
        sink.write(entry)
    else:
        sink.emit(dict(entry.metrics), entry.position, entry.hook_point)


# -- the log and all sinks --------------------------------------------------------------------------------------


class FanOut:
    """A log and several sinks, as one.

    Recipe::

        fan_out = hookline.records.FanOut([hookline.sinks.JSONLSink("metrics.jsonl")], log="records.jsonl")
        manager = hookline.HookManager(hooks=[MyHook()], sinks=fan_out)

    Args:
        sinks: Where records go; anything with ``emit(metrics, epoch, hook_point)``. Those that are ``slow`` run in a
            helper process, which begins with the first record and reads the log.
        log: The record log, or its path; None for none: then a sink misses the records that it fails to take. Slow
            sinks have one in a temporary folder. In a process group only rank 0 has a log and sinks; processes that are
            in none have each their own.
        patience: Seconds that ``close`` waits for slow sinks.
    """

    is_silent = False
    """Whether it writes nothing: this is a process of a distributed run, and not the first."""
    keep_streams: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around the calls of sinks if one is not of ours, and may draw random numbers: a manager sets it to what gives the
    run its streams back. It is not imported here, as the helper process has no torch."""

    def __init__(
        self, sinks: Iterable[Any] = (), log: str | Path | RecordLog | None = None, *, patience: float = 30.0
    ) -> None:
        if isinstance(sinks, str) or callable(getattr(sinks, "emit", None)) or not isinstance(sinks, Iterable):
            got = f"{sinks.__name__}: call it" if isinstance(sinks, type) else type_name(sinks)
            raise OptionError(f"sinks= takes a list of sinks, such as [hookline.sinks.MemorySink()]; got {got}.")
        self._errors = ErrorPolicy()
        self.pending = self._errors.pending
        """Warnings that wait for `warn_pending`."""
        self._patience = patience
        if has_ranks() and own_rank() > 0:  # rank 0 writes what all ranks have to say
            self.is_silent, log = True, None
        self._log: RecordLog | NoLog = NoLog() if log is None else _log_of_rank(log)
        self._temporary: Path | None = None  # the folder of a log for slow sinks alone
        self._streams: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._helper: HelperProcess | None = None
        self._context: dict[str, Any] = {}
        self._is_log_of_run = False
        """Whether the log is one that `open_log` opened."""
        self._first = self._log.number
        """The number of the first record of the run: a log may hold older runs."""
        self._is_resumed = False
        self._log_error: Exception | None = None
        self.sinks: list[Any] = []
        """All of them, as given; a slow one does no work here, it only describes itself to the helper process."""
        self._readers: list[Reader] = []
        self._names: Counter[str] = Counter()
        self.is_empty = log is None
        """Whether there is neither a log nor a sink; read at every firing."""
        for sink in sinks:
            self.add(sink)

    @property
    def errors(self) -> Counter[str]:
        """How often each sink has failed, by its class, and its place among those of one class; also the ``"log"``."""
        if self._helper is not None:
            self._helper.read_messages()
        return self._errors.counts

    @property
    def log(self) -> Path | None:
        """The path of the log."""
        return self._log.path

    def open_log(self, path: Path) -> None:
        """Write every record from now on to a log at ``path``, unless one was asked for when this was made.

        A log that was opened so for another run is closed, and the next record of each sink begins another file.
        """
        is_unused = self.log is None or (self._temporary is not None and not self._log.number)
        if self.is_silent or self.log == path or not (is_unused or self._is_log_of_run):
            return
        for reader in self._readers if self._is_log_of_run else ():
            if isinstance(reader.sink, RunSink):
                reader.call("end_run")
                reader.sink.files.clear()
        self._log.close()
        log = _log_of_rank(path)
        self._first = log.number
        self._use(log)
        self._is_log_of_run, self.is_empty = True, False

    def release_log(self) -> None:
        """Let others write the file of the log; the next record opens it again, and sinks get what they have added."""
        self._log.close()

    def add(self, sink: Any) -> None:
        """Add a sink; it receives the records from now on."""
        check_sink(sink, "sinks= takes objects")
        cls = type(sink).__name__
        self._names[cls] += 1
        name = cls if self._names[cls] == 1 else f"{cls} {self._names[cls]}"
        self.sinks.append(sink)
        if self.is_silent:
            return
        self.is_empty = False
        if getattr(sink, "slow", False):
            self._add_slow(sink, name)
            return
        if not type(sink).__module__.startswith("hookline."):  # ours draw no random numbers, which a test of each holds
            self._streams = lambda: self.keep_streams()
        reader = Reader(name, sink, self._log, self._note_failure)
        reader.go_to_end(self._log)
        self._readers.append(reader)

    def write(self, record: Record) -> None:
        """Hand ``record`` to the log and to every sink, unless it is empty."""
        if record.metrics:
            self._put(record)
            if self._helper is not None:
                self._helper.keep_running()

    def set_run_context(self, context: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Tell the log and every sink which run follows."""
        told = cleaned({**(context or {}), **more})
        if self._is_resumed and told.items() <= self._context.items():
            return  # the log knows: the run goes on
        self._context |= told
        self._put(Context({**(context or {}), **more}))

    def _put(self, entry: Entry) -> None:
        self._is_resumed = False
        if self._helper is not None and isinstance(self._log, NoLog):  # it was closed, and is used again
            self._use_temporary_log()
        log = self._log
        entry = log.append(entry)
        if log.error is not None:
            self._note_log()
        with self._streams():
            for reader in self._readers:
                reader.advance(entry)

    def flush(self) -> None:
        """Write everything: the log to the disk, and what sinks hold back. Slow sinks follow by themselves."""
        self._log.sync()
        self._note_log()
        with self._streams():
            for reader in self._readers:
                if reader.offset != self._log.size:
                    reader.back_off.reset()
                    reader.advance()
                reader.call("flush")

    def close(self) -> None:
        """Flush, wait for slow sinks, and close files and processes. May be called more than once."""
        self.flush()
        with self._streams():
            for reader in self._readers:
                if reader.offset != self._log.size and reader.number < self._log.number:
                    self._note_behind(reader)
                reader.call("close")
        self.release_log()
        if self._log.error is not None:
            self._errors.warn_later("lost", f"The last records could not be written to {self.log}, and are lost.")
        # Slow sinks come last: a user who interrupts the wait for them has everything else closed.
        if self._helper is not None and isinstance(self._log, RecordLog):
            has_all = self._helper.close(self._log.number)
            if has_all and self._temporary is not None:
                self._use(NoLog(self._log.number))

    def state_dict(self) -> dict[str, Any]:
        """Return which records of the log are of the run so far, for a run that is resumed from now."""
        return {"first": self._first, "records": self._log.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop the records after ``state`` from the log, and have the sinks read the run again from its beginning.

        Those that cannot begin anew, as what they have written is elsewhere, go on where they are.
        """
        if self.is_silent or "records" not in state:
            return
        if self._helper is not None:
            self._helper.end_all()
        told = self._context
        try:
            self._first = int(state.get("first", 0))
            known = self._log.truncate(int(state["records"]))
        except (OSError, OptionError) as error:
            self._errors.warn_later(f"load {error}", str(error))
            for reader in self._readers:
                reader.go_to_end(self._log)
            return
        self._is_resumed, self._context = True, told if known is None else known
        with self._streams():
            for reader in self._readers:
                self._restart(reader, is_told=bool(told))
        if told:
            self.set_run_context(told)

    def _restart(self, reader: Reader, *, is_told: bool) -> None:
        """Have a sink read the run again; or, if it cannot, go on, knowing which run it is."""
        reader.go_to_end(self._log)
        try:
            if reader.restart(self._first):
                reader.advance()
                return
            if isinstance(self._log, NoLog):
                getattr(reader.sink, "drop_records_from", id)(self._log.number)
            if self._context and not is_told:
                reader.take(Context(self._context), self._log.size)
        except Exception as error:
            self._note_failure(reader.name, "begin anew", error)

    def warn_pending(self) -> None:
        """Issue the warnings that were collected; a warning may raise, so the manager calls this last."""
        if self._errors.pending:
            self._errors.warn_pending()

    def __enter__(self) -> FanOut:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        self.close()
        # Where warnings are errors, the user has to see what ended the block.
        with nullcontext() if error_class is None else suppress(HooklineWarning):
            self.warn_pending()

    # -- the log, the helper process -----------------------------------------------------------------------------

    def _use(self, log: RecordLog | NoLog) -> None:
        """Go on with ``log``: it learns which run this is, and all readers continue at its end."""
        self._log, temporary, self._temporary = log, self._temporary, None
        if isinstance(log, RecordLog):
            if self._context:
                log.append(Context(self._context))
            if self._helper is not None:
                self._helper.read(Log(log.path))  # when all of the log before is delivered
        for reader in self._readers:
            reader.go_to_end(log)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    def _use_temporary_log(self) -> None:
        """Go on with a log in a temporary folder: slow sinks read one, and no other was asked for."""
        folder = Path(tempfile.mkdtemp(prefix="hookline-"))
        log = RecordLog(folder / "records.jsonl")
        log.number = self._log.number
        self._use(log)
        self._temporary = folder

    def _add_slow(self, sink: Any, name: str) -> None:
        """Add a slow sink to the helper process."""
        from hookline.records.helper import HelperProcess, sink_recipe  # which reads the log by a `Reader`

        recipe = sink_recipe(sink, name)
        if isinstance(self._log, NoLog):
            self._use_temporary_log()
        if self._helper is None:
            assert isinstance(self._log, RecordLog)
            self._helper = HelperProcess(Log(self._log.path), self._errors, self._patience)
        self._helper.add(recipe)

    # -- failures ------------------------------------------------------------------------------------------------

    def _note_log(self) -> None:
        error = self._log.error
        if error is not None and error is not self._log_error:
            self._errors.count("log", error)
            self._errors.warn_later(
                "log",
                f"THE RECORD LOG {self.log} CANNOT BE WRITTEN ({error}); the run and its sinks continue. Records are "
                "kept in memory and written as soon as that works. Make room, or give a folder that can be written.",
            )
        self._log_error = error

    def _note_behind(self, reader: Reader) -> None:
        where = "the log has them: hookline replay" if self._temporary is None else "there is no log"
        lost = self._log.number - reader.number
        self._errors.warn_later(f"lost {reader.name}", f"{reader.name} could not take {lost:,} records; {where}.")

    def _note_failure(self, name: str, what: str, error: Exception) -> None:
        self._errors.count(name, error)
        is_new = self._errors.warn_later(name, failure_text(name, what, error_text(error)))
        if is_new:
            # For a full disk or a missing package the sentence is enough; a mistake in a sink needs its traceback.
            is_clear = isinstance(error, OSError | OptionError | MissingPackageError)
            level = logging.INFO if is_clear else logging.ERROR
            logger.log(level, "%s could not %s; the run continues", name, what, exc_info=error)


def failure_text(name: str, what: str, why: str) -> str:
    """Return the sentence that says that the sink ``name`` could not do something."""
    return (
        f"{name} could not {what} ({why}); the run and the other sinks continue. Further failures are counted in "
        "manager.fan_out.errors."
    )


def replay(run: str | Path, sink: Any, *, context: Mapping[str, Any] | None = None) -> int:
    """Give ``sink`` everything that is in a log, in order, then close it; return how many records there were.

    Recipe: ``hookline.records.replay("runs/parity/default", hookline.sinks.TensorBoardSink("events"))``.

    The sink runs in this process, and what it raises is raised. Its context has ``replay=True`` besides.

    Args:
        run: The folder of a run, or its log.
        sink: Anything with ``emit(metrics, epoch, hook_point)``.
        context: Replaces parts of the run's context: ``{"run_dir": elsewhere}``.
    """
    check_sink(sink, "replay() takes a sink, an object")
    own_context = {"replay": True, **(context or {})}  # some sinks would continue the run itself otherwise
    hand(sink, Context(own_context))
    count = 0
    for entry in read_log(run):
        hand(sink, entry if isinstance(entry, Record) else Context({**entry.context, **own_context}))
        count += isinstance(entry, Record)
    for method in ("flush", "close"):
        getattr(sink, method, bool)()
    return count


# -- ranks --------------------------------------------------------------------------------------------------------


def _log_of_rank(log: str | Path | RecordLog) -> RecordLog:
    """Return the log of this process of a distributed run: ``records.rank1.jsonl``."""
    if isinstance(log, RecordLog):
        return log
    path, rank = Path(log), own_rank()
    return RecordLog(path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path)


def own_rank() -> int:
    """Return which process of a distributed run this is, as torch or ``torchrun`` says; 0 without either."""
    if has_ranks():
        return int(sys.modules["torch.distributed"].get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def has_ranks() -> bool:
    """Return whether this is one of several processes that can reach each other, so that one writes for all.

    torch is not imported for it: a process that has not imported torch is in no group.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_in_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return bool(is_in_group and distributed.get_world_size() > 1)
