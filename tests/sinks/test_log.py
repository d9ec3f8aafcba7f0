"""The record log: written at once, read back the same, by one writer, whoever is interrupted or killed."""

from __future__ import annotations

import csv
import datetime
import json
import math
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers_sinks import Slow, record

import hookline as hl
from hookline.errors import OptionError
from hookline.records.log import Context, FanOut, RecordLog, read_log
from hookline.records.sink import Record, StepSeries
from hookline.sinks.csv_sink import CSVSink
from hookline.when import HookPoint


def strict(line: bytes | str):
    """What is in a line of strict JSON; NaN and the like are an error."""
    return json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def lines(path: Path):
    """What is in every line after the first, which is that of the log itself."""
    return [strict(line) for line in path.read_bytes().splitlines()[1:]]


def test_a_record_that_is_read_is_the_one_that_was_written(tmp_path):
    """Series with their steps, the point as a point, numbers, time and rank."""
    written = [
        Record(
            {"loss": 0.1 + 0.2, "n": 3, "ok": True, "note": "größe 😀", "none": None, "map": {"a": [1, {"b": 2.5}]}},
            2,
            HookPoint.SNAPSHOT,
            17,
            "random",
            3,
            1234567.125,
        ),
        Record({"train/loss": StepSeries([0.5, 0.25], [4, 7]), "empty": StepSeries()}, 1, HookPoint.POST_STEP, 7),
        Record({"list": [1.0, 2.0], "nothing": []}, 0, "a point of one's own"),
    ]
    log = RecordLog(tmp_path / "deeper" / "records.jsonl")
    numbered = [log.append(one) for one in written]
    assert [one.number for one in numbered] == [0, 1, 2]
    assert numbered == written
    read = list(read_log(log.path))
    assert read == written
    assert [one.number for one in read] == [0, 1, 2]
    series = read[1].metrics["train/loss"]
    assert (type(series), series.steps) == (StepSeries, [4, 7])
    assert read[0].hook_point is HookPoint.SNAPSHOT
    assert lines(log.path)[1] == {
        "n": 1, "time": 0.0, "epoch": 1, "step": 7, "point": "POST_STEP", "strategy": None, "rank": 0,
        "metrics": {"train/loss": [0.5, 0.25], "empty": []}, "steps": {"train/loss": [4, 7], "empty": []},
    }  # fmt: skip


def test_what_is_not_finite_is_a_word_and_comes_back(tmp_path):
    """Single numbers, in series, in lists of lists and dictionaries."""
    nan, inf = math.nan, math.inf
    metrics = {
        "a": nan, "b": inf, "c": -inf, "fine": 1.0, "list": [1.0, [nan, -inf]],
        "series": StepSeries([0.0, nan, inf], [1, 2, 3]), "map": {"x": {"y": nan}, "z": 1},
    }  # fmt: skip
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(Record(metrics, 0, "POST_EPOCH"))
    (line,) = lines(log.path)
    assert line["metrics"] == {
        "a": "NaN", "b": "Infinity", "c": "-Infinity", "fine": 1.0, "list": [1.0, ["NaN", "-Infinity"]],
        "series": [0.0, "NaN", "Infinity"], "map": {"x": {"y": "NaN"}, "z": 1},
    }  # fmt: skip
    (found,) = read_log(log.path)
    assert repr(found.metrics) == repr(metrics)
    assert found.metrics["series"].steps == [1, 2, 3]


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no")


class Unreadable:
    def tolist(self) -> list[float]:
        raise RuntimeError("on another device")


def deep(levels: int = 100_000):
    """Lists in lists."""
    found: list[object] = []
    for _ in range(levels):
        found = [found]
    return found


def within_itself():
    """A list that has itself in it."""
    found: list[object] = []
    found.append(found)
    return found


ALTERED = {
    "huge": 2**70,
    "huge among others": [1, 2**70],
    "longer than a float": 10**5000,
    "half a character": "\ud800",
    "deep": deep(),
    "within itself": within_itself(),
    "object": object(),
    "rude": Rude(),
    "bytes": b"\xff",
    "complex": 1 + 2j,
    "time": datetime.datetime(2020, 1, 1),
    "unreadable": Unreadable(),
    "long text": type("Wordy", (), {"__str__": lambda self: "x" * 10**6})(),
}


@pytest.mark.parametrize("case", ALTERED)
def test_what_json_cannot_hold_is_text_and_never_raises(tmp_path, case):
    """Its neighbours are as they were."""
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(Record({"it": ALTERED[case], "beside": 0.5, "nan": math.nan}, 0, "POST_EPOCH"))
    log.append(record(1))
    first, second = lines(log.path)
    assert first["metrics"]["beside"] == 0.5
    assert first["metrics"]["nan"] == "NaN"
    assert second["metrics"] == {"x": 1}
    assert len(log.path.read_bytes()) < 10_000
    assert len(list(read_log(log.path))) == 2


@pytest.mark.parametrize(
    "rest", [b'{"n":3,"time":1', b'{"n":3}\x00\x00\n', b"\x00" * 100, b'{"n":3,"metrics":[1\n', b"\n"]
)
def test_a_half_written_last_line_is_passed_over_by_readers_and_cut_off_by_the_next_writer(tmp_path, rest):
    """Whatever it ends in; numbers go on."""
    path = tmp_path / "records.jsonl"
    log = RecordLog(path)
    for number in range(3):
        log.append(record(number))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + rest)
    assert [one.number for one in read_log(path)] == [0, 1, 2]
    again = RecordLog(path)
    assert path.read_bytes() == whole
    again.append(record(3))
    assert [one.number for one in read_log(path)] == [0, 1, 2, 3]


