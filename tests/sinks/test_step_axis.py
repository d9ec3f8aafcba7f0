"""A run that counts steps: its records have a step and no epoch, in every sink, in the log and when it is read."""

from __future__ import annotations

import csv
import json
import urllib.request

import pytest
from helpers_loops import linear_experiment, noting

import hookline as hl


def train(*sinks, steps: int = 5, **options) -> None:
    """Five steps with three batches a pass, a snapshot at 0, 2 and 4, and an evaluation before the first step."""
    experiment = linear_experiment(3, evaluate=lambda model: {"accuracy": 0.5})
    manager = hl.HookManager(hooks=[noting("POST_STEP", "SNAPSHOT")], sinks=list(sinks), **options)
    with manager:
        hl.step_loop(experiment, steps=steps, manager=manager, snapshot_every=2)


@pytest.mark.parametrize("rows", ["record", "step"])
def test_csv_begins_with_the_step(tmp_path, rows):
    """The first record tells what is counted."""
    sink = hl.sinks.CSVSink(tmp_path / "a.csv", rows=rows)
    train(sink)
    with (tmp_path / "a.csv").open() as file:
        found = list(csv.DictReader(file))
    assert list(found[0])[:2] == ["step", "hook_point"]
    assert "epoch" not in found[0]
    steps = ["0", "0", "2", "2", "4", "4"] if rows == "record" else ["0", "0", "1", "2", "2", "3", "4", "4"]
    assert [row["step"] for row in found if row["noting/seen"]] == steps


def test_files_have_no_epoch(tmp_path):
    """JSON lines and the log have null, Parquet an empty cell; the file of step metrics too."""
    from pyarrow import parquet

    jsonl, table = hl.sinks.JSONLSink(tmp_path / "a.jsonl"), hl.sinks.ParquetSink(tmp_path / "a.parquet")
    train(jsonl, table, log=tmp_path / "records.jsonl", step_metrics_log=tmp_path / "steps.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert {line["epoch"] for line in lines} == {None}
    assert lines[-1]["step"] == 4
    columns = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert set(columns["epoch"]) == {None}
    assert max(columns["step"]) == 4
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in steps] == [(0, None), (2, None), (4, None)]
    run = hl.load_run(tmp_path)
    assert {record.epoch for record in run.records} == {None}
    assert "epoch" not in run.to_pandas()


def test_tensorboard_and_prometheus_have_no_epoch(tmp_path):
    """The steps are the axis; no curve, and no gauge, repeats them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, gauges = hl.sinks.TensorBoardSink(tmp_path / "board"), hl.sinks.PrometheusSink()
    memory = hl.sinks.MemorySink()
    train(memory)
    for one in memory.records:
        record = hl.records.Record(one.metrics, one.epoch, one.hook_point, one.step)
        board.write(record)
        gauges.write(record)
    board.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{gauges.port}/metrics", timeout=60) as answer:
        served = answer.read().decode()
    gauges.close()
    assert "hookline_step{" in served
    assert "hookline_epoch" not in served
    found = EventAccumulator(str(tmp_path / "board" / "run"))
    found.Reload()
    assert "epoch" not in found.Tags()["scalars"]
    assert [event.step for event in found.Scalars("eval/accuracy")] == [0, 2, 4]
