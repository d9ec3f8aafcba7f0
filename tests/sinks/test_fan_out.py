"""The fan-out: the log first, then every sink by itself, whatever fails; and feeding a sink later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers_sinks import record

import hookline as hl
from hookline.errors import HooklineWarning, OptionError
from hookline.records import log as log_module
from hookline.records.log import FanOut, read_log, replay
from hookline.records.sink import Record, StepSeries
from hookline.sinks.jsonl_sink import JSONLSink


class Bare:
    """A sink with nothing but emit, which is no MetricSink."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def emit(self, metrics, epoch, hook_point) -> None:
        self.seen.append((metrics, epoch, hook_point))


class Wants(hl.MetricSink):
    """Takes whole records."""

    def __init__(self, log: Path) -> None:
        self.log, self.seen, self.lines = log, [], []

    def write(self, record) -> None:
        self.seen.append(record)
        self.lines.append(len(self.log.read_bytes().splitlines()))


class Away:
    """A sink with nothing but emit, which raises as long as it has something to raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.tries, self.seen = error, 0, []

    def emit(self, metrics, epoch, hook_point) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.seen.append(epoch)


def found(path: Path) -> list[int]:
    """The values of the records in a log."""
    return [one.metrics["x"] for one in read_log(path) if isinstance(one, Record)]


def test_the_log_is_written_before_any_sink_is_given_the_record(tmp_path):
    """Sinks that want more than emit get the record with its number; others metrics of their own."""
    log = tmp_path / "records.jsonl"
    bare, wants, memory = Bare(), Wants(log), hl.sinks.MemorySink()
    with FanOut([bare, wants, memory], log=log) as fan_out:
        given = record(4)
        fan_out.write(given)
        fan_out.write(record(5))
        fan_out.write(Record({}, 6, "POST_EPOCH"))
    assert wants.lines == [2, 3]  # the first line is that of the log itself
    assert wants.seen == [given, record(5)]
    assert [one.number for one in wants.seen] == [0, 1]
    assert bare.seen == [({"x": 4}, 4, "POST_EPOCH"), ({"x": 5}, 5, "POST_EPOCH")]
    assert bare.seen[0][0] is not given.metrics
    assert [(one.epoch, one.step) for one in memory.records] == [(4, 4), (5, 5)]
    assert found(log) == [4, 5]
    assert fan_out.log == log


def test_a_sink_that_fails_is_told_once_counted_and_given_the_next_record(tmp_path):
    """The log has all of them."""
    failing, bare = Away(RuntimeError("not now")), Bare()
    fan_out = FanOut([failing, bare], log=tmp_path / "records.jsonl")
    for number in range(4):
        failing.error = failing.error if number < 2 else None
        fan_out.write(record(number))
    assert failing.seen == [2, 3]
    assert len(bare.seen) == 4
    assert fan_out.errors == {"Away": 2}
    with pytest.warns(HooklineWarning, match=r"Away .*RuntimeError: not now") as caught:
        fan_out.warn_pending()
    assert len(caught) == 1
    fan_out.warn_pending()
    fan_out.close()
    assert found(tmp_path / "records.jsonl") == [0, 1, 2, 3]


FULL = """
import resource, sys
sys.path.insert(0, {here!r})
from helpers_sinks import record
from hookline.records.log import FanOut
from hookline.records.log import read_log
path = {path!r}
fan_out = FanOut([], log=path)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # as a full disk: part of a line, then none
for number in range(20):
    fan_out.write(record(number))
