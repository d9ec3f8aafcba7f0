"""From folders to a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers_report import facts, ill_run, small_run

from hookline.errors import OptionError
from hookline.records.log import Context, RecordLog
from hookline.records.sink import Record
from hookline.report import report_page as page
from hookline.report.loaded_run import load_runs
from hookline.report.metric_series import Collector
from hookline.report.report_page import write_report
from hookline.report.report_runs import read_runs


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
    """Asked, found, next."""
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
