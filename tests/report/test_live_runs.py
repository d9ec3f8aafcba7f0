"""Runs that are followed while another process writes them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_report import facts, small_run
from test_pack import _unpacked

from hookline.errors import OptionError
from hookline.report import follow_log
from hookline.report.follow_log import LogFollower
from hookline.report.live_runs import LiveCollector, LiveRuns
from hookline.sinks.record_log import RecordLog
from hookline.sinks.sink import Record, StepSeries


def _append(log: RecordLog, *steps: int, value: float = 1.0) -> None:
    for step in steps:
        log.append(Record({"a/x": value}, step, "POST_STEP", step, "s"))


def _steps(follower: LogFollower) -> tuple[list[int | None], bool]:
    news = follower.news()
    return [entry.step for entry in news.entries if isinstance(entry, Record)], news.is_anew


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is parsed once, in pieces if there is much; half a line waits for its end; odd ones are passed over."""
    parsed = []
    parse = follow_log.parse_line
    monkeypatch.setattr(follow_log, "parse_line", lambda line: parsed.append(line) or parse(line))
    path = tmp_path / "records.jsonl"
    follower = LogFollower(path, most=200)
    assert _steps(follower) == ([], False)  # not there yet
    log = RecordLog(path)
    _append(log, *range(10))
    found, shares = [], []
    while True:
        news = follower.news()
        found += [entry.step for entry in news.entries]
        shares.append(news.share)
        if news.share == 1.0:
            break
    assert found == list(range(10))
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert _steps(follower) == ([], False)
    _append(log, 10)
    line = (
        path.read_bytes()
        .splitlines(keepends=True)[-1]
        .replace(b'"n":10', b'"n":11')
        .replace(b'"step":10', b'"step":11')
    )
    with path.open("ab") as file:
        file.write(line[:20])
    assert _steps(follower) == ([10], False)
    with path.open("ab") as file:
        file.write(line[20:] + b'garbage\n{"n":"x","metrics":3}\n')
    assert _steps(follower) == ([11], False)
    log.close()
    follower.close()
    assert len(parsed) == 14


def test_a_log_that_is_cut_back_is_read_once_more(tmp_path: Path) -> None:
    """As when a run is resumed: seen while it is short, or when it has grown past where it was."""
    path = tmp_path / "records.jsonl"
    follower = LogFollower(path)
    log = RecordLog(path)
    _append(log, 0, 1)
    state = log.state_dict()
    _append(log, 2, 3)
    assert _steps(follower) == ([0, 1, 2, 3], False)
    log.load_state_dict(state)
    assert _steps(follower) == ([0, 1], True)
    _append(log, 2, value=5.0)
    assert _steps(follower) == ([2], False)
    log.load_state_dict(state)
    _append(log, 2, 3, 4, 5, value=7.0)
    assert _steps(follower) == ([0, 1, 2, 3, 4, 5], True)
    log.close()
    follower.close()


def test_a_log_that_is_rotated_goes_on_and_another_run_begins_anew(tmp_path: Path) -> None:
    """By the numbers of records; what was left in the old file is read first."""
    path = tmp_path / "records.jsonl"
    follower = LogFollower(path)
    log = RecordLog(path)
    log.append_context({"strategy": "s"})
    _append(log, 0, 1, 2)
    assert _steps(follower) == ([0, 1, 2], False)
    _append(log, 3)
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.rename(tmp_path / "records.jsonl.1")
    assert _steps(follower) == ([3], False)  # there is no other file yet
    path.write_bytes(lines[-1].replace(b'"n":3', b'"n":4').replace(b'"step":3', b'"step":4'))
    assert _steps(follower) == ([4], False)
    path.write_bytes(lines[-1].replace(b'"n":3', b'"n":5').replace(b'"step":3', b'"step":5'))  # copied and emptied
    assert _steps(follower) == ([5], False)
    path.unlink()
    log = RecordLog(path)
    log.append_context({"strategy": "t"})
    _append(log, 0)
    log.close()
    news = follower.news()
    assert news.is_anew
    assert [type(entry).__name__ for entry in news.entries] == ["Context", "Record"]
    follower.close()


def _header(packed: bytes | None) -> dict[str, Any]:
    assert packed is not None
    return _unpacked(packed)[0]


def test_runs_are_followed_and_packed_when_something_is_new(tmp_path: Path) -> None:
    """Equal names are told apart each time, new runs come last, a folder that is removed costs nothing else."""
    small_run(tmp_path / "b")
    small_run(tmp_path / "c", facts_of=facts(status="running"))
    runs = LiveRuns([tmp_path], share=1.0)
    version, packed = runs.newest()
    assert runs.newest(version) == (version, None)
    names = ["digits / default (b)", "digits / default (c)"]
    assert [run["name"] for run in _header(packed)["runs"]] == names
    small_run(tmp_path / "a", facts_of={"experiment": "other"})
    (tmp_path / "c" / "run.json").write_text(json.dumps(facts(status="finished")))
    later, packed = runs.newest(version)
    assert later > version
    header = _header(packed)
    assert [run["name"] for run in header["runs"]] == [*names, "other / default"]
    assert header["runs"][1]["facts"]["status"] == "finished"
    assert header["live"]["news"][0] == pytest.approx(os.stat(tmp_path / "b" / "records.jsonl").st_mtime)
    runs.close()
    with pytest.raises(OptionError, match="no such folder"):
        LiveRuns([tmp_path / "nowhere"])


def test_looking_takes_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look of 2 seconds, the next one is 18 seconds later at the earliest; until then what is known is told."""
    from hookline.report import live_runs

    clock = [100.0]
    monkeypatch.setattr(live_runs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    run = small_run(tmp_path)
    runs = LiveRuns([run], share=0.1)
    pack = runs._pack
    monkeypatch.setattr(runs, "_pack", lambda: (clock.__setitem__(0, clock[0] + 2), pack())[1])
    version, _ = runs.newest()
    (run / "run.json").unlink()
    clock[0] += 17
    assert runs.newest(version) == (version, None)
    clock[0] += 2
    assert runs.newest(version)[0] == version + 1
    runs.close()


def test_a_run_without_an_end_keeps_a_bounded_number_of_points() -> None:
    """The longest curves are thinned, with their peaks and what is not finite; short ones stay as they are."""
    collected = LiveCollector()
    for block in range(40):
        steps = range(500 * block, 500 * block + 500)
        values = [math.sin(step) for step in steps]
        values[7] = {3: 9.0, 5: math.nan}.get(block, values[7])
        metrics = {"a/long": StepSeries(values, steps), "a/short": float(block), "a/list": [float(block)]}
        collected.take(Record(metrics, block, "POST_STEP", steps[-1], "s"))
        collected.series()  # what was handed out does not keep it from growing
        collected.shrink(4000)
    long, short = collected.series().curves
    assert 1500 < long.steps.size <= 4000
    assert (long.steps[0], long.values.max(initial=-9, where=~(long.values != long.values))) == (0, 9.0)
    assert any(math.isnan(value) for value in long.values)
    assert long.steps[-1] >= 19_900
    assert short.values.tolist() == [float(block) for block in range(40)]
    assert collected.is_thinned
