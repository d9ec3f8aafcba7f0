"""Sinks that tests give to the helper process, which makes them anew from ``options()``; no torch in here."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from hookline.records.sink import MetricSink, Record

__all__ = ["Slow", "delivered", "record", "rows"]


class Slow(MetricSink):
    """Appends what it is given to a file, a line each.

    Fails as long as ``{path}.down`` exists.
    """

    slow = True

    def __init__(self, path: str, delay: float = 0.0) -> None:
        self.path, self.delay = path, delay

    def options(self) -> dict[str, Any]:
        return {"path": str(self.path), "delay": self.delay}

    def write(self, record: Record) -> None:
        down = Path(f"{self.path}.down")
        if down.exists():
            with Path(f"{self.path}.tries").open("a") as tries:
                tries.write("x")
            raise OSError("nobody there")
        time.sleep(self.delay)
        self._line({"n": record.number, **record.metrics, "point": record.point})

    def set_run_context(self, **context: Any) -> None:
        self._line({"context": context})

    def close(self) -> None:
        self._line({"closed": os.getpid(), "torch": "torch" in sys.modules})

    def _line(self, line: dict[str, Any]) -> None:
        print("this goes to the file of the helper process")
        with Path(self.path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def delivered(path: Path) -> list[Any]:
    """The lines that a `Slow` has written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(number: int, **metrics: Any) -> Record:
    """A record that can be told from others."""
    return Record(metrics or {"x": number}, number, "POST_EPOCH", number, "some", 0, 1000.0 + number)


def rows(path: Path) -> list[float]:
    """The values of the metric x in a file of a sink, in order."""
    if path.suffix == ".csv":
        return [float(row["x"]) for row in csv.DictReader(path.read_text().splitlines())]
    if path.suffix == ".jsonl":
        return [json.loads(line)["x"] for line in path.read_text().splitlines()]
    from pyarrow import parquet  # 0.2 s, which most users of this file need not wait for

    return parquet.read_table(path).column("value").to_pylist()
