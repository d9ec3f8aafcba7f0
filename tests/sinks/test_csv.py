"""Metrics as a table that grows to the right."""

from __future__ import annotations

import csv
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_waiting import PATIENCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hookline.errors import HooklineWarning, OptionError
from hookline.records.sink import Record, StepSeries
from hookline.sinks import csv_sink as table_module
from hookline.sinks.csv_sink import CSVSink, GrowingCSV
from hookline.when import HookPoint


def read(path: Path | None) -> list[dict[str, str]]:
    """As most people read it; a row with more cells than the header would have the key None."""
    assert path is not None
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, restval=""))


def header(path: Path | None) -> list[str]:
    assert path is not None
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


@pytest.fixture
def large(monkeypatch):
    """Every file counts as a large one, with little room for new columns."""
    monkeypatch.setattr(table_module, "_SMALL", 0)
    monkeypatch.setattr(table_module, "_ROOM", 24)


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
    """Series are taken apart; what is no series stands at the step of its record; resumed, it goes on."""
    sink = CSVSink(tmp_path / "a.csv", rows="step")
    sink.write(Record({"loss": StepSeries([0.5, 0.25], [3, 4]), "lr": StepSeries([1.0], [4])}, 0, "POST_STEP", step=4))
    sink.write(Record({"step": 7, "all": [1, 2]}, 0, "POST_EPOCH", step=4))
    expected = (
        "step,epoch,hook_point,loss,lr,metric/step,all\n"
        "3,0,POST_STEP,0.5,,,\n4,0,POST_STEP,0.25,1.0,,\n4,0,POST_EPOCH,,,7,1;2\n"
    )
    state = sink.state_dict()
    sink.close()
    assert (tmp_path / "a.csv").read_text() == expected
    resumed = CSVSink(tmp_path / "a.csv", rows="step")
    resumed.load_state_dict(state)
    resumed.write(Record({"loss": StepSeries([0.125], [5])}, 1, "POST_STEP", step=5))
    resumed.close()
    assert (tmp_path / "a.csv").read_text() == expected + "5,1,POST_STEP,0.125,,,\n"
    with pytest.raises(OptionError, match="'record' or 'step'"):
        CSVSink(tmp_path / "b.csv", rows="steps")


def test_rows_written_after_a_flush_join_those_before(tmp_path):
    """OrderedLearning began the file again then."""
    sink = CSVSink(tmp_path / "a.csv")
    sink.emit({"a": 1}, 0, "POST_EPOCH")
    sink.flush()
    sink.emit({"a": 2}, 1, "POST_EPOCH")
    sink.flush()
    sink.emit({"a": 3, "b": 1}, 2, "POST_EPOCH")
    assert [row["a"] for row in read(sink.path)] == ["1", "2", "3"]


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


def test_a_metric_called_epoch_does_not_replace_the_epoch(tmp_path):
    """It has a column of its own."""
    sink = CSVSink(tmp_path / "a.csv")
    sink.emit({"epoch": 99, "hook_point": "mine", "a": 1}, 3, "POST_EPOCH")
    expected = {"epoch": "3", "hook_point": "POST_EPOCH", "metric/epoch": "99", "metric/hook_point": "mine", "a": "1"}
    assert read(sink.path) == [expected]


def test_a_file_that_exists_is_left_alone(tmp_path):
    """The next one is ``_1``, then ``_2``."""
    for number in range(3):
        sink = CSVSink(tmp_path / "a.csv")
        sink.emit({"n": number}, 0, "SNAPSHOT")
        sink.close()
    assert {file.name: read(file)[0]["n"] for file in tmp_path.iterdir()} == {
        "a.csv": "0",
        "a_1.csv": "1",
        "a_2.csv": "2",
    }


def test_each_strategy_has_a_file_of_its_own(tmp_path):
    """By ``run_dir``, else as OrderedLearning had it: output folder, experiment, strategy."""
    sink = CSVSink(output_dir=tmp_path, experiment_name="mod")
    for strategy in ("random", "sor/ted", "random"):
        sink.set_run_context(strategy=strategy)
        sink.emit({"a": 1}, 0, "SNAPSHOT")
    sink.set_run_context(strategy="last", run_dir=tmp_path / "run")
    sink.emit({"a": 1}, 0, "SNAPSHOT")
    sink.close()
    found = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.csv"))
    assert found == ["mod/random/random.csv", "mod/random/random_1.csv", "mod/sor_ted/sor_ted.csv", "run/last.csv"]


