"""Metrics as lines of JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hookline.errors import OptionError
from hookline.records.sink import Record, StepSeries
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.when import HookPoint


def lines(path: Path):
    """What is in every line; NaN and the like are an error."""
    wrong = lambda word: pytest.fail(f"{word} is no JSON")  # noqa: E731
    return [json.loads(line, parse_constant=wrong) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_per_emit_is_there_at_once(tmp_path):
    """OrderedLearning's keys first, then the metrics; nothing for no metrics."""
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.emit({"loss": 0.5, "größe": 1}, 3, HookPoint.POST_EPOCH)
    assert list(lines(path)[0].items()) == [
        ("epoch", 3), ("hook_point", "POST_EPOCH"), ("step", 3), ("strategy", None), ("loss", 0.5), ("größe", 1),
    ]  # fmt: skip
    sink.emit({}, 4, "SNAPSHOT")
    sink.write(Record({"loss": 0.25}, 4, "SNAPSHOT", 40, "random"))
    assert lines(path)[1:] == [{"epoch": 4, "hook_point": "SNAPSHOT", "step": 40, "strategy": "random", "loss": 0.25}]
    sink.close()
    sink.close()


def test_a_metric_with_the_name_of_another_key_has_a_spelling_of_its_own(tmp_path):
    """What the line says of the record is not overwritten."""
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    metrics = {"epoch": math.inf, "hook_point": 1, "step": StepSeries([5], [6]), "loss": 1}
    sink.emit(metrics, 2, "POST_EPOCH")
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["epoch"], line["hook_point"], line["metric/hook_point"]) == (2, "POST_EPOCH", 1)
    assert line["metric/epoch"] == "Infinity"
    assert line["metric/step"] == [5]
    assert line["steps"] == {"metric/step": [6]}


def test_the_metrics_of_steps_alone_if_asked_for(tmp_path):
    """As ``step_metrics_log`` of a manager does."""
    sink = JSONLSink(tmp_path / "steps.jsonl", points="step")
    for point in (HookPoint.POST_STEP, HookPoint.POST_EPOCH):
        sink.write(Record({"a": 1}, 0, point))
    assert [line["hook_point"] for line in lines(tmp_path / "steps.jsonl")] == ["POST_STEP"]
    with pytest.raises(OptionError, match="'all' or 'step'"):
        JSONLSink(points="steps")
