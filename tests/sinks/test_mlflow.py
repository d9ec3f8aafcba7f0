"""Metrics as runs of MLflow, in a local store, read back by MLflow's own client."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from hookline.records.sink import Record, StepSeries
from hookline.sinks.mlflow_sink import MLflowSink
from hookline.when import HookPoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy is deprecated"  # SQLAlchemy, of how MLflow uses it
)


@pytest.fixture(autouse=True)
def local(monkeypatch, tmp_path):
    """No telemetry, no store of this machine's user."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    """A store with its tables, which take seconds to make."""
    folder = tmp_path_factory.mktemp("store")
    MLflowSink.check()
    from mlflow.tracking import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_experiments()
    return folder / "mlflow.db"


def client(database: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{database}")


def points(found: Any, run: str | None, key: str) -> list[tuple[int, float, int]]:
    return sorted((m.step, m.value, m.timestamp) for m in found.get_metric_history(run, key))


def test_a_run_per_strategy_with_every_value_at_its_step(tmp_path, empty):
    """And again when the run is resumed: the same MLflow run, no value twice."""
    database = tmp_path / "mlflow.db"
    shutil.copy(empty, database)
    uri = f"sqlite:///{database}"
    ids = []
    for strategy in ("random", "sorted"):
        sink = MLflowSink(uri)
        config = {"lr": 0.5, "model": {"width": 3}, "long": "x" * 9000, "nothing": None}
        context = {"strategy": strategy, "run_dir": tmp_path / strategy, "experiment_name": "mod", "config": config}
        sink.set_run_context(**context)
        series = StepSeries([0.5, math.nan, 0.125], [0, 1, 2])
        sink.write(Record({"train/loss": series}, 0, HookPoint.POST_STEP, 2, strategy, 0, 12.5))
        ids.append(sink.run_id)
        sink.close()
        sink.close()
    resumed = MLflowSink(uri)
    resumed.set_run_context(**context)
    resumed.write(Record({"train/loss": series}, 0, HookPoint.POST_STEP, 2, "sorted", 0, 12.5))  # once more
    resumed.write(Record({"train/loss": StepSeries([0.25], [3])}, 1, HookPoint.POST_STEP, 3, "sorted", 0, 13.5))
    resumed.write(Record({"by_steps": 1.0}, None, HookPoint.SNAPSHOT, 4, "sorted", 0, 14.5))
    assert resumed.run_id == ids[1]
    found = client(database)
    assert found.get_run(ids[1]).info.status == "RUNNING"
    resumed.close()
    first = points(found, ids[0], "train/loss")
    assert math.isnan(first.pop(1)[1])
    assert first == [(0, 0.5, 12500), (2, 0.125, 12500)]
    assert [step for step, *_ in points(found, ids[1], "train/loss")] == [0, 1, 2, 3]
    assert [step for step, *_ in points(found, ids[1], "by_steps")] == [4]
    assert {step for step, *_ in points(found, ids[1], "epoch")} == {2, 3}  # of a run that counts steps there is none
    assert points(found, ids[1], "epoch") == [(2, 0.0, 12500), (3, 1.0, 13500)]
    runs = [found.get_run(run) for run in ids]
    assert [run.info.run_name for run in runs] == ["random", "sorted"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert found.get_experiment(runs[0].info.experiment_id).name == "mod"
    params = runs[1].data.params
    assert len(params.pop("long")) < 6000
    assert params == {"lr": "0.5", "model/width": "3", "nothing": "None"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "random", "sorted"]


def test_every_kind_of_value_and_name_is_taken(tmp_path, empty):
    """What MLflow refuses in a name is mapped; more than a thousand metrics go in pieces."""
    (tmp_path / "run").mkdir()
    shutil.copy(empty, tmp_path / "run" / "mlflow.db")
    sink = MLflowSink(experiment="named")
    sink.set_run_context(strategy="random", run_dir="run", experiment_name="other")
    metrics = {
        "list": [1, 2, 6], "holes": [1.0, math.nan], "dict": {"x": {"y": True}}, "text": "größe", "mixed": [1, "x"],
        "none": None, "inf": math.inf, "epoch": 9, "a%": 1, "größe/💥": 3, "../up//": 4, "n" * 300: 5,
        "": 6, "many": {f"m{number}": number for number in range(1500)},
    }  # fmt: skip
    sink.emit(metrics, 3, "SNAPSHOT")
    run = sink.run_id
    sink.close()
    data = client(tmp_path / "run" / "mlflow.db").get_run(run).data
    found = {key: value for key, value in data.metrics.items() if not key.startswith("many/")}
    assert len(data.metrics) - len(found) == 1500
    assert math.isnan(found.pop("holes_mean"))
    assert found.pop("inf") > 1e308  # as MLflow keeps it in a database
    (long,) = [key for key in found if key.startswith("nnn")]
    assert len(long) == 250
    assert found.pop(long) == 5.0
    assert found == {
        "list_mean": 3.0, "list_min": 1.0, "list_max": 6.0, "dict/x/y": 1.0, "metric/epoch": 9.0, "a_": 1.0,
        "größe/_": 3.0, "_/up/_/_": 4.0, "_": 6.0, "epoch": 3.0,
    }  # fmt: skip
    assert (data.tags["text"], data.tags["mixed"]) == ("größe", '[1,"x"]')
    assert json.loads((tmp_path / "run" / "mlflow_run.json").read_text())["run_id"] == run