@pytest.mark.parametrize("half", [{"output_dir": "x"}, {"experiment_name": "x"}])
def test_half_a_place_is_refused_with_the_words_of_ordered_learning(half):
    """When it is made."""
    with pytest.raises(OptionError, match=r"^CSVSink requires either filepath or \(output_dir \+ experiment_name\)"):
        CSVSink(**half)


def test_a_place_that_cannot_be_written_raises_and_works_when_it_can_be(tmp_path):
    """The fan-out reports it; the next record is tried again."""
    (tmp_path / "folder").write_text("a file")
    sink = CSVSink(tmp_path / "folder" / "a.csv")
    with pytest.raises(OSError, match="folder"):
        sink.emit({"a": 1}, 0, "SNAPSHOT")
    (tmp_path / "folder").unlink()
    sink.emit({"a": 2}, 1, "SNAPSHOT")
    assert [row["a"] for row in read(sink.path)] == ["2"]


# -- large files ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("large")
def test_a_large_file_is_readable_at_any_moment_and_tidy_in_the_end(tmp_path):
    """New columns go into room after the header; every row can be read with its names all the while."""
    sink = CSVSink(tmp_path / "a.csv")
    expected = []
    for number in range(60):
        metrics = {"first": number, f"metric,{number // 2}": number, "text": "x\ny" if number % 3 else ""}
        sink.emit(metrics, number, "SNAPSHOT")
        expected.append({name: str(value) for name, value in metrics.items()})
        found = read(sink.path)
        assert [{name: value for name, value in row.items() if value} for row in found] == [
            {"epoch": str(at), "hook_point": "SNAPSHOT"} | {name: value for name, value in row.items() if value}
            for at, row in enumerate(expected)
        ]
    sink.close()
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {4 + 30}
    assert len(rows) == 61


def test_a_thousand_new_columns_copy_the_file_a_few_times(tmp_path, monkeypatch):
    """Not a thousand times: that is what it costs elsewhere."""
    copied: list[int] = []
    copy = table_module._copy

    def counted(old, new, width):
        copy(old, new, width)
        copied.append(new.tell())

    monkeypatch.setattr(table_module, "_copy", counted)
    sink = CSVSink(tmp_path / "a.csv")
    for number in range(3000):
        sink.emit({"first": number * 0.1, f"metric_{number // 3}": number * 0.1}, number, "POST_EPOCH")
    sink.close()
    size = (tmp_path / "a.csv").stat().st_size
    assert len([much for much in copied if much > table_module._SMALL * 2]) <= 8
    assert sum(copied) < 4 * size
    assert len(header(sink.path or tmp_path / "a.csv")) == 3 + 1000


@pytest.mark.usefixtures("large")
def test_pandas_skips_the_room_and_fills_short_rows(tmp_path):
    """While the run goes on. The room is empty lines right after the header; none stands between rows."""
    sink = CSVSink(tmp_path / "a.csv")
    for number in range(10):
        sink.emit({f"m{number}": number}, number, "SNAPSHOT")
    lines = (tmp_path / "a.csv").read_text().split("\n")
    first_row = lines.index(next(line for line in lines if line.startswith("0,")))
    assert first_row > 1
    assert not any(lines[1:first_row])
    assert all(lines[first_row:-1])
    table = pytest.importorskip("pandas").read_csv(tmp_path / "a.csv")
    assert table.shape == (10, 12)
    assert table["m3"].dropna().to_dict() == {3: 3.0}


def test_a_run_that_was_copied_goes_on_in_the_copy(tmp_path):
    """The file of the run it was copied from stays as it is."""
    sink = CSVSink()
    sink.set_run_context(strategy="random", run_dir=tmp_path / "one")
    sink.emit({"a": 1}, 0, "SNAPSHOT")
    state = sink.state_dict()
    sink.emit({"a": 2}, 1, "SNAPSHOT")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    copy = CSVSink()
    copy.set_run_context(strategy="random", run_dir=tmp_path / "two")
    copy.load_state_dict(state)
    copy.emit({"a": 3}, 1, "SNAPSHOT")
    assert [row["a"] for row in read(tmp_path / "one" / "random.csv")] == ["1", "2"]
    assert [row["a"] for row in read(tmp_path / "two" / "random.csv")] == ["1", "3"]


_NAMES = st.text(st.sampled_from('ab,"\n\r é'), min_size=1, max_size=4)
_VALUES = st.one_of(st.floats(allow_nan=False), st.integers(), _NAMES)


@pytest.mark.usefixtures("large")
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


