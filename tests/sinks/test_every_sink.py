"""What the sinks promise alike: places, options, missing packages, the axis of steps; and the one in memory."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers_loops import linear_experiment, noting
from helpers_sinks import rows

import hookline as hl
from hookline.errors import HooklineWarning, MissingPackageError, OptionError
from hookline.records import sink as sink_module
from hookline.records.sink import RunSink
from hookline.sinks.csv_sink import CSVSink
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.sinks.mlflow_sink import MLflowSink
from hookline.sinks.parquet_sink import ParquetSink
from hookline.sinks.tensorboard_sink import TensorBoardSink
from hookline.sinks.wandb_sink import WandbSink

KINDS = [CSVSink, JSONLSink, ParquetSink]


def files(folder: Path) -> dict[str, list[float]]:
    """What is in each file of a run."""
    return {path.name.partition(".")[0]: rows(path) for path in sorted(folder.iterdir())}


def as_class(found: object) -> type:
    """The class itself; for what is no class, one that derives from nothing."""
    return found if isinstance(found, type) else object


def put(sink, *values) -> None:
    """A record for each value."""
    for value in values:
        sink.emit({"x": value}, 0, "POST_EPOCH")


@pytest.mark.parametrize("kind", [*KINDS, TensorBoardSink, MLflowSink])
def test_nothing_is_made_before_it_is_needed_and_without_a_place_metrics_are_dropped(kind, tmp_path, monkeypatch):
    """No file for no metrics; that metrics are dropped is said once, until there is a place."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sink = kind()
    sink.set_run_context(strategy="a", run_dir=tmp_path / "run")
    sink.emit({}, 0, "SNAPSHOT")
    sink.flush()
    sink.close()
    assert list(tmp_path.iterdir()) == []
    sink = kind()
    with pytest.warns(HooklineWarning, match=rf"{kind.__name__} .*where to write"):
        put(sink, 1.0)
    put(sink, 2.0)
    if kind in KINDS:
        sink.set_run_context(strategy="a", output_dir=tmp_path, experiment_name="mod")
        put(sink, 3.0)
        sink.close()
        assert files(tmp_path / "mod" / "a") == {"a": [3.0]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_run_folder_told_again_is_the_same_run(kind, tmp_path):
    """A resumed run tells it again, and so does its log when it is replayed."""
    sink = kind()
    for number in range(2):
        sink.set_run_context(strategy="a", run_dir=tmp_path)
        put(sink, float(number))
    sink.close()
    assert files(tmp_path) == {"a": [0.0, 1.0]}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not JSONLSink])
def test_a_file_that_exists_is_left_alone(kind, tmp_path):
    """The next one is ``_1``, then ``_2``."""
    path = tmp_path / f"m{kind.ending}"
    for number in range(3):
        sink = kind(path)
        put(sink, float(number))
        sink.close()
        sink.close()
    assert files(tmp_path) == {"m": [0.0], "m_1": [1.0], "m_2": [2.0]}


