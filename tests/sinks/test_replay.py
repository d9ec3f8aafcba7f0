"""Feeding a sink from a log, later."""

from __future__ import annotations

import json

import pytest
from helpers_sinks import record

import hookline as hl
from hookline.errors import OptionError
from hookline.records.log import FanOut, replay
from hookline.records.sink import Record, StepSeries
from hookline.sinks.jsonl_sink import JSONLSink


@pytest.fixture
def run(tmp_path):
    """A folder with a log of two strategies."""
    with FanOut([], log=tmp_path / "run" / "records.jsonl") as fan_out:
        fan_out.set_run_context(strategy="a", run_dir=str(tmp_path / "run"))
        fan_out.write(record(0))
        fan_out.write(Record({"s": StepSeries([1.0, 2.0], [0, 1])}, 0, hl.HookPoint.POST_STEP, 1, "a"))
        fan_out.set_run_context(strategy="b")
        fan_out.write(record(2))
    return tmp_path / "run"


def test_a_sink_gets_what_it_would_have_had_in_the_run(run):
    """Records, contexts, in order; then it is closed."""

    class Closing(hl.sinks.MemorySink):
        closed = 0

        def close(self):
            self.closed += 1

    sink = Closing()
    assert replay(run, sink) == 3
    assert [one.metrics for one in sink.records] == [{"x": 0}, {"s": [1.0, 2.0]}, {"x": 2}]
    assert sink.records[1].metrics["s"].steps == [0, 1]
    assert sink.records[1].hook_point is hl.HookPoint.POST_STEP
    assert [one.context["strategy"] for one in sink.records] == ["a", "a", "b"]
    assert all(one.context["replay"] is True for one in sink.records)
    assert sink.closed == 1


def test_what_the_run_was_told_can_be_told_otherwise(run, tmp_path):
    """So that files go elsewhere."""
    replay(run, JSONLSink(), context={"run_dir": str(tmp_path / "elsewhere")})
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["a.jsonl", "b.jsonl"]
    line = json.loads((tmp_path / "elsewhere" / "b.jsonl").read_text())
    assert (line["x"], line["strategy"]) == (2, "some")
    assert [path.name for path in run.iterdir() if path.suffix == ".jsonl"] == ["records.jsonl"]


def test_what_a_sink_raises_is_raised_and_no_log_is_an_error(run, tmp_path):
    """Somebody waits for it, unlike in a run."""

    class Failing(hl.MetricSink):
        def emit(self, metrics, epoch, hook_point):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        replay(run, Failing())
    with pytest.raises(OptionError, match=r"No record log at .*Give the folder of a run, or its log\."):
        replay(tmp_path / "nowhere", hl.sinks.MemorySink())
    with pytest.raises(OptionError, match=r"replay\(\) takes a sink"):
        replay(run, hl.sinks.MemorySink)


def test_a_replay_into_the_folder_of_the_run_adds_nothing_to_its_files(run):
    """A second one neither: each has a file of its own."""
    for _ in range(2):
        replay(run, hl.sinks.JSONLSink(), context={"run_dir": run, "strategy": "a"})
        replay(run, hl.sinks.CSVSink(), context={"run_dir": run, "strategy": "a"})
    assert [len((run / name).read_text().splitlines()) for name in ("a.jsonl", "a_1.jsonl")] == [3, 3]
    assert (run / "a.csv").read_text() == (run / "a_1.csv").read_text()
