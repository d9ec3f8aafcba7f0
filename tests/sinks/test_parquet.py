"""Metrics as a long table in Parquet files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet

from hookline.records.sink import Record, StepSeries
from hookline.sinks import parquet_sink as module
from hookline.sinks.parquet_sink import ParquetSink
from hookline.when import HookPoint


def read(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return parquet.read_table(path).to_pylist()


def values(path: Path | None) -> list[tuple[str, Any, int]]:
    return [(row["name"], row["value"] if row["text"] is None else row["text"], row["step"]) for row in read(path)]


def test_every_value_is_a_row_with_its_moment(tmp_path):
    """Step metrics have the step of each value, the rest that of the record."""
    sink = ParquetSink(tmp_path / "a.parquet")
    series = {"train/loss": StepSeries([0.5, 0.25], [8, 9]), "train/mixed": StepSeries([1, None], [8, 9])}
    sink.write(Record(series, 3, HookPoint.POST_STEP, 9, "random", 1, 12.5))
    sink.write(Record({"eval/accuracy": 0.75}, 3, HookPoint.POST_EPOCH, 9, "random", 1, 13.5))
    sink.close()
    same = {"text": None, "epoch": 3, "strategy": "random", "rank": 1}
    steps = {"point": "POST_STEP", "time": 12.5}
    assert read(tmp_path / "a.parquet") == [
        {"name": "train/loss", "value": 0.5, "step": 8} | same | steps,
        {"name": "train/loss", "value": 0.25, "step": 9} | same | steps,
        {"name": "train/mixed", "value": 1.0, "step": 8} | same | steps,
        {"name": "train/mixed", "value": None, "step": 9} | same | steps,
        {"name": "eval/accuracy", "value": 0.75, "step": 9, "point": "POST_EPOCH", "time": 13.5} | same,
    ]
    assert parquet.read_table(tmp_path / "a.parquet").column_names == [
        "name", "value", "text", "step", "epoch", "point", "strategy", "rank", "time",
    ]  # fmt: skip


def test_every_kind_of_value_has_its_place(tmp_path):
    """Numbers in one column, text and lists in the other, dictionaries a row per key."""
    sink = ParquetSink(tmp_path / "a.parquet")
    metrics = {
        "epoch": 4, "bool": True, "inf": -math.inf, "none": None, "text": "ü \udc80", "list": [1, math.nan, [2]],
        "dict": {"x": 1, "y": {"z": "deep"}}, "huge": 10**400, "exact": 2**53 + 1, "array": np.arange(2),
        "número 💥": np.float32(0.5),
    }  # fmt: skip
    sink.emit(metrics, 2, "SNAPSHOT")
    sink.emit({"nan": math.nan}, 2, "SNAPSHOT")
    sink.flush()
    found = {name: (value, step) for name, value, step in values(sink.path)}
    assert math.isnan(found.pop("nan")[0])
    assert found.pop("huge") == (hex(10**400), 2)
    assert found == {
        "epoch": (4.0, 2), "bool": (1.0, 2), "inf": (-math.inf, 2), "none": (None, 2), "text": ("ü \\udc80", 2),
        "list": ('[1,"NaN",[2]]', 2), "dict/x": (1.0, 2), "dict/y/z": ("deep", 2), "exact": (hex(2**53 + 1), 2),
        "array": ("[0,1]", 2), "número 💥": (0.5, 2),
    }  # fmt: skip


def test_files_are_full_or_last(tmp_path, monkeypatch):
    """However often the sink is flushed, there are not more files than rows ask for."""
    monkeypatch.setattr(module, "_PART", 10)
    sink = ParquetSink(tmp_path / "a.parquet")
    for number in range(25):
        sink.emit({"a": number}, number, "SNAPSHOT")
        if number % 3 == 0:
            sink.flush()
    sink.close()
    sink.close()
    *full, last = [parquet.read_metadata(file).num_rows for file in sorted((tmp_path / "a.parquet").iterdir())]
    assert len(full) == 2
    assert all(10 <= count < 20 for count in full)
    assert last < 10
    assert values(tmp_path / "a.parquet") == [("a", float(number), number) for number in range(25)]
