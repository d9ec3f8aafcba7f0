"""Metrics as a table that grows to the right, and as lines of JSON."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hookline.errors import OptionError
from hookline.records.sink import Record, StepSeries
from hookline.sinks.csv_sink import CSVSink
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.when import HookPoint


def read(path: Path | None) -> list[dict[str, str]]:
    """As most people read it; a row with more cells than the header would have the key None."""
    assert path is not None
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, restval=""))


def test_a_new_column_widens_the_header_and_pads_the_rows_before(tmp_path):
    """To the letter, in the order in which metrics are first seen."""
    sink = CSVSink(tmp_path / "a.csv")
    sink.emit({"b": 1.5}, 0, HookPoint.POST_EPOCH)
    sink.emit({"a": 2}, 1, HookPoint.SNAPSHOT)
    sink.emit({"b": 3.25, "c/d": 1e-9}, 2, "POST_EPOCH")
    expected = "epoch,hook_point,b,a,c/d\n0,POST_EPOCH,1.5,,\n1,SNAPSHOT,,2,\n2,POST_EPOCH,3.25,,1e-09\n"
    assert (tmp_path / "a.csv").read_text() == expected
    sink.close()
    sink.close()
    assert (tmp_path / "a.csv").read_text() == expected
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


def test_a_row_for_each_step_if_asked_for(tmp_path):
    """Series are taken apart; what is no series stands at the step of its record."""
    sink = CSVSink(tmp_path / "a.csv", rows="step")
    sink.write(Record({"loss": StepSeries([0.5, 0.25], [3, 4]), "lr": StepSeries([1.0], [4])}, 0, "POST_STEP", step=4))
    sink.write(Record({"step": 7, "all": [1, 2]}, 0, "POST_EPOCH", step=4))
    expected = (
        "step,epoch,hook_point,loss,lr,metric/step,all\n"
        "3,0,POST_STEP,0.5,,,\n4,0,POST_STEP,0.25,1.0,,\n4,0,POST_EPOCH,,,7,1;2\n"
    )
    sink.close()
    assert (tmp_path / "a.csv").read_text() == expected
    sink.write(Record({"loss": StepSeries([0.125], [5])}, 1, "POST_STEP", step=5))
    sink.close()
    assert (tmp_path / "a.csv").read_text() == expected + "5,1,POST_STEP,0.125,,,\n"
    with pytest.raises(OptionError, match="'record' or 'step'"):
        CSVSink(tmp_path / "b.csv", rows="steps")


def test_every_kind_of_value_has_its_spelling(tmp_path):
    """Numbers by repr, tensors and arrays as numbers, text quoted where it must be, what is None empty."""
    sink = CSVSink(tmp_path / "a.csv")
    values = {
        "third": 1 / 3,
        "nan": math.nan,
        "inf": -math.inf,
        "int": 10**30,
        "bool": True,
        "none": None,
        "dict": {"x": 1.5, "y": 2, "z": {"q": 1}},
        "list": [1, 2.5, math.nan, None],
        "nested": [[1, 2], [3]],
        "empty": [],
        "series": StepSeries([0.5, 0.25], [7, 8]),
        "text": 'a,"b"\r\nc\rd',
        "numpy": np.float32(0.5),
        "array": np.arange(3),
        "tensor": torch.tensor(1.5),
        "tensors": torch.tensor([1.5, 2.0], requires_grad=True),
        "object": ValueError("odd"),
        "größe/💥": "ü",
        "half \udc80": "\udc80",
    }
    sink.emit(values, 0, "SNAPSHOT")
    (row,) = read(sink.path)
    assert float(row["third"]) == 1 / 3
    assert row | {"third": ""} == {
        "epoch": "0", "hook_point": "SNAPSHOT", "third": "", "nan": "nan", "inf": "-inf", "int": "1" + "0" * 30,
        "bool": "True", "none": "", "dict": 'x:1.5;y:2;z:{"q":1}', "list": "1;2.5;nan;", "nested": "[1,2];[3]",
        "empty": "", "series": "0.5;0.25", "text": 'a,"b"\r\nc\rd', "numpy": "0.5", "array": "0;1;2", "tensor": "1.5",
        "tensors": "1.5;2.0", "object": "odd", "größe/💥": "ü", "half \\udc80": "\\udc80",
    }  # fmt: skip


@pytest.mark.parametrize("half", [{"output_dir": "x"}, {"experiment_name": "x"}])
def test_half_a_place_is_refused_with_the_words_of_ordered_learning(half):
    with pytest.raises(OptionError, match=r"^CSVSink requires either filepath or \(output_dir \+ experiment_name\)"):
        CSVSink(**half)


def test_a_full_disk_while_the_header_is_widened_leaves_the_file_and_loses_no_row(tmp_path, monkeypatch):
    """The record comes again; so does the wider header."""
    sink = CSVSink(tmp_path / "a.csv")
    sink.emit({"a": 1}, 0, "SNAPSHOT")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("No space left")))
        with pytest.raises(OSError, match="No space"):
            sink.emit({"b": 2}, 1, "SNAPSHOT")
    assert (tmp_path / "a.csv").read_text() == "epoch,hook_point,a\n0,SNAPSHOT,1\n"
    sink.emit({"b": 2}, 1, "SNAPSHOT")
    assert (tmp_path / "a.csv").read_text() == "epoch,hook_point,a,b\n0,SNAPSHOT,1,\n1,SNAPSHOT,,2\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]


_NAMES = st.text(st.sampled_from('ab,"\n\r é'), min_size=1, max_size=4)
_VALUES = st.one_of(st.floats(allow_nan=False), st.integers(), _NAMES)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(_NAMES, _VALUES, min_size=1, max_size=4), min_size=1, max_size=12))
def test_whatever_comes_is_read_back(tmp_path, rows):
    """Names and values with separators, quotes and line ends; before and after closing."""
    sink = CSVSink(tmp_path / f"{random.random()}.csv")
    for number, row in enumerate(rows):
        sink.emit(row, number, "SNAPSHOT")
    path = sink.path
    expected = [{name: str(value) for name, value in row.items()} for row in rows]
    for _ in range(2):
        found = read(path)
        assert [{name: row[name] for name in wanted} for row, wanted in zip(found, expected, strict=True)] == expected
        sink.close()


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
