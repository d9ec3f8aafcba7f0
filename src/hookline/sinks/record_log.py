"""The record log: every record of a run, a line of JSON each, written before any sink is given it.

Takes records from the fan-out, hands them to the helper process, to ``replay`` and to the report. A line is
``{"n":17,"time":…,"epoch":3,"step":119,"point":"POST_EPOCH","strategy":"random","rank":0,"metrics":{…}}``
with ``"steps"`` (of each step series) and ``"nonfinite"`` (where null stands for NaN or infinity) if there are any; a
line ``{"context": {…}, "time": …}`` says which run follows.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from hookline.errors import OptionError
from hookline.lifecycle.points import HookPoint
from hookline.sinks.line_file import LineFile
from hookline.sinks.record import Record, StepSeries
from hookline.sinks.strict_json import Clean, dumps, finite, loads, restored

__all__ = ["Context", "RecordLog", "encoded", "log_path", "number_of", "parsed", "read_log"]

_NUMBER: Final = re.compile(rb'\{"n": ?(\d+)')
_NOT_JSON: Final = (TypeError, ValueError, OverflowError, RecursionError)
_POINTS: Final = HookPoint.__members__


@dataclass(frozen=True, slots=True)
class Context:
    """Which run the records after it belong to.

    Recipe: ``[found.context for found in read_log(path) if isinstance(found, Context)]``.
    """

    context: Mapping[str, Any]
    """What ``set_run_context`` was given, as JSON has it."""
    time: float = 0.0
    """When, in seconds since 1970."""


Found: TypeAlias = Record | Context


class RecordLog:
    """Appends records to a file, each by one system call: a process that is killed loses none of them.

    Recipe::

        log = hookline.sinks.RecordLog("runs/records.jsonl")
        log.append(hookline.sinks.Record({"loss": 0.5}, epoch=0, hook_point="POST_EPOCH"))
        [found.metrics for found in hookline.sinks.read_log("runs/records.jsonl")]  # [{'loss': 0.5}]

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
        """Write a record; the same with its number."""
        number = self.number
        line, altered = encoded(record, number)
        self.number += 1  # first: Ctrl-C may leave a number out, and must not give one twice
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
        """Write which run the next records belong to; of what is no JSON, its text."""
        self._file.write(dumps({"context": Clean().mapping(context), "time": time.time()}) + b"\n")

    def state_dict(self) -> dict[str, int]:
        """How much there is: what to go back to when a run is resumed from now."""
        return {"bytes": self._file.size, "number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to that: what was written later is cut off. A log that has less is an error."""
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
        """Have everything on the disk."""
        self._file.sync()

    def is_in_place(self) -> bool:
        """Whether the file is still there under its name."""
        return self._file.is_in_place()

    def close(self) -> None:
        """Let go of the file; once or more often."""
        self._file.close()

    def _next_number(self) -> int:
        number = number_of(self._file.last())
        if number is None:  # empty, or contexts at its end
            for line in _lines(self.path, 0):
                found = number_of(line)
                number = number if found is None else found
        return 0 if number is None else number + 1

    def __repr__(self) -> str:
        return f"<RecordLog {self.path}, {self.number} records>"


# -- lines ----------------------------------------------------------------------------------------------------


def encoded(record: Record, number: int) -> tuple[bytes, list[str]]:
    """A record's line, and the names of what could not be written as it is."""
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
    is_plain = finite(metrics.values())  # of single numbers alone; else there may be series among them
    if not is_plain:
        steps = {name: value.steps for name, value in metrics.items() if type(value) is StepSeries}
        if steps:
            head["steps"] = steps
        is_plain = all(map(_is_simple, metrics.values()))
    if is_plain:
        try:
            return dumps(head) + b"\n", []
        except _NOT_JSON:
            pass
    return _encoded_with_care(head)


def _is_simple(value: Any) -> bool:
    """Whether it goes into JSON as it is, or may be tried to."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    return kind in (int, str, bool, type(None)) or (kind in (StepSeries, list) and finite(value))


def _encoded_with_care(head: dict[str, Any]) -> tuple[bytes, list[str]]:
    clean = Clean()
    metrics = clean.mapping(head["metrics"])
    rest = Clean()
    line = rest.mapping({key: value for key, value in head.items() if key != "metrics"}) | {"metrics": metrics}
    if clean.flags:
        line["nonfinite"] = clean.flags
    return dumps(line) + b"\n", clean.altered + [f"({name})" for name in rest.altered]


def number_of(line: bytes) -> int | None:
    """The number of the record in a line, without reading the rest; None of a context."""
    match = _NUMBER.match(line)
    return int(match[1]) if match else None


def parsed(line: bytes) -> Found | None:
    """What is in a line; None if it is half written, or something else."""
    try:
        found = loads(line)
        if "context" in found:
            return Context(found["context"], found.get("time") or 0.0)
        return _record(found)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _record(found: Mapping[str, Any]) -> Record:
    metrics = found["metrics"]
    for name, flag in found.get("nonfinite", {}).items():
        metrics[name] = restored(metrics[name], flag)
    for name, steps in found.get("steps", {}).items():
        metrics[name] = StepSeries(metrics[name], steps)
    point = found["point"]
    return Record(
        metrics, found["epoch"], _POINTS.get(point, point), found["step"], found["strategy"], found["rank"],
        found["time"], found["n"],
    )  # fmt: skip


# -- reading --------------------------------------------------------------------------------------------------


def read_log(path: str | Path, start: int = 0) -> Iterator[Found]:
    """Everything in a log, in order; of a run that goes on, everything so far.

    Recipe: ``for found in read_log(path): print(found)``.

    Args:
        path: The log, or the folder of a run.
        start: The number of the first record wanted. The context that it belongs to comes first.
    """
    path = log_path(path)
    context: dict[str, Any] | None = None
    for line in _lines(path, 0):
        number = number_of(line)
        if start and number is not None and number < start:
            continue
        found = parsed(line)
        if isinstance(found, Context) and start:
            context = {**(context or {}), **found.context}
        elif found is not None:
            if start:
                start = 0
                if context is not None:
                    yield Context(context)
            yield found


def log_path(path: str | Path) -> Path:
    """The log itself, given it or the folder that it is in."""
    path = Path(path)
    found = path / "records.jsonl" if path.is_dir() else path
    if not found.is_file():
        why = "the folder has no records.jsonl" if path.is_dir() else "there is no such file"
        raise OptionError(f"No record log at {path}: {why}. Give the folder of a run, or its log.")
    return found


def _lines(path: Path, offset: int) -> Iterator[bytes]:
    """The whole lines from an offset on; one without a newline is being written, or never will be."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n"):
                yield line
