"""Metrics as runs of W&B, written offline by W&B itself and read back from its file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from helpers_waiting import until
from wandb.proto import wandb_internal_pb2

from hookline.errors import HooklineWarning, OptionError
from hookline.records.sink import Record, StepSeries
from hookline.sinks.wandb_sink import WandbSink
from hookline.when import HookPoint

_BLOCK = 32768
_OWN = {"_step", "_runtime", "_timestamp"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """W&B reads these when its settings are made first; its caches go to a folder of the test."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


def chunks(data: bytes) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format after a header of seven bytes."""
    assert data.startswith(b":W&B")
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def records(file: Path) -> list[Any]:
    found = []
    for chunk in chunks(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(chunk)
        found.append(record)
    return found


def history(file: Path) -> list[dict[str, Any]]:
    """What was logged, row by row, without what W&B adds."""
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *way, last = list(item.nested_key) or [item.key]
                place = row
                for key in way:
                    place = place.setdefault(key, {})
                place[last] = json.loads(item.value_json)
            rows.append({key: value for key, value in row.items() if key not in _OWN})
    return rows


def complete(file: Path) -> list[dict[str, Any]]:
    """The rows of a run that has ended: W&B's own process may write the end a moment after it says that it has."""
    until(lambda: any(record.WhichOneof("record_type") == "exit" for record in records(file)), "the end is written")
    return history(file)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def test_a_run_per_strategy_with_every_value_at_its_step(tmp_path):
    """In one group, under the strategy's name, with the configuration; resumed under the same id."""
    sink = WandbSink("project", mode="offline", config={"own": 1})
    for strategy in ("random", "sorted"):
        sink.set_run_context(
            strategy=strategy, run_dir=tmp_path / strategy, experiment_name="mod", config={"lr": 0.5, "own": 2}
        )
        series = StepSeries([0.5, math.nan, 0.125], [0, 1, 2])
        sink.write(Record({"train/loss": series, "texts": StepSeries(["x"], [1])}, 0, HookPoint.POST_STEP, 2, strategy))
        metrics = {
            "list": [0.0, 1.0, 5.0, math.inf], "dict": {"x": {"y": 1}}, "text": "größe", "none": None, "epoch": 9,
            "_step": 7, "mixed": [1, "x"], "bool": True, "int": 3,
        }  # fmt: skip
        sink.write(Record(metrics, 0, HookPoint.POST_EPOCH, 2, strategy))
        sink.write(Record({"by_steps": 1}, None, HookPoint.SNAPSHOT, 3, strategy))
    sink.close()
    sink.close()
    (random,), (sorted_,) = files(tmp_path / "random"), files(tmp_path / "sorted")
    rows = complete(random)
    assert math.isnan(rows[1].pop("train/loss"))
    counts, edges = rows[3]["list"].pop("values"), rows[3]["list"].pop("bins")
    assert (sum(counts), edges[0], edges[-1]) == (3, 0, 5)
    assert rows == [
        {"train/loss": 0.5, "step": 0, "epoch": 0},
        {"texts": "x", "step": 1, "epoch": 0},
        {"train/loss": 0.125, "step": 2, "epoch": 0},
        {
            "list": {"_type": "histogram"}, "list_mean": math.inf, "dict/x/y": 1, "text": "größe", "metric/epoch": 9,
            "metric/_step": 7, "mixed": '[1,"x"]', "bool": True, "int": 3, "step": 2, "epoch": 0,
        },
        {"by_steps": 1, "step": 3},
    ]  # fmt: skip
    assert len(complete(sorted_)) == 5
    one, other = (_the(records(file), "run") for file in (random, sorted_))
    assert (one.display_name, other.display_name) == ("random", "sorted")
    assert one.run_group == other.run_group
    assert one.run_group.startswith("mod_2")
    config = {item.key: json.loads(item.value_json) for item in one.config.update if item.key != "_wandb"}
    assert config == {"own": 2, "lr": 0.5}
    axes = {
        r.metric.glob_name: r.metric.step_metric for r in records(random) if r.WhichOneof("record_type") == "metric"
    }
    assert axes["*"] == "step"


def test_a_resumed_run_goes_on_under_the_same_id(tmp_path):
    """And a run of the user's own in this process is left alone."""
    mine = wandb.init(project="mine", mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    ids = set()
    for step in range(2):
        sink = WandbSink("pro ject", mode="offline", group="g")
        sink.set_run_context(strategy="random", run_dir=tmp_path / "run")
        sink.write(Record({"a": step}, 0, HookPoint.POST_STEP, step))
        ids.add(sink._run.id)
        sink.set_run_context(strategy="random", run_dir=tmp_path / "run")
        sink.write(Record({"b": step}, 0, HookPoint.POST_STEP, step))
        sink.close()
    assert len(ids) == 1
    copy = WandbSink("pro ject", mode="offline", group="g")  # of a replay: a run of its own
    copy.set_run_context(strategy="random", run_dir=tmp_path / "run", replay=True)
    copy.write(Record({"c": 0}, 0, HookPoint.POST_STEP, 0))
    assert copy._run.id not in ids
    copy.close()
    assert wandb.run is mine
    mine.finish()
    rows = [row for file in {file.resolve() for file in files(tmp_path / "run")} for row in complete(file)]
    assert sorted((row["step"], row.get("a"), row.get("b")) for row in rows if "a" in row) == [
        (0, 0, None),
        (1, 1, None),
    ]
    assert sorted((row["step"], row["b"]) for row in rows if "b" in row) == [(0, 0), (1, 1)]


def _the(found: list[Any], kind: str) -> Any:
    return getattr(next(record for record in found if record.WhichOneof("record_type") == kind), kind)


def test_without_a_key_the_run_is_offline_and_nobody_is_asked(monkeypatch):
    """WANDB_MODE, or a mode that is given, goes before."""
    asked: list[dict[str, Any]] = []

    def login(*, prompt: bool = True, verify: bool = True) -> bool:
        asked.append({"prompt": prompt, "verify": verify})
        return False

    monkeypatch.setattr(wandb, "login", login)
    sink = WandbSink("project")
    with pytest.warns(HooklineWarning, match="found no key for W&B, so the run is written offline"):
        assert sink._possible_mode(wandb) == "offline"
    assert asked == [{"prompt": False, "verify": False}]
    monkeypatch.setattr(wandb, "login", lambda *, prompt, verify: True)
    assert sink._possible_mode(wandb) is None
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delattr(wandb, "login")
    assert sink._possible_mode(wandb) is None


@pytest.mark.parametrize("project", ["", "a/b", "x" * 129])
def test_a_project_that_wandb_refuses_is_refused_before_training(project):
    with pytest.raises(OptionError, match=r"W&B takes names of 1 to 128 signs without"):
        WandbSink(project)
