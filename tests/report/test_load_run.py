"""Runs read back into Python, whatever became of them; and from folders to a page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas
import pytest
from helpers_report import facts, ill_run, small_run

import hookline as hl
from hookline import HookPoint
from hookline.errors import OptionError
from hookline.records import Record, StepSeries
from hookline.records.log import Context, RecordLog
from hookline.report import report_page as page
from hookline.report.loaded_run import load_runs
from hookline.report.metric_series import Collector
from hookline.report.report_page import write_report
from hookline.report.report_runs import read_runs

EXPERIMENTS = Path(__file__).parent.parent / "cli" / "experiments.py"


def write(folder: Path, *records: Record, context: dict | None = None, **more) -> Path:
    """A folder as a run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = RecordLog(folder / "records.jsonl")
    if context is not None:
        log.append(Context(context))
    for record in records:
        log.append(record)
    log.close()
    if more:
        (folder / "run.json").write_text(json.dumps(facts(**more)))
    return folder


def at(epoch: int, step: int | None, point: str = "POST_EPOCH", rank: int = 0, **metrics) -> Record:
    return Record({name.replace("__", "/"): value for name, value in metrics.items()}, epoch, point, step, rank=rank)


@pytest.fixture
def run(tmp_path):
    """Two epochs of two steps, with every kind of value."""
    first = {"norms/total": StepSeries([1.0, math.nan], [0, 1]), "norms/top": [3.0, math.inf], "note/text": "warm"}
    second = {"norms/total": StepSeries([2.0, 4.0], [2, 3]), "norms/top": [1.0], "tree/a": {"b": {"c": 5}, "d": 0.5}}
    return write(
        tmp_path / "digits" / "default",
        Record({"loss": 9.0}, 0, HookPoint.PRE_EPOCH, None),
        Record(first, 0, HookPoint.POST_EPOCH, 1),
        Record(second, 1, HookPoint.POST_EPOCH, 3),
        name="digits",
    )


# -- what comes back -------------------------------------------------------------------------------------------


def test_records_and_settings_come_back(run):
    """In order, with what JSON has no word for."""
    loaded = hl.load_run(run)
    assert (loaded.name, loaded.folder, len(loaded.records), loaded.remarks) == ("digits / default", run, 3, [])
    assert [record.step for record in loaded.records] == [None, 1, 3]
    assert loaded.records[1].hook_point is HookPoint.POST_EPOCH
    assert loaded.settings["config"]["learning_rate"] == 0.003
    assert loaded.settings["result"]["steps"] == 200
    assert loaded.metrics == ["loss", "norms/total", "norms/top", "note/text", "tree/a/b/c", "tree/a/d"]


def test_a_series_is_steps_and_values(run):
    """Of single steps each has its own; NaN is a value; lists and text are objects; before the first step is -1."""
    loaded = hl.load_run(run)
    steps, values = loaded.series("norms/total")
    assert (steps.dtype, values.dtype, steps.tolist()) == (np.int64, np.float64, [0, 1, 2, 3])
    np.testing.assert_array_equal(values, [1.0, math.nan, 2.0, 4.0])
    steps, values = loaded.series("norms/top")
    assert (steps.tolist(), values.dtype, values.tolist()) == ([1, 3], object, [[3.0, math.inf], [1.0]])
    assert loaded.series("note/text")[1].tolist() == ["warm"]
    assert [each.tolist() for each in loaded.series("tree/a/b/c")] == [[3], [5.0]]
    assert [each.tolist() for each in loaded.series("loss")] == [[-1], [9.0]]
    assert loaded.latest["norms/total"] == 4.0


def test_a_table_of_pandas_has_a_row_for_each_step(run):
    """A column for each metric, the epoch first; NaN where nothing was recorded."""
    table = hl.load_run(run).to_pandas()
    assert (table.index.name, table.index.tolist()) == ("step", [-1, 0, 1, 2, 3])
    assert table.columns.tolist() == ["epoch", *hl.load_run(run).metrics]
    assert (table["epoch"].dtype, table["epoch"].tolist()) == (np.int64, [0, 0, 0, 1, 1])
    assert table["norms/total"].dtype == np.float64
    np.testing.assert_array_equal(table["norms/total"], [math.nan, 1.0, math.nan, 2.0, 4.0])
    assert table["norms/top"].loc[1] == [3.0, math.inf]
    assert table["note/text"].dropna().tolist() == ["warm"]
    assert table["norms/total"].mean() == pytest.approx(7 / 3)


