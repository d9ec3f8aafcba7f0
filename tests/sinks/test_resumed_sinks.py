"""Runs that are killed and resumed: the log is cut back to the checkpoint, and every sink holds each step once."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_sinks import record, rows
from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hookline as hl
from hookline.records import FanOut, MetricSink, Record, read_log
from hookline.sinks import CSVSink, JSONLSink, MemorySink, ParquetSink

FILES = (CSVSink, JSONLSink, ParquetSink)


def steps(folder: Path) -> dict[str, list[int]]:
    """The steps in each file of a run, in order."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    with (folder / "a.csv").open() as table:
        rows = [int(float(row["x"])) for row in csv.DictReader(table)]
    return {
        "log": [one.metrics["x"] for one in read_log(folder) if isinstance(one, Record)],
        "csv": rows,
        "jsonl": [json.loads(line)["x"] for line in (folder / "a.jsonl").read_text().splitlines()],
        "parquet": [row["step"] for row in parquet.read_table(folder / "a.parquet").to_pylist() if row["name"] == "x"],
        "tensorboard": [event.step for event in events.Scalars("x")],
    }


RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from hookline.records import FanOut, Record
from hookline.sinks import CSVSink, JSONLSink, ParquetSink, TensorBoardSink
folder, end = Path(sys.argv[1]), int(sys.argv[2])
with FanOut([CSVSink(), JSONLSink(), ParquetSink(), TensorBoardSink()], log=folder / "records.jsonl") as fan_out:
    fan_out.set_run_context(strategy="a", run_dir=str(folder))
    first, checkpoint = 0, folder / "checkpoint.json"
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        fan_out.load_state_dict(saved["sinks"])
        first = saved["step"]
    for step in range(first, end):
        if step % 7 == 0:
            beside = folder / "checkpoint.tmp"
            beside.write_text(json.dumps({{"sinks": fan_out.state_dict(), "step": step}}))
            beside.replace(checkpoint)
        metrics = {{"x": step, f"late/{{step // 25}}": step * 0.1}}
        fan_out.write(Record(metrics, step, "POST_EPOCH", step, "a", 0, 1000.0 + step))
        print(step, flush=True)
    assert not fan_out.errors, dict(fan_out.errors)
"""


def begun(folder: Path, end: int) -> subprocess.Popen[str]:
    """A process that goes on with a run."""
    code = RUN.format(here=str(Path(__file__).parents[1]))
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(end)], stdout=subprocess.PIPE, text=True)


def killed_and_resumed(folder: Path, kills: int, seed: int, end: int = 300) -> None:
    """A run that is killed at moments that a random number tells, and at last is not."""
    chance = random.Random(seed)
    folder.mkdir()
    for _ in range(kills):
        run = begun(folder, end)
        assert run.stdout is not None
        for _ in range(chance.randrange(1, 60)):
            run.stdout.readline()
        run.kill()
        run.communicate()
    run = begun(folder, end)
    run.communicate()
    assert run.returncode == 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_moment_and_resumed_holds_every_step_once(tmp_path, seed):
    """In the log and in every file, in order."""
    folder = tmp_path / "run"
    killed_and_resumed(folder, 3, seed)
    assert steps(folder) == {name: list(range(300)) for name in ("log", "csv", "jsonl", "parquet", "tensorboard")}
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {"a.csv", "a.jsonl", "a.parquet", "tensorboard", "records.jsonl", "checkpoint.json"}


def made(path: Path, order: str = "told first", state: Any = None, **context: Any) -> FanOut:
    """A fan-out with all file sinks, that goes on from ``state``."""
    fan_out = FanOut([*(kind() for kind in FILES), MemorySink()], log=path)
    if state is not None and order == "told afterwards":
        fan_out.load_state_dict(state)
    fan_out.set_run_context(context)
    if state is not None and order == "told first":
        fan_out.load_state_dict(state)
    return fan_out


def files(folder: Path) -> dict[str, list[float]]:
    """The values in every file of a folder that is not the log's."""
    hidden = ("records", ".")
    return {path.name: rows(path) for path in sorted(folder.iterdir()) if not path.name.startswith(hidden)}


