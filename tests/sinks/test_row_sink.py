"""What a resumed run finds of the files of sinks: cut back to the checkpoint, whenever that was taken."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import hookline as hl
from hookline.error_policy import ErrorPolicy
from hookline.errors import HooklineWarning
from hookline.sinks.csv_sink import CSVSink, GrowingCSV
from hookline.sinks.fan_out import FanOut
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.sinks.parquet_sink import ParquetParts, ParquetSink
from hookline.sinks.resilient_log import ResilientLog

KINDS = [CSVSink, JSONLSink, ParquetSink]
FULL = OSError(errno.ENOSPC, "No space left on device")


def rows(path: Path) -> list[float]:
    """The values of the metric x, in order."""
    if path.suffix == ".csv":
        import csv

        return [float(row["x"]) for row in csv.DictReader(path.read_text().splitlines())]
    if path.suffix == ".jsonl":
        import json

        return [json.loads(line)["x"] for line in path.read_text().splitlines()]
    from pyarrow import parquet

    return parquet.read_table(path).column("value").to_pylist()


def files(folder: Path) -> dict[str, list[float]]:
    """What is in each file of a run."""
    return {path.name.partition(".")[0]: rows(path) for path in sorted(folder.iterdir())}


def put(sink, *values) -> None:
    """A record for each value."""
    for value in values:
        sink.emit({"x": value}, 0, "POST_EPOCH")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_before_the_first_record_is_gone_back_to(kind, tmp_path):
    """What was written after it, in the run that was killed, is not there twice."""
    killed = kind()
    killed.set_run_context(strategy="a", run_dir=tmp_path)
    state = killed.state_dict()
    put(killed, 1.0, 2.0)
    killed.flush()
    resumed = kind()
    resumed.set_run_context(strategy="a", run_dir=tmp_path)
    resumed.load_state_dict(state)
    put(resumed, 1.0, 2.0, 3.0)
    resumed.close()
    assert files(tmp_path) == {"a": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_after_the_end_is_of_that_file(kind, tmp_path):
    """The checkpoint that a loop writes when it has flushed and closed; asking makes no other file."""
    sink = kind()
    sink.set_run_context(strategy="a", run_dir=tmp_path)
    put(sink, 1.0)
    sink.close()
    sink.close()
    state = sink.state_dict()
    resumed = kind()
    resumed.set_run_context(strategy="a", run_dir=tmp_path)
    resumed.load_state_dict(state)
    put(resumed, 2.0)
    resumed.close()
    assert files(tmp_path) == {"a": [1.0, 2.0]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_strategy_after_a_resumed_one_has_its_own_file(kind, tmp_path):
    """Told of the run before the state was loaded, as the loops do, or afterwards."""
    for order in ("told first", "told afterwards"):
        folder = tmp_path / order
        sink = kind()
        sink.set_run_context(strategy="a", run_dir=folder / "a")
        put(sink, 1.0)
        state = sink.state_dict()
        sink.close()
        sink = kind()
        if order == "told first":
            sink.set_run_context(strategy="a", run_dir=folder / "a")
        sink.load_state_dict(state)
        if order == "told afterwards":
            sink.set_run_context(strategy="a", run_dir=folder / "a")
        put(sink, 2.0)
        sink.set_run_context(strategy="b", run_dir=folder / "b")
        put(sink, 3.0)
        sink.close()
        assert files(folder / "a") == {"a": [1.0, 2.0]}
        assert files(folder / "b") == {"b": [3.0]}


@pytest.mark.parametrize(("kind", "method"), [(CSVSink, (GrowingCSV, "tidy")), (ParquetSink, (ParquetParts, "flush"))])
def test_a_disk_that_is_full_when_a_run_ends_does_not_spoil_the_next(kind, method, tmp_path, monkeypatch):
    """The file of the run that is over stays as it is; the next strategy writes its own."""
    memory = hl.sinks.MemorySink()
    fan_out = FanOut([kind(), memory])
    fan_out.set_run_context(strategy="a", run_dir=tmp_path / "a")
    fan_out.write(hl.sinks.Record({"x": 1.0}, 0, "POST_EPOCH"))
    with monkeypatch.context() as patch:
        patch.setattr(*method, lambda *_: (_ for _ in ()).throw(FULL))
        fan_out.set_run_context(strategy="b", run_dir=tmp_path / "b")
    fan_out.write(hl.sinks.Record({"x": 2.0}, 0, "POST_EPOCH"))
    fan_out.close()
    with pytest.warns(HooklineWarning, match=f"{kind.__name__} could not begin another run .*No space left"):
        fan_out.warn_pending()
    assert files(tmp_path / "b") == {"b": [2.0]}


def test_on_a_full_disk_a_checkpoint_still_says_where_things_are(tmp_path, monkeypatch):
    """Else the resumed run would begin another folder, and add to a log that was not cut back."""
    sink = ParquetSink(tmp_path / "a.parquet")
    put(sink, 1.0)
    sink.flush()
    put(sink, 2.0)
    keeper = ResilientLog(tmp_path / "records.jsonl", ErrorPolicy())
    keeper.append(hl.sinks.Record({"x": 1.0}, 0, "POST_EPOCH"))
    size = (tmp_path / "records.jsonl").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.write_table", lambda *_, **__: (_ for _ in ()).throw(FULL))
        patch.setattr("hookline.sinks.record_log.LineFile.write", lambda *_: (_ for _ in ()).throw(FULL))
        keeper.append(hl.sinks.Record({"x": 2.0}, 0, "POST_EPOCH"))
        assert sink.state_dict() == {"path": str(tmp_path / "a.parquet"), "rows": 1}
        assert keeper.state_dict() == {"bytes": size, "number": 1}
    sink.close()
    keeper.close()
    assert rows(tmp_path / "a.parquet") == [1.0, 2.0]