def test_a_run_that_was_killed_is_read_as_far_as_it_got(run):
    """A line that was half written counts for nothing; without run.json, the log says what it knows."""
    with (run / "records.jsonl").open("ab") as file:
        file.write(b'{"n":3,"time":1.0,"epoch":2,"step":5,"point":"POST_EPOCH","strat')
    (run / "run.json").unlink()
    loaded = hl.load_run(run)
    assert len(loaded.records) == 3
    assert loaded.series("norms/total")[0].tolist() == [0, 1, 2, 3]
    assert any("run.json" in remark for remark in loaded.remarks)


def test_several_runs_come_by_name(tmp_path):
    """Of a folder that holds them, or of a list; one is read by load_run, several are not."""
    one = write(tmp_path / "digits" / "a", at(0, 0, m__x=1.0), strategy="a")
    two = write(tmp_path / "digits" / "b", at(0, 0, m__x=2.0), strategy="b")
    for given in (tmp_path, tmp_path / "digits", [one, two / "records.jsonl"]):
        loaded = hl.load_runs(given)
        assert {name: run.latest["m/x"] for name, run in loaded.items()} == {"digits / a": 1.0, "digits / b": 2.0}
    assert hl.load_run(two / "records.jsonl").folder == two
    with pytest.raises(
        hl.errors.OptionError, match=r"holds 2 runs \('digits / a', 'digits / b'\); read them with load_runs"
    ):
        hl.load_run(tmp_path)


# -- a real one ------------------------------------------------------------------------------------------------


def test_a_run_of_the_command_line_comes_back(tmp_path, monkeypatch):
    """Stopped and resumed: each step once, and the table has what the log has."""
    from hookline.cli.main import main

    monkeypatch.chdir(tmp_path)
    arguments = ["run", f"{EXPERIMENTS}:Tiny", "--hooks", "norms", "--no-report", "--silent"]
    assert main([*arguments, "--epochs", "2", "--save-checkpoints", "1"]) == 0
    (folder,) = hl.load_runs("runs").values()
    loaded = hl.load_run(folder.folder)
    log = [found for found in hl.records.read_log(folder.folder) if isinstance(found, Record)]
    assert loaded.records == log
    assert loaded.settings["status"] == "finished"
    table = loaded.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table.index.is_unique
    for name in loaded.metrics:
        steps, values = loaded.series(name)
        assert table[name].loc[steps].tolist() == values.tolist()
    assert any(name.startswith("norms/") for name in loaded.metrics)
    assert main([*arguments, "--epochs", "4", "--save-checkpoints", "1", "--resume", "--force"]) == 0
    resumed = hl.load_run(folder.folder)
    steps, values = resumed.series("training_metrics/loss")
    assert steps.tolist() == sorted(set(steps.tolist()))
    assert len(values) == 2 * len(loaded.series("training_metrics/loss")[0])


def test_the_page_lies_beside_the_run_unless_told_otherwise(tmp_path: Path) -> None:
    """It replaces an older one, and leaves nothing else behind."""
    run = small_run(tmp_path / "run")
    before = {file.name for file in run.iterdir()}
    assert write_report([run]) == run / "report.html"
    assert write_report(run) == run / "report.html"
    assert {file.name for file in run.iterdir()} - before == {"report.html"}
    assert write_report([run], tmp_path / "new" / "folder" / "x.html").stat().st_size > 100_000
    assert write_report([run / "records.jsonl"]) == run / "report.html"


def test_a_run_is_called_what_the_user_said(tmp_path: Path) -> None:
    """In its title and heading too; of several strategies in one log, each has its own besides."""
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(Record({"a/x": 1.0}, 0, "POST_EPOCH", 0, "first"))
    (tmp_path / "run.json").write_text(json.dumps(facts(strategy="first") | {"name": "a <b>"}))
    assert list(load_runs(tmp_path)) == ["a <b>"]
    assert "<title>a &lt;b&gt;" in write_report(tmp_path).read_text()
    log.append(Record({"a/x": 1.0}, 0, "POST_EPOCH", 0, "second"))
    log.close()
    assert list(load_runs(tmp_path)) == ["a <b> / first", "a <b> / second"]


