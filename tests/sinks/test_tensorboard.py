"""Metrics as TensorBoard's event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hookline.records.sink import Record, StepSeries
from hookline.sinks.tensorboard_sink import TensorBoardSink
from hookline.when import HookPoint


def load(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = load(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_steps_and_epochs_share_an_axis(tmp_path):
    """Step metrics a point each, epoch metrics at the global step, the epoch and the time of the record beside."""
    sink = TensorBoardSink()
    sink.set_run_context(strategy="random", run_dir=tmp_path)
    for epoch in range(2):
        steps = [3 * epoch, 3 * epoch + 1, 3 * epoch + 2]
        losses = {"train/loss": StepSeries([step * 0.5 for step in steps], steps)}
        sink.write(Record(losses, epoch, HookPoint.POST_STEP, steps[-1], "random", 0, 100.0 + epoch))
        sink.write(Record({"eval/accuracy": 0.25}, epoch, HookPoint.POST_EPOCH, steps[-1], "random", 0, 100.5 + epoch))
    sink.write(Record({"by_steps": 1.0}, None, HookPoint.SNAPSHOT, 6, "random", 0, 102.0))
    sink.close()
    sink.close()
    assert scalars(tmp_path / "tensorboard") == {
        "by_steps": [(6, 1.0)],  # of a run that counts steps there is no epoch
        "train/loss": [(step, step * 0.5) for step in range(6)],
        "eval/accuracy": [(2, 0.25), (5, 0.25)],
        "epoch": [(2, 0.0), (5, 1.0)],
    }
    assert [e.wall_time for e in load(tmp_path / "tensorboard").Scalars("eval/accuracy")] == [100.5, 101.5]


def test_every_kind_of_value_has_its_form(tmp_path):
    """Lists as histograms with a mean, text as text, None as nothing, and numbers beyond single precision."""
    sink = TensorBoardSink(tmp_path)
    numbers = [0.0, 1.0, 1.0, 4.0, math.nan, math.inf]
    metrics = {
        "list": numbers[:4], "holes": numbers, "nothing": [math.nan], "nested": [[1, 2], [3]], "empty": [],
        "text": "größe \udc80", "mixed": [1, "x"], "none": None, "dict": {"x": {"y": 1}}, "bool": True, "epoch": 9,
        "nan": math.nan, "huge": 1e300, "huger": -(10**400), "array": np.ones(3), "größe/💥": 0.5, "long": "x" * 20_000,
    }  # fmt: skip
    sink.emit(metrics, 3, "SNAPSHOT")
    sink.flush()
    found = load(tmp_path / "run")
    values = {tag: found.Scalars(tag)[0].value for tag in found.Tags()["scalars"]}
    assert math.isnan(values.pop("nan"))
    assert math.isnan(values.pop("nothing_mean"))
    assert math.isnan(values.pop("holes_mean"))
    assert values == {
        "list_mean": 1.5, "nested_mean": 2.0, "dict/x/y": 1.0, "bool": 1.0, "metric/epoch": 9.0, "huge": math.inf,
        "huger": -math.inf, "array_mean": 1.0, "größe/💥": 0.5, "epoch": 3.0,
    }  # fmt: skip
    assert sorted(found.Tags()["histograms"]) == ["array", "holes", "list", "nested"]
    for tag in ("list", "holes"):
        histogram = found.Histograms(tag)[0].histogram_value
        assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0.0, 4.0, 4.0, 6.0)
        assert sum(histogram.bucket) == 4
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    long = texts.pop("long")
    assert len(long) < 10_100
    assert long.endswith("(20,000 characters)")
    assert texts == {"text": "größe \\udc80", "mixed": '[1,"x"]', "empty": "[]"}
    assert found.SummaryMetadata("text").plugin_data.plugin_name == "text"
    sink.close()