@pytest.mark.parametrize("kind", KINDS)
def test_each_strategy_has_a_file_of_its_own(kind, tmp_path):
    """By ``run_dir``, else as OrderedLearning had it: output folder, experiment, strategy."""
    sink = kind(output_dir=tmp_path, experiment_name="mod") if kind is CSVSink else kind()
    place = {} if kind is CSVSink else {"output_dir": tmp_path, "experiment_name": "mod"}
    for strategy in ("random", "sor/ted", "random"):
        sink.set_run_context(strategy=strategy, **place)
        put(sink, 1.0)
    sink.set_run_context(strategy="last", run_dir=tmp_path / "run")
    put(sink, 1.0)
    sink.close()
    found = [str(path.relative_to(tmp_path).with_suffix("")) for path in sorted(tmp_path.rglob(f"*{kind.ending}"))]
    assert {name for name in found if "part-" not in name} == {
        "mod/random/random", "mod/random/random_1", "mod/sor_ted/sor_ted", "run/last",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_cannot_be_written_raises_and_works_when_it_can_be(kind, tmp_path):
    """The fan-out reports it; the next record is tried again."""
    (tmp_path / "folder").write_text("a file")
    sink = kind(tmp_path / "folder" / f"m{kind.ending}")
    with pytest.raises(OSError, match="folder"):
        put(sink, 1.0)
    (tmp_path / "folder").unlink()
    put(sink, 2.0)
    sink.close()
    assert files(tmp_path / "folder") == {"m": [2.0]}


WANDB = {"project": "p", "group": "g", "mode": "offline", "config": {"a": 1}, "dir": "here"}
OPTIONS = [
    (TensorBoardSink, {"log_dir": "here"}, {"log_dir": "{cwd}/here"}),
    (TensorBoardSink, {"log_dir": None}, {}),
    (MLflowSink, {"tracking_uri": None, "experiment": None}, {}),
    (MLflowSink, {"tracking_uri": "sqlite:///x.db", "experiment": "e"}, {}),
    (MLflowSink, {"tracking_uri": "x.db", "experiment": None}, {"tracking_uri": "sqlite:///{cwd}/x.db"}),
    (MLflowSink, {"tracking_uri": "http://host:5000", "experiment": None}, {}),
    (WandbSink, WANDB, {"dir": "{cwd}/here"}),
]


@pytest.mark.parametrize(("kind", "given", "changed"), OPTIONS)
def test_options_make_the_same_sink_in_a_process_in_another_folder(kind, given, changed, tmp_path, monkeypatch):
    """As JSON has them; paths are absolute, and a file is given to MLflow as the database it is."""
    monkeypatch.chdir(tmp_path)
    expected = given | {key: text.format(cwd=tmp_path) for key, text in changed.items()}
    options = json.loads(json.dumps(kind(**given).options()))
    assert options == expected
    assert kind(**options).options() == expected
    assert kind.slow


RUN_SINKS = [cls for name in hl.sinks.__all__ if issubclass(cls := as_class(getattr(hl.sinks, name)), RunSink)]
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("kind", [cls for cls in RUN_SINKS if cls.package is not None])
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(kind, monkeypatch, tmp_path):
    """Before training, by ``check``, and at the first record; as ours and as an ImportError."""
    kind.check()
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(OptionError) as caught:
        kind.check()
    assert kind.extra in PROJECT["optional-dependencies"]
    assert f"{kind.package!r}, which is not installed" in str(caught.value)
    assert f"hookline[{kind.extra}]" in str(caught.value)
    assert isinstance(caught.value, MissingPackageError)
    assert isinstance(caught.value, ImportError)
    sink = kind("project") if kind is WandbSink else kind()

    def use() -> None:
        sink.set_run_context(strategy="any", run_dir=tmp_path)
        put(sink, 1)

    with pytest.raises(MissingPackageError):
        use()


def test_the_sinks_import_neither_torch_nor_what_they_write_for():
    """The helper process and ``hookline --help`` use them: all files of the folder."""
    heavy = "{'torch', 'numpy', 'wandb', 'tensorboard', 'mlflow', 'pyarrow', 'prometheus_client', 'rich'}"
    package = Path(sink_module.__file__).parents[1]
    names = ", ".join(
        f"hookline.{room}.{p.stem}" for room in ("records", "sinks") for p in (package / room).glob("[a-z]*.py")
    )
    code = f"import sys, {names}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_records_are_kept_in_order_with_their_moment_and_context():
    """And without aliasing what was handed in."""
    sink = hl.sinks.MemorySink()
    sink.set_run_context(strategy="shuffled")
    metrics = {"norms/total": 1.0}
    sink.emit(metrics, 0, "POST_EPOCH")
    metrics["norms/total"] = 9.0
    sink.set_run_context(strategy="sorted")
    sink.emit({"norms/total": 2.0, "loss": 0.5}, 1, "POST_EPOCH")
    sink.flush()
    assert sink.series("norms/total") == [(0, 1.0), (1, 2.0)]
    assert sink.latest == {"norms/total": 2.0, "loss": 0.5}
    assert [record.context for record in sink.records] == [{"strategy": "shuffled"}, {"strategy": "sorted"}]
    assert sink.records[1].hook_point == "POST_EPOCH"


def train(*sinks, steps: int = 5, **options) -> None:
    """Five steps with three batches a pass, a snapshot at 0, 2 and 4, and an evaluation before the first step."""
    experiment = linear_experiment(3, evaluate=lambda model: {"accuracy": 0.5})
    manager = hl.HookManager(hooks=[noting("POST_STEP", "SNAPSHOT")], sinks=list(sinks), **options)
    with manager:
        hl.step_loop(experiment, steps=steps, manager=manager, snapshot_every=2)


@pytest.mark.parametrize("rows", ["record", "step"])
def test_csv_begins_with_the_step(tmp_path, rows):
    """The first record tells what is counted."""
    sink = hl.sinks.CSVSink(tmp_path / "a.csv", rows=rows)
    train(sink)
    with (tmp_path / "a.csv").open() as file:
        found = list(csv.DictReader(file))
    assert list(found[0])[:2] == ["step", "hook_point"]
    assert "epoch" not in found[0]
    steps = ["0", "0", "2", "2", "4", "4"] if rows == "record" else ["0", "0", "1", "2", "2", "3", "4", "4"]
    assert [row["step"] for row in found if row["noting/seen"]] == steps


def test_files_have_no_epoch(tmp_path):
    """JSON lines and the log have null, Parquet an empty cell; the file of step metrics too."""
    from pyarrow import parquet

    jsonl, table = hl.sinks.JSONLSink(tmp_path / "a.jsonl"), hl.sinks.ParquetSink(tmp_path / "a.parquet")
    train(jsonl, table, log=tmp_path / "records.jsonl", step_metrics_log=tmp_path / "steps.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert {line["epoch"] for line in lines} == {None}
    assert lines[-1]["step"] == 4
    columns = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert set(columns["epoch"]) == {None}
    assert max(columns["step"]) == 4
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in steps] == [(0, None), (2, None), (4, None)]
    run = hl.load_run(tmp_path)
    assert {record.epoch for record in run.records} == {None}
    assert "epoch" not in run.to_pandas()
