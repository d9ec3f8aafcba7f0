"""Rows about sinks of this process: a CSV file whose columns come one by one, and what a record costs.

Takes made-up metrics, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from measure import Row, Samples, Trial, interleave, ratios, spread, trial, typical
from subject import Setting

from hookline.records import MetricSink, Record
from hookline.sinks import CSVSink, ParquetSink, PrometheusSink

__all__ = ["csv_columns"]

COLUMNS = 1000
FEW = 10
"""Values of a row."""


def csv_columns(setting: Setting) -> Iterator[Row]:
    """A thousand new columns spread over the rows against the same rows with all columns known; then single records."""
    count = 10_000 if setting.quick else 100_000
    trials = [_growing(count), _known(count, "known"), _known(count, "known again")]
    samples = interleave(trials, 3 if not setting.quick else 5)
    yield Row(
        f"CSV, {COLUMNS:,} new columns over {count:,} rows",
        "rows whose columns appear one by one, file closed",
        "the same rows, all columns known from the first",
        "no model",
        spread(ratios(samples, "growing", "known")),
        spread(ratios(samples, "known again", "known")),
        f"{_each(samples, 'growing', count)} a row, {_each(samples, 'known', count)} with columns known",
        at_most=3.0,
    )
    yield from _records(setting)


def _each(samples: Samples, name: str, count: int) -> str:
    return f"{typical(samples, name) / count * 1e6:.1f} µs"


def _growing(count: int) -> Trial:
    return lambda: {"growing": _written(count, {})}


def _known(count: int, name: str) -> Trial:
    return lambda: {name: _written(count, {f"metric/{column}": 0.5 for column in range(COLUMNS)})}


def _written(count: int, first: Mapping[str, float]) -> float:
    """Seconds of this thread for all rows; making them is in both figures alike."""
    folder = Path(tempfile.mkdtemp(prefix="hookline-"))
    sink = CSVSink(folder / "metrics.csv")
    sink.emit(first, 0, "POST_EPOCH")
    gap = count // COLUMNS
    start = time.thread_time()
    for number in range(count):
        there = number // gap + 1
        row = {f"metric/{(number * 7 + value) % there}": number * 0.37 for value in range(FEW)}
        row[f"metric/{there - 1}"] = 1.0
        sink.emit(row, number, "POST_EPOCH")
    sink.close()
    seconds = time.thread_time() - start
    shutil.rmtree(folder)
    return seconds


def _records(setting: Setting) -> Iterator[Row]:
    """A record of 50 numbers, in the training thread."""
    folder = Path(tempfile.mkdtemp(prefix="hookline-"))
    metrics = {f"hook/metric_{number}": number * 0.37 for number in range(50)}
    record = Record(metrics, 3, "POST_STEP", 119, "random", 0, 1.0)
    sinks: dict[str, MetricSink] = {
        "CSVSink": CSVSink(folder / "metrics.csv"),
        "ParquetSink": ParquetSink(folder / "metrics.parquet"),
        "PrometheusSink": PrometheusSink(),
    }
    calls: dict[str, Callable[[], object]] = {name: _writing(sink, record) for name, sink in sinks.items()}
    calls["CSVSink again"] = calls["CSVSink"]
    samples = interleave([trial(name, call, inner=5, batch=100) for name, call in calls.items()], setting.rounds(40))
    for name, sink in sinks.items():
        sink.close()
        yield Row(
            f"{name}, a record of 50 numbers (µs)",
            "write(record)",
            "1 µs",
            "no model",
            spread([seconds * 1e6 for seconds in samples[name]]),
            spread(ratios(samples, "CSVSink again", "CSVSink")),
            f"{typical(samples, name) * 1e6:.1f} µs",
        )
    shutil.rmtree(folder)


def _writing(sink: MetricSink, record: Record) -> Callable[[], object]:
    return lambda: sink.write(record)