def test_going_back_cuts_the_log_and_goes_on_with_the_same_numbers(tmp_path):
    """As a run does that is resumed from a checkpoint, in another process or in the same."""
    path = tmp_path / "records.jsonl"
    log = RecordLog(path)
    log.append(Context({"strategy": "a"}))
    for number in range(3):
        log.append(record(number))
    for number in range(3, 6):
        log.append(record(number))
    uninterrupted = path.read_bytes()
    log.close()
    again = RecordLog(path)
    again.append(Context({"strategy": "told by the run that goes on"}))
    assert again.truncate(3) == {"strategy": "a"}
    assert [found.number for found in list(read_log(path))[1:]] == [0, 1, 2]
    for number in range(3, 6):
        assert again.append(record(number)).number == number
    assert path.read_bytes() == uninterrupted


@pytest.mark.parametrize("number", [4, 9])
def test_going_back_to_what_is_not_there_is_an_error_that_says_so(tmp_path, number):
    """The log stays as it is, and can be written."""
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(record(0))
    with pytest.raises(OptionError, match=f"cut back to {number} records, and has 1"):
        log.truncate(number)
    assert log.append(record(number)).number == number


WRITER = """
import sys
sys.path.insert(0, {here!r})
from hookline.records.log import RecordLog
from hookline.records.sink import Record
log = RecordLog({path!r})
while True:
    number = log.number
    log.append(Record({{"x": number, "long": list(range(300))}}, number, "POST_EPOCH"))
    print(number, flush=True)
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """A process that writes records, and says so after each."""
    code = WRITER.format(here=str(Path(__file__).parents[1]), path=str(path))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_process_that_is_killed_at_any_moment_loses_no_record_that_was_written(tmp_path, seed):
    """Killed again and again; each time it goes on where it was, and every line can be read."""
    chance = random.Random(seed)
    path = tmp_path / "records.jsonl"
    told = -1
    for _ in range(3):
        process = writer(path)
        for _ in range(chance.randrange(1, 400)):
            told = int(process.stdout.readline())
        time.sleep(chance.random() * 0.01)
        process.kill()
        rest, _ = process.communicate()
        told = max([told, *(int(word) for word in rest.splitlines()[:-1])])
    found = list(read_log(path))
    assert [one.number for one in found] == list(range(len(found)))
    assert len(found) > told
    assert all(one.metrics["x"] == one.number and len(one.metrics["long"]) == 300 for one in found)


def test_two_processes_do_not_write_one_log(tmp_path):
    """The second is told, and what to do; when the first is gone, the log is free, killed or not."""
    path = tmp_path / "records.jsonl"
    first = writer(path)
    first.stdout.readline()
    list(read_log(path))  # who reads it does not set it free
    with pytest.raises(
        OptionError, match=r"is being written already, here or by another process.*this run its own folder"
    ):
        RecordLog(path)
    first.kill()
    first.communicate()
    RecordLog(path).append(record(0))


OTHER = """
import sys
from pathlib import Path
from hookline.files import take_lock
print(take_lock(Path(sys.argv[1])) is not None)
"""


def other_process_gets(path) -> bool:
    """Whether somebody else could have the lock now."""
    found = subprocess.run([sys.executable, "-c", OTHER, str(path)], capture_output=True, text=True, check=True)
    return found.stdout.strip() == "True"


def test_two_managers_of_one_process_do_not_write_one_log(tmp_path):
    """The second is refused, and the first keeps its lock; closed, the log is free, and its numbers go on."""
    path = tmp_path / "records.jsonl"
    first = hl.HookManager(log=path)
    with pytest.raises(OptionError, match=r"is being written already, here or.*Close the manager that writes it"):
        hl.HookManager(log=path)
    assert not other_process_gets(tmp_path / ".records.jsonl.lock")
    first.fan_out.write(record(0))
    first.close()
    with FanOut(log=path) as second:
        second.write(record(1))
    assert [found.number for found in read_log(path)] == [0, 1]


def test_a_manager_that_nobody_has_any_more_holds_nothing(tmp_path):
    """Not closed, and in a circle of references, as managers and their hooks are."""
    manager = hl.HookManager(log=tmp_path / "records.jsonl")
    manager.itself = manager
    del manager
    hl.HookManager(log=tmp_path / "records.jsonl").close()


def test_no_lock_is_left(tmp_path):
    """Neither of the log nor of the helper process; a record that comes later takes it again."""
    fan_out = FanOut([Slow(str(tmp_path / "slow.txt"))], log=tmp_path / "records.jsonl")
    fan_out.write(record(0))
    assert (tmp_path / ".records.jsonl.lock").exists()
    fan_out.close()
    assert [path.name for path in tmp_path.iterdir() if "lock" in path.name] == []
    fan_out.write(record(1))
    assert not other_process_gets(tmp_path / ".records.jsonl.lock")
    fan_out.close()
    assert [path.name for path in tmp_path.iterdir() if "lock" in path.name] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gives_nothing_up(tmp_path):
    """It has a copy of everything, closes it, and the lock is still its parent's."""
    log = RecordLog(tmp_path / "records.jsonl")
    child = os.fork()
    if child == 0:
        log.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not other_process_gets(tmp_path / ".records.jsonl.lock")
    log.append(record(0))
    log.close()
    assert other_process_gets(tmp_path / ".records.jsonl.lock")


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
