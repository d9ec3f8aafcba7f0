"""Ctrl-C in the middle of writing, by someone who catches it and goes on, as in a notebook: files stay whole."""

from __future__ import annotations

import csv
import json
import os
from contextlib import contextmanager

import pytest
from helpers_sinks import record

from hookline.records.delivery import BATCH, Delivery
from hookline.records.fan_out import FanOut
from hookline.records.log import RecordLog, read_log
from hookline.sinks.csv_sink import CSVSink
from hookline.sinks.jsonl_sink import JSONLSink


@contextmanager
def interrupted_after(name: str):
    """The system has done it, and then Ctrl-C is seen."""
    real = getattr(os, name)

    def then_interrupted(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_no_number_of_the_log_is_given_twice_and_its_length_is_known(tmp_path):
    """What was written counts; a resumed run is cut back to whole lines."""
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(record(0))
    with interrupted_after("write"):
        log.append(record(1))
    state = log.state_dict()
    log.append(record(2))
    assert [(found.number, found.epoch) for found in read_log(tmp_path)] == [(0, 0), (1, 1), (2, 2)]
    log.load_state_dict(state)
    assert [found.number for found in read_log(tmp_path)] == [0, 1]
    log.close()


def test_a_row_that_was_written_is_not_written_over(tmp_path):
    """Shorter rows would leave the rest of longer ones behind."""
    sink = CSVSink(tmp_path / "a.csv")
    sink.emit({"x": 1.0}, 0, "P")
    with interrupted_after("pwrite"):
        sink.emit({"x": 0.123456789}, 1, "P")
    state = sink.state_dict()
    sink.emit({"x": 3.0}, 2, "P")
    sink.close()
    assert [row["x"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == [
        "1.0", "0.123456789", "3.0",
    ]  # fmt: skip
    assert state["rows"] == 2


@pytest.mark.parametrize("rows", [1, 2000])
def test_a_header_that_was_widened_is_known_to_be(rows, tmp_path):
    """A small file is replaced; of a large one the header is written over. Nothing goes to a file that is closed."""
    sink, other = CSVSink(tmp_path / "a.csv"), JSONLSink(tmp_path / "b.jsonl")
    for number in range(rows):
        sink.emit({"x": float(number)}, number, "P")
    sink.emit({"x": 0.0, "first": 1}, rows, "P")
    with interrupted_after("replace" if rows == 1 else "pwrite"):
        sink.emit({"x": 0.0, "second": 2}, rows + 1, "P")
    other.emit({"x": 0}, 0, "P")
    sink.emit({"x": 0.0, "second": 2, "third": 3}, rows + 2, "P")
    sink.close()
    other.close()
    found = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert list(found[0]) == ["epoch", "hook_point", "x", "first", "second", "third"]
    assert (found[-1]["second"], found[-1]["third"]) == ("2", "3")
    assert [int(row["epoch"]) for row in found] == [*range(rows + 1), rows + 2]
    assert [row["first"] for row in found if row["first"]] == ["1"]
    assert len([json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]) == 1


def test_a_number_that_is_missing_in_the_log_does_not_stop_slow_sinks(tmp_path):
    """At the edge of a batch it looks as if the log had been cut back: looked for once, not for ever."""
    with FanOut(log=tmp_path / "records.jsonl") as fan_out:
        for number in range(BATCH):
            fan_out.write(record(number))
    log = RecordLog(tmp_path / "records.jsonl")
    log.number += 5
    log.append(record(BATCH))
    log.close()
    spec = {
        "name": "Slow", "module": "helpers_sinks", "class": "Slow", "file": None,
        "options": {"path": str(tmp_path / "slow.txt")},
    }  # fmt: skip
    delivery = Delivery(spec, tmp_path / "records.jsonl", lambda message: pytest.fail(str(message)))
    while delivery.advance():
        pass
    assert delivery.is_done()
    assert len((tmp_path / "slow.txt").read_text().splitlines()) == BATCH + 1