@pytest.mark.parametrize("order", ["told first", "told afterwards"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("context", [{"run_dir": "{folder}"}, {"output_dir": "{folder}", "experiment_name": "e"}])
def test_the_files_of_a_resumed_run_are_those_of_one_that_never_stopped(tmp_path, order, at, context):
    """Whenever it is told which run it is, also from a checkpoint before the first record, and twice in a row."""
    told = {key: value.format(folder=tmp_path) for key, value in context.items()}
    log, folder = tmp_path / "records.jsonl", tmp_path if "run_dir" in told else tmp_path / "e" / "a"
    fan_out = made(log, strategy="a", **told)
    state = None
    for number in range(5):
        if number == at:
            state = fan_out.state_dict()
        fan_out.write(record(number))
    fan_out.close()
    for last in (4, 6):
        fan_out = made(log, order, state, strategy="a", **told)
        for number in range(at, last):
            fan_out.write(record(number))
        fan_out.close()
    expected = [float(number) for number in range(6)]
    found = {name: content for name, content in files(folder).items() if name != "e"}
    assert found == {"a.csv": expected, "a.jsonl": expected, "a.parquet": expected}
    assert [one.metrics["x"] for one in fan_out.sinks[-1].records] == expected
    assert fan_out.errors == {}
    contexts = [one for one in read_log(log) if not isinstance(one, Record)]
    assert len(contexts) == 1


def test_files_that_are_not_of_this_run_stay_and_its_own_are_found_again(tmp_path):
    """The names with _1: before the first record of the checkpoint, and after the run was resumed."""
    for name in ("m.csv", "m.jsonl"):
        (tmp_path / name).write_text("of somebody else\n")

    def sinks() -> list[MetricSink]:
        return [CSVSink(tmp_path / "m.csv"), JSONLSink(tmp_path / "m.jsonl")]

    with FanOut(sinks(), log=tmp_path / "records.jsonl") as fan_out:
        state = fan_out.state_dict()
        for number in range(3):
            fan_out.write(record(number))
    with FanOut(sinks(), log=tmp_path / "records.jsonl") as fan_out:
        fan_out.load_state_dict(state)
        for number in range(4):
            fan_out.write(record(number))
    for name in ("m.csv", "m.jsonl"):
        assert (tmp_path / name).read_text() == "of somebody else\n"
        assert not (tmp_path / name.replace("m", "m_2", 1)).exists()
    assert rows(tmp_path / "m_1.csv") == rows(tmp_path / "m_1.jsonl") == [0, 1, 2, 3]


class Own(hl.MetricSink):
    """A sink of a user, which knows nothing of resuming."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def emit(self, metrics, epoch, hook_point) -> None:
        self.seen.append(epoch)

    def set_run_context(self, **context) -> None:
        self.seen.append(context)


@pytest.mark.parametrize("order", ["told first", "told afterwards"])
def test_a_sink_that_cannot_begin_anew_gets_the_records_from_now_on(tmp_path, order):
    """And hears once which run it is."""
    log = tmp_path / "records.jsonl"
    with FanOut([Own()], log=log) as fan_out:
        fan_out.set_run_context(strategy="a")
        fan_out.write(record(0))
        state = fan_out.state_dict()
        fan_out.write(record(1))
    sink = Own()
    with FanOut([sink], log=log) as fan_out:
        if order == "told first":
            fan_out.set_run_context(strategy="a")
        fan_out.load_state_dict(state)
        if order == "told afterwards":
            fan_out.set_run_context(strategy="a")
        fan_out.write(record(1))
    assert sink.seen == [{"strategy": "a"}, 1]


def test_each_log_of_a_manager_has_files_of_its_own(tmp_path):
    """A second loop opens another log: going back in the first leaves the rows of the second alone."""
    with FanOut([CSVSink(tmp_path / "m.csv")]) as fan_out:
        for name in ("a", "b"):
            fan_out.open_log(tmp_path / name / "records.jsonl")
            fan_out.write(record(0))
        fan_out.open_log(tmp_path / "a" / "records.jsonl")
        fan_out.load_state_dict({"first": 0, "records": 1})
        fan_out.write(record(1))
    assert rows(tmp_path / "m.csv") == [0, 1]
    assert rows(tmp_path / "m_1.csv") == [0]
