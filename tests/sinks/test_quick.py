"""Sinks of this process that fail: what passes is tried again, later and later; what does not is passed over."""

from __future__ import annotations

import logging

import pytest
from helpers_sinks import record

import hookline as hl
from hookline.errors import HooklineWarning
from hookline.sinks import fan_out as fan_out_module
from hookline.sinks import resilient_log as keeper
from hookline.sinks.fan_out import FanOut
from hookline.sinks.record_log import read_log


class Away:
    """Raises as long as it has something to raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.tries, self.seen = error, 0, []

    def emit(self, metrics, epoch, hook_point) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.seen.append(epoch)


@pytest.fixture
def clock(monkeypatch):
    """The time that back-off goes by."""
    now = [100.0]
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    return now


def test_a_host_that_is_gone_is_asked_ever_less_often_and_then_has_everything_in_order(clock, tmp_path):
    """A time-out for every record would hold the training up; and nobody is to miss anything for a full disk."""
    sink, other = Away(OSError("nobody there")), hl.sinks.MemorySink()
    fan_out = FanOut([sink, other])
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


def test_flush_does_not_wait_for_the_next_try(clock):
    """The run is over: once more, now."""
    sink = Away(OSError("full"))
    fan_out = FanOut([sink])
    fan_out.write(record(0))
    sink.error = None
    fan_out.write(record(1))
    assert sink.seen == []
    fan_out.flush()
    assert sink.seen == [0, 1]


def test_a_mistake_in_a_sink_is_passed_over_with_its_record(clock):
    """It would be made again; the next record may go through."""
    sink = Away(ValueError("what is this"))
    fan_out = FanOut([sink])
    fan_out.write(record(0))
    sink.error = None
    fan_out.write(record(1))
    fan_out.close()
    assert sink.seen == [1]
    waiting = Away(OSError("full"))
    fan_out = FanOut([waiting])
    fan_out.write(record(0))
    fan_out.write(record(1))
    waiting.error = ValueError("what is this")
    fan_out.flush()
    waiting.error = None
    fan_out.flush()
    assert waiting.seen == [1]


def test_what_a_sink_could_not_take_is_not_given_to_the_next_run_and_is_said(clock, tmp_path, monkeypatch):
    """How many, and where they are; the oldest go first if there are too many."""
    monkeypatch.setattr(fan_out_module, "MAX_WAITING", 3)
    sink = Away(OSError("full"))
    fan_out = FanOut([sink], log=tmp_path / "records.jsonl")
    for number in range(5):
        fan_out.write(record(number))
    fan_out.set_run_context(strategy="b")
    sink.error = None
    fan_out.write(record(5))
    fan_out.close()
    assert sink.seen == [5]
    assert len([found for found in read_log(tmp_path) if isinstance(found, hl.sinks.Record)]) == 6
    with pytest.warns(HooklineWarning) as told:
        fan_out.warn_pending()
    assert "Away could not take 5 records of the run; the log has them: hookline replay." in str(told[1].message)


@pytest.mark.parametrize(("error", "shown"), [(OSError("full"), False), (KeyError("x"), True)])
def test_only_of_mistakes_a_traceback_is_shown(error, shown, caplog):
    """Of a full disk the sentence says it all."""
    with caplog.at_level(logging.WARNING):
        FanOut([Away(error)]).write(record(0))
    assert bool(caplog.records) is shown