# -- resume ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["context first", "state first"])
@pytest.mark.parametrize("small", [True, False])
def test_a_resumed_run_goes_on_in_its_file(tmp_path, monkeypatch, order, small):
    """Rows after the checkpoint are cut off, later ones appended: the file is that of the run without a break."""
    if not small:
        monkeypatch.setattr(table_module, "_SMALL", 0)
        monkeypatch.setattr(table_module, "_ROOM", 24)

    def emit(sink, numbers):
        for number in numbers:
            sink.emit({"a": number, f"text {number // 4}": "x\n,y"}, number, "SNAPSHOT")

    whole = CSVSink(tmp_path / "whole.csv")
    emit(whole, range(20))
    whole.close()
    killed = CSVSink()
    killed.set_run_context(strategy="random", run_dir=tmp_path)
    emit(killed, range(11))
    state = killed.state_dict()
    emit(killed, range(11, 16))
    resumed = CSVSink()
    if order == "state first":
        resumed.load_state_dict(state)
    resumed.set_run_context(strategy="random", run_dir=tmp_path)
    if order == "context first":
        resumed.load_state_dict(state)
    emit(resumed, range(11, 20))
    resumed.close()
    assert state == {"path": str(tmp_path / "random.csv"), "rows": 11}
    assert (tmp_path / "random.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
    resumed.set_run_context(strategy="other", run_dir=tmp_path / "other")
    emit(resumed, range(2))
    assert len(read(tmp_path / "other" / "other.csv")) == 2


def test_a_file_that_is_gone_or_short_is_said(tmp_path):
    """The run goes on in a new file, or after the rows there are."""
    sink = CSVSink(tmp_path / "a.csv")
    with pytest.warns(HooklineWarning, match="is gone"):
        sink.load_state_dict({"path": str(tmp_path / "a.csv"), "rows": 3})
    sink.emit({"a": 1}, 0, "SNAPSHOT")
    with pytest.warns(HooklineWarning, match="was to have 9 rows and has 1"):
        sink.load_state_dict({"path": str(tmp_path / "a.csv"), "rows": 9})
    sink.load_state_dict({})
    assert sink.path is None
    assert sink.state_dict()["path"].endswith("a_1.csv")


def test_an_empty_file_gets_its_header_again(tmp_path):
    """What is left when a process dies between making the file and writing to it."""
    (tmp_path / "a.csv").touch()
    table = GrowingCSV.open(tmp_path / "a.csv", 0)
    table.append({"epoch": 1, "x": 2})
    table.close()
    assert (tmp_path / "a.csv").read_text() == "epoch,x\n1,2\n"


# -- faults ---------------------------------------------------------------------------------------------------

_WRITER = """
    import sys
    from hookline.sinks.csv_sink import CSVSink
    sink = CSVSink(sys.argv[1])
    number = 0
    while True:
        sink.emit({f"m{column}": column + 0.5 for column in range(number // 7, number // 7 + 5)}, number, "SNAPSHOT")
        print(number, flush=True)
        number += 1
"""


def test_a_killed_process_leaves_every_row_with_its_names(tmp_path):
    """Killed at a random moment, while columns come all the time."""
    for attempt in range(4):
        path = tmp_path / f"{attempt}.csv"
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WRITER), str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        enough = random.randrange(200, 2500)
        seen = -1
        while seen < enough:
            seen = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait(timeout=PATIENCE)
        writer.stdout.close()
        seen = int(rest[-1]) if rest else seen
        rows = read(path)
        assert len(rows) in (seen + 1, seen + 2)
        for number, row in enumerate(rows):
            assert None not in row
            assert row["epoch"] == str(number)
            written = {name: value for name, value in row.items() if value and name.startswith("m")}
            first = number // 7
            assert written == {f"m{column}": str(column + 0.5) for column in range(first, first + 5)}


_FULL = """
    import resource, signal, sys
    from hookline.sinks.csv_sink import CSVSink
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sink = CSVSink(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    failed = 0
    for number in range(300):
        if number == 200:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            sink.emit({"a": number, f"b{number // 100}": "x" * 30}, number, "SNAPSHOT")
        except OSError:
            failed += 1
    sink.close()
    print(failed)
"""


def test_a_full_disk_leaves_no_half_row_and_writing_goes_on_when_there_is_room(tmp_path):
    """Each record that fails raises; the file stays readable."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FULL), str(tmp_path / "a.csv")],
        capture_output=True,
        text=True,
        check=True,
    )
    failed = int(run.stdout)
    rows = read(tmp_path / "a.csv")
    assert failed > 100
    assert len(rows) == 300 - failed
    assert [row["epoch"] for row in rows[-100:]] == [str(number) for number in range(200, 300)]
    assert all(row["a"] == row["epoch"] for row in rows)
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
