"""Ctrl-C in the middle of writing, by someone who catches it and goes on, as in a notebook: files stay whole."""

from __future__ import annotations

import csv
import os
from contextlib import contextmanager
from typing import Any

import pytest
from helpers_sinks import record

from hookline.records.log import FanOut, RecordLog, read_log
from hookline.sinks.csv_sink import CSVSink


@contextmanager
def interrupted_after(name: str, where: Any = os):
    """The system has done it, and then Ctrl-C is seen."""
    real = getattr(where, name)

    def then_interrupted(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_no_number_of_the_log_is_given_twice_and_its_length_is_known(tmp_path):
    """What was written counts; a resumed run is cut back to whole lines."""
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(record(0))
    with interrupted_after("write"):
        log.append(record(1))
    log.append(record(2))
    assert [(found.number, found.epoch) for found in read_log(tmp_path)] == [(0, 0), (1, 1), (2, 2)]
    log.truncate(2)
    assert [found.number for found in read_log(tmp_path)] == [0, 1]
    log.close()


def test_a_row_that_was_written_is_not_written_over(tmp_path):
    """Shorter rows would leave the rest of longer ones behind."""
    sink = CSVSink(tmp_path / "a.csv")
    sink.emit({"x": 1.0}, 0, "P")
    with interrupted_after("write"):
        sink.emit({"x": 0.123456789}, 1, "P")
    sink.emit({"x": 3.0}, 2, "P")
    sink.close()
    assert [row["x"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == [
        "1.0", "0.123456789", "3.0",
    ]  # fmt: skip


def test_a_record_that_a_sink_has_taken_does_not_come_again(tmp_path):
    """Ctrl-C is seen when the sink has it; the next record follows."""
    with FanOut([CSVSink(tmp_path / "a.csv")], log=tmp_path / "records.jsonl") as fan_out:
        fan_out.write(record(0))
        with pytest.MonkeyPatch.context() as patch:
            real = CSVSink.write

            def then_interrupted(self, one):
                real(self, one)
                raise KeyboardInterrupt

            patch.setattr(CSVSink, "write", then_interrupted)
            with pytest.raises(KeyboardInterrupt):
                fan_out.write(record(1))
        fan_out.write(record(2))
    assert [row["x"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == ["0", "1", "2"]