def test_a_folder_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    run = small_run(tmp_path / "runs" / "digits" / "default")
    with pytest.raises(OptionError, match=r"no run at .*digitz.*There are: .*default\."):
        write_report([tmp_path / "runs" / "digitz"])
    with pytest.raises(OptionError, match="at least one run"):
        write_report([])
    assert not (run / "report.html").exists()


def test_a_loss_that_is_finite_has_no_perplexity_that_is_not(tmp_path: Path) -> None:
    """It rises to 800, of which the perplexity is too large for a float: the loss is told, and no "NaN or Inf"."""
    log = RecordLog(tmp_path / "records.jsonl")
    for step, loss in enumerate([*[4.0] * 20, 800.0]):
        values = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        log.append(Record({f"training_metrics/{name}": value for name, value in values.items()}, 0, "POST_STEP", step))
    log.close()
    found = page.write_page(tmp_path).found
    assert any("Loss spikes" in line for line in found)
    assert not any("NaN or Inf" in line for line in found)


def test_strategies_in_one_log_are_runs_of_their_own(tmp_path: Path) -> None:
    """A record that names none belongs to the one that is going on."""
    log = RecordLog(tmp_path / "records.jsonl")
    for strategy in ("random", "stride"):
        log.append(Context({"strategy": strategy, "experiment_name": "mod"}))
        log.append(Record({"a/x": 1.0}, 0, "POST_EPOCH", 0, strategy))
        log.append(Record({"a/x": 2.0}, 1, "POST_EPOCH", 1))
    log.close()
    runs = read_runs(tmp_path, Collector)
    assert [run.name for run in runs] == ["mod / random", "mod / stride"]
    assert [run.collected.series().curves[0].values.tolist() for run in runs] == [[1.0, 2.0]] * 2
    assert [run.latest["a/x"] for run in load_runs(tmp_path).values()] == [2.0, 2.0]


def test_a_log_that_is_damaged_in_the_middle_gives_the_rest(tmp_path: Path) -> None:
    """Lines that cannot be read are passed over."""
    run = ill_run(tmp_path)
    log = run / "records.jsonl"
    log.write_bytes(b"\x00\xff garbage\n" + log.read_bytes() + b'{"n":1,"time"')
    (found,) = read_runs(run, Collector)
    assert found.collected.num_records == 1


def test_what_is_too_much_for_a_page_is_thinned_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays small; the log has everything."""
    run = small_run(tmp_path)
    whole = write_report([run], tmp_path / "whole.html").stat().st_size
    monkeypatch.setattr(page, "_MAX_VALUES", 4000)
    (data,) = read_runs(run, Collector)
    judged = page.judge(data)
    assert page._max_points([judged.series], 4000) == 100
    assert "200 points are drawn by 100" in page._run(judged, page.Packer(), 100)["remarks"][-1]
    assert write_report([run], tmp_path / "thin.html").stat().st_size < whole


def test_facts_of_the_wrong_shape_are_left_out(tmp_path: Path) -> None:
    """The page takes hooks, results and versions apart, so they have to be what they should be."""
    run = small_run(tmp_path, facts_of={"git": None, "model": 3, "hooks": {"a": 1, "b": {"metrics": "x"}}, "seed": 7})
    (found,) = read_runs(run, Collector)
    assert found.facts == {"seed": 7, "hooks": {"b": {"metrics": []}}, "strategy": "default"}
    (tmp_path / "foreign").mkdir()
    log = RecordLog(tmp_path / "foreign" / "records.jsonl")  # of another program: what it says stands in its context
    log.append(Context({"hooks": ["a"], "model": 3, "lr": 0.1}))
    log.append(Record({"a/x": [1.0, 2.0]}, 0, "POST_EPOCH", 0))
    log.close()
    (found,) = read_runs(tmp_path / "foreign", Collector)
    assert found.facts == {"hooks": {}, "lr": 0.1}
    write_report(tmp_path / "foreign")