whole = open(path, "rb").read()
assert fan_out.errors["log"] >= 1, "the disk was not full"
assert 0 < len(whole) <= 1000 and whole.endswith(b"}}\\n"), whole
assert len(list(read_log(path))) < 20
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
fan_out.flush()
fan_out.write(record(20))
assert [found.metrics["x"] for found in read_log(path)] == list(range(21))
assert [found.number for found in read_log(path)] == list(range(21))
print("went on")
"""


def test_a_full_disk_is_no_end_and_when_there_is_room_again_nothing_is_missing(tmp_path):
    """No half line is left in the log meanwhile."""
    code = FULL.format(here=str(Path(__file__).parents[1]), path=str(tmp_path / "records.jsonl"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "went on\n", done.stderr


@pytest.fixture
def clock(monkeypatch):
    """The time that back-off goes by."""
    now = [100.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    return now


def test_a_host_that_is_gone_is_asked_ever_less_often_and_then_has_everything_in_order(clock, tmp_path):
    """A time-out for every record would hold the training up; and nobody is to miss anything for a full disk."""
    sink, other = Away(OSError("nobody there")), hl.sinks.MemorySink()
    fan_out = FanOut([sink, other], log=tmp_path / "records.jsonl")
    for number in range(100):
        fan_out.write(record(number))
        clock[0] += 0.1
    assert 4 <= sink.tries <= 7  # after 0.2, 0.4, 0.8, 1.6, 3.2 seconds, of ten
    assert len(other.records) == 100
    sink.error = None
    clock[0] += 30.0
    fan_out.write(record(100))
    fan_out.write(record(101))
    assert sink.seen == list(range(102))
    assert fan_out.errors == {"Away": sink.tries - 102}
    fan_out.close()
    with pytest.warns(HooklineWarning, match=r"Away could not take metrics \(OSError: nobody there\)") as told:
        fan_out.warn_pending()
    assert len(told) == 1


def test_records_after_the_checkpoint_do_not_reach_a_sink_when_the_run_is_resumed(clock, tmp_path):
    """They wait for a sink that was away; the resumed run makes them again, and it would have them twice."""
    sink = Away()
    fan_out = FanOut([sink], log=tmp_path / "records.jsonl")
    fan_out.write(record(0))
    state = fan_out.state_dict()
    sink.error = OSError("no route to host")
    fan_out.write(record(1))
    sink.error = None
    fan_out.load_state_dict(state)
    clock[0] += 3600
    for epoch in (1, 2):
        fan_out.write(record(epoch))
    fan_out.flush()
    assert sink.seen == [0, 1, 2]


def test_a_sink_that_is_behind_at_the_end_is_named_with_what_it_has_missed(clock, tmp_path):
    """Records of the run before come first, under their own context, when it can be written again."""
    sink = Away(OSError("full"))
    sink.set_run_context = lambda **context: sink.seen.append(context)
    fan_out = FanOut([sink], log=tmp_path / "records.jsonl")
    for number in range(2):
        fan_out.write(record(number))
    fan_out.set_run_context(strategy="b")
    fan_out.write(record(2))
    sink.error = None
    fan_out.flush()
    assert sink.seen == [0, 1, {"strategy": "b"}, 2]
    sink.error = OSError("full")
    fan_out.write(record(3))
    fan_out.close()
    with pytest.warns(HooklineWarning) as told:
        fan_out.warn_pending()
    assert "1 records" in str(told[-1].message)
    assert "hookline replay" in str(told[-1].message)


def test_without_a_log_a_sink_misses_what_it_fails_to_take_and_goes_on_with_the_next():
    """It is told and counted; the others have everything."""
    sink, memory = Away(), hl.sinks.MemorySink()
    fan_out = FanOut([sink, memory])
    for number in range(4):
        sink.error = OSError("full") if number == 1 else None
        fan_out.write(record(number))
    fan_out.close()
    with pytest.warns(HooklineWarning, match="Away could not take metrics"):
        fan_out.warn_pending()
    assert fan_out.log is None
    assert sink.seen == [0, 2, 3]
    assert [one.number for one in memory.records] == [0, 1, 2, 3]
    assert fan_out.errors == {"Away": 1}


def test_a_state_of_another_log_is_told_and_nothing_is_made_anew(tmp_path):
    """Files that the log could not make again stay as they are."""
    with FanOut([JSONLSink(tmp_path / "m.jsonl")], log=tmp_path / "records.jsonl") as fan_out:
        fan_out.write(record(0))
    fan_out = FanOut([JSONLSink(tmp_path / "m.jsonl")], log=tmp_path / "records.jsonl")
    fan_out.load_state_dict({"records": 3})
    with pytest.warns(HooklineWarning, match="not the log of that run"):
        fan_out.warn_pending()
    fan_out.write(record(3))
    fan_out.close()
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 1
    assert [one.number for one in read_log(tmp_path)] == [0, 3]
    assert FanOut([Bare()]).state_dict() == {"first": 0, "records": 0}
    fan_out.load_state_dict({})


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
