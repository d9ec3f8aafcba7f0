"""What the sinks promise alike: places, options, missing packages, resumed runs, and that training is left alone."""

from __future__ import annotations

import csv
import errno
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from helpers_training import differences, train
from torch.nn.functional import cross_entropy

import hookline as hl
from hookline.error_policy import ErrorPolicy
from hookline.errors import HooklineWarning, MissingPackageError, OptionError
from hookline.records import sink as sink_module
from hookline.records.fan_out import FanOut
from hookline.records.resilient_log import ResilientLog
from hookline.records.sink import RunSink
from hookline.sinks.csv_sink import CSVSink, GrowingCSV
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.sinks.mlflow_sink import MLflowSink
from hookline.sinks.parquet_sink import ParquetParts, ParquetSink
from hookline.sinks.tensorboard_sink import TensorBoardSink
from hookline.sinks.wandb_sink import WandbSink

KINDS = [CSVSink, JSONLSink, ParquetSink]
FULL = OSError(errno.ENOSPC, "No space left on device")


def rows(path: Path) -> list[float]:
    """The values of the metric x, in order."""
    if path.suffix == ".csv":
        return [float(row["x"]) for row in csv.DictReader(path.read_text().splitlines())]
    if path.suffix == ".jsonl":
        return [json.loads(line)["x"] for line in path.read_text().splitlines()]
    from pyarrow import parquet

    return parquet.read_table(path).column("value").to_pylist()


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


PLACES = {
    CSVSink: r"CSVSink requires either filepath or \(output_dir \+ experiment_name\)",
    JSONLSink: r"does not know yet where to write.*Give it a path",
    ParquetSink: "ParquetSink requires a path",
    TensorBoardSink: "TensorBoardSink requires log_dir",
    MLflowSink: "MLflowSink requires tracking_uri",
}


@pytest.mark.parametrize("kind", PLACES)
def test_nothing_is_made_before_it_is_needed_and_without_a_place_metrics_are_dropped(kind, tmp_path, monkeypatch):
    """No file for no metrics; that metrics are dropped is said once, until there is a place."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sink = kind()
    sink.set_run_context(strategy="a", run_dir=tmp_path / "run")
    sink.emit({}, 0, "SNAPSHOT")
    sink.write(hl.records.Record({}, 0, "SNAPSHOT"))
    sink.flush()
    sink.close()
    assert list(tmp_path.iterdir()) == []
    sink = kind()
    with pytest.warns(HooklineWarning, match=PLACES[kind]):
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


WANDB = {"project": "p", "group": "g", "mode": "offline", "config": {"a": 1}, "dir": "here"}
OPTIONS = [
    (JSONLSink, {"path": "here.jsonl"}, {}),
    (JSONLSink, {"path": None}, {}),
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
    assert kind.slow is (kind is not JSONLSink)


RUN_SINKS = [cls for name in hl.sinks.__all__ if issubclass(cls := as_class(getattr(hl.sinks, name)), RunSink)]
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("kind", [cls for cls in RUN_SINKS if cls.package is not None])
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(kind, monkeypatch, tmp_path):
    """Before training, by ``check``, and at the first record; as ours and as an ImportError."""
    kind.check()
    monkeypatch.setattr(sink_module, "_is_installed", lambda module: False)
    with pytest.raises(OptionError) as caught:
        kind.check()
    assert kind.extra in PROJECT["optional-dependencies"]
    package = kind.package.partition(".")[0]
    told = f"{package!r}, which is not installed. Install it: pip install 'hookline[{kind.extra}]'."
    assert str(caught.value) == f"{kind.__name__} needs the package {told}"
    assert isinstance(caught.value, MissingPackageError)
    assert isinstance(caught.value, ImportError)
    sink = kind("project") if kind is WandbSink else kind()

    def use() -> None:
        sink.set_run_context(strategy="any", run_dir=tmp_path)
        put(sink, 1)

    with pytest.raises(MissingPackageError):
        use()


def test_what_is_installed_is_found_without_importing_it():
    """Also parts of packages that are missing, and modules made by hand."""
    assert sink_module._is_installed("wandb")
    assert not sink_module._is_installed("no_such_package.part")


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


@pytest.mark.parametrize("kind", [cls for cls in RUN_SINKS if cls not in (MLflowSink, WandbSink)])  # seconds each
def test_writing_changes_nothing_in_training(kind, tmp_path):
    """The house test: bit for bit; and a sink that draws a random number is found out."""
    sink = kind()
    sink.set_run_context(strategy="random", run_dir=tmp_path)
    losses = []

    def step(model, x, target, *, draw=False):
        loss = cross_entropy(model(x), target)
        loss.backward()
        sink.emit({"x": loss, f"at {time.monotonic()}": [0.5]}, len(losses), "POST_STEP")
        losses.append(loss.item())
        if draw:
            torch.rand(1)

    plain = train(lambda model, x, target: cross_entropy(model(x), target).backward())
    assert differences(train(step), plain) == []
    assert differences(train(lambda *given: step(*given, draw=True)), plain) != []
    sink.close()
    if kind is CSVSink:
        assert files(tmp_path) == {"random": losses}
    if kind is JSONLSink:
        assert rows(tmp_path / "random.jsonl") == losses


# -- resumed runs ---------------------------------------------------------------------------------------------


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
    fan_out.write(hl.records.Record({"x": 1.0}, 0, "POST_EPOCH"))
    with monkeypatch.context() as patch:
        patch.setattr(*method, lambda *_: (_ for _ in ()).throw(FULL))
        fan_out.set_run_context(strategy="b", run_dir=tmp_path / "b")
    fan_out.write(hl.records.Record({"x": 2.0}, 0, "POST_EPOCH"))
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
    keeper.append(hl.records.Record({"x": 1.0}, 0, "POST_EPOCH"))
    size = (tmp_path / "records.jsonl").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.write_table", lambda *_, **__: (_ for _ in ()).throw(FULL))
        patch.setattr("hookline.records.log.LineFile.write", lambda *_: (_ for _ in ()).throw(FULL))
        keeper.append(hl.records.Record({"x": 2.0}, 0, "POST_EPOCH"))
        assert sink.state_dict() == {"path": str(tmp_path / "a.parquet"), "rows": 1}
        assert keeper.state_dict() == {"bytes": size, "number": 1}
    sink.close()
    keeper.close()
    assert rows(tmp_path / "a.parquet") == [1.0, 2.0]
