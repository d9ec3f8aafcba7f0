"""The commands beside ``run``; what ``--json`` prints, and what the page about them shows."""

from __future__ import annotations

import json
import re
import shlex
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_cli import EXPERIMENTS, TINY, facts_of, records_of, run_here
from helpers_waiting import PATIENCE, until

import hookline as hl
from hookline.analyses import BUILT_IN
from hookline.cli import commands
from hookline.cli.main import main
from hookline.runs import build

QUIET = ("--silent", "--no-report")


@pytest.mark.parametrize("arguments", [("hooks",), ("run", "--hooks-list")])
def test_all_hooks_are_listed_with_what_they_do(arguments, capsys):
    """Those for debugging too, marked; wide enough that no name is cut."""
    assert run_here(*arguments) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert list(lines).index("observer") < list(lines).index("norms") < list(lines).index("intervention")
    assert list(lines).index("intervention") < list(lines).index("hessian")
    assert "length of the gradient before and after clipping" in lines["norms"]
    assert "(for debugging)" in lines["counterfactual_validator"]
    assert {"first_bad_operation", "flight_recorder"} <= lines.keys()
    assert f"{len(BUILT_IN) + 2} hooks" in out


@pytest.mark.parametrize(
    ("what", "pattern", "names"),
    [
        (f"{EXPERIMENTS}:make_model", "*", ["(the model)", "0", "1", "1.0", "1.1"]),
        (f"{EXPERIMENTS}:make_model", "1.#", ["1.0", "1.1"]),
        (TINY, "3", ["3"]),
        ("torch.nn:ReLU", "*", ["(the model)"]),
    ],
)
def test_find_prints_the_modules_of_a_pattern(what, pattern, names, capsys):
    """A function, an experiment, a class of a package."""
    assert run_here("find", what, pattern) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[2:-1]] == names
    inside = [name for name in names if name != "(the model)"]
    count = f"{len(inside)} module{'s' * (len(inside) != 1)}"
    assert lines[-1] == (count if inside == names else f"the model and {count}")


# -- report and replay -----------------------------------------------------------------------------------------


def test_a_page_is_made_of_one_run_and_of_two(tmp_path, capsys):
    """By the folders of the runs, or one above them, which has the page if it holds several."""
    assert run_here("run", TINY, "--epochs", "1", "--hooks", *QUIET) == 0
    capsys.readouterr()
    assert run_here("report", "runs") == 0
    heard = capsys.readouterr()
    assert "Could not judge the loss" in heard.err
    page = Path(heard.out.strip())
    assert page == Path("runs/tiny/forward/report.html")
    assert "<html" in page.read_text(encoding="utf-8")[:300]
    assert run_here("run", TINY, "--epochs", "1", "--hooks", "--strategy", "backward", *QUIET) == 0
    capsys.readouterr()
    assert run_here("report", "runs/tiny/forward", "runs/tiny/backward/records.jsonl", "-o", "both.html") == 0
    assert capsys.readouterr().out.strip() == "both.html"
    assert Path("both.html").exists()
    assert run_here("report", "runs") == 0
    assert Path(capsys.readouterr().out.strip()) == Path("runs/report.html")
    assert "<title>tiny / backward · tiny / forward" in Path("runs/report.html").read_text(encoding="utf-8")


def test_a_live_page_is_written_until_its_run_has_ended(monkeypatch, capsys):
    """While the run goes on the page loads itself anew, and the last one does not."""
    monkeypatch.setattr(commands, "_PAGE_EVERY", 0.05)
    codes = []
    folder = Path("late")
    folder.mkdir()
    (folder / "run.json").write_text('{"status": "running"}')
    live = threading.Thread(target=lambda: codes.append(run_here("report", "--live", "late")), daemon=True)
    live.start()
    page = folder / "report.html"
    until(lambda: page.exists() and 'data-live="0.05"' in page.read_text(encoding="utf-8")[:200])
    (folder / "run.json").write_text('{"status": "finished"}')
    live.join(PATIENCE)
    assert codes == [0]
    assert "data-live" not in page.read_text(encoding="utf-8")[:200]
    assert "Could not judge the loss" in capsys.readouterr().err


@pytest.mark.parametrize(("to", "name"), [("csv", "forward.csv"), ("jsonl", "forward.jsonl")])
def test_a_replayed_run_is_what_the_sink_would_have_written(tmp_path, to, name, capsys):
    """The same file as of the run that had the sink from the start."""
    assert run_here("run", TINY, "--epochs", "2", "--hooks", "norms", f"--hook-{to}", *QUIET) == 0
    folder = tmp_path / "runs" / "tiny" / "forward"
    there = (folder / name).read_text()
    assert run_here("replay", folder, "--to", to, "--into", f"again.{to}") == 0
    assert Path(f"again.{to}").read_text() == there
    assert f"is replayed to {to}" in capsys.readouterr().out
    (folder / name).unlink()
    assert run_here("replay", folder, "--to", to) == 0  # into the run's folder, by the name it would have had
    assert (folder / name).read_text() == there
    capsys.readouterr()
    assert run_here("replay", folder, "--to", to) == 0
    another = folder / f"forward_1.{to}"  # the file that is there is left alone
    assert another.read_text() == there
    assert f"into {another}." in capsys.readouterr().out


def test_a_run_that_was_moved_is_replayed_where_it_is_now(tmp_path):
    """The contexts in its log name the old folder, which does not come back."""
    assert run_here("run", TINY, "--epochs", "1", "--hooks", "norms", *QUIET) == 0
    moved = (tmp_path / "runs").rename(tmp_path / "archive") / "tiny" / "forward"
    assert run_here("replay", moved, "--to", "csv") == 0
    assert (moved / "forward.csv").exists()
    assert not (tmp_path / "runs").exists()


def test_an_unknown_sink_is_answered_with_all_there_are(capsys, monkeypatch):
    """Those without a flag and those of other packages among them; the help of the command has the same names."""
    assert run_here("replay", "--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("console", "memory", "prometheus", "csv"))
    monkeypatch.setattr(build, "entry_points", lambda group: [SimpleNamespace(name="postgres")])
    with pytest.raises(hl.errors.OptionError, match=r"Did you mean 'memory'\? There are: .*console.*memory.*postgres"):
        build.sink_class("memry")


# -- new -------------------------------------------------------------------------------------------------------


def test_a_new_experiment_runs_as_it_is(tmp_path, capsys):
    """By its class, in both strategies, with its group of hooks; it learns."""
    assert run_here("new", "experiment", "my_parity.py") == 0
    assert "hookline run my_parity.py:MyParity" in capsys.readouterr().out
    flags = ("--strategy", "all", "--with-hooks", "observers", *QUIET)
    assert run_here("run", "my_parity.py:MyParity", *flags) == 0
    for strategy in ("shuffled", "ordered"):
        facts = facts_of(tmp_path / "runs" / "my_parity" / strategy)
        assert facts["result"]["metrics"]["val_acc"] > 0.8
        assert set(facts["hooks"]) == {"training_metrics", "norms", "parameter_delta"}


def test_a_new_hook_keeps_what_hooks_promise(tmp_path):
    """`check_hook` finds nothing; it runs from its file with an argument."""
    from hookline.load import load_object
    from hookline.testing import check_hook

    assert run_here("new", "hook", "far.py") == 0
    check_hook(load_object("far.py:Far", wanted="a hook"))
    assert run_here("run", TINY, "--hooks", "far.py:Far", "--hook-config", "far.order=1", *QUIET) == 0
    values = [
        r["metrics"]["far/moved"] for r in records_of(tmp_path / "runs/tiny/forward") if "far/moved" in r["metrics"]
    ]
    assert len(values) == 1
    assert values[0] > 0


def test_a_new_sink_takes_metrics(tmp_path):
    assert run_here("new", "sink", "newest") == 0
    assert run_here("run", TINY, "--epochs", "1", "--hooks", "--hook-sink", "newest.py:Newest", *QUIET) == 0
    assert "training_metrics/loss = " in (tmp_path / "runs/tiny/forward/newest.txt").read_text()


def test_what_is_there_stays(capsys):
    """Also where the name is one of no class."""
    Path("there.py").write_text("mine")
    for file, said in (("there.py", "there.py is there already"), ("1st.py", "A class cannot be named after '1st.py'")):
        assert run_here("new", "hook", file) == 2
        assert said in capsys.readouterr().err
    assert Path("there.py").read_text() == "mine"


MODEL = """
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""
SPECS = [{"name": "shapes", "target_modules": ["0"], "hook_factory": "hookline.factories:nan_alarm", "config": {}}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a file of hooks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "hooks.json").write_text(json.dumps(SPECS))
    return tmp_path


def printed(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(words) == code
    return json.loads(capsys.readouterr().out)


def test_the_json_says_what_the_table_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and numbers, not only keys."""
    modules = printed(["find", "model.py:make_model", "#", "--json"], 0, capsys)["modules"]
    assert [(each["name"], each["type"], each["parameters"]) for each in modules] == [
        ("0", "Linear", 40),
        ("1", "ReLU", 0),
        ("2", "Linear", 18),
    ]
    checked = printed(["check", "hooks.json", "--json"], 0, capsys)
    assert checked["hooks"] == [{"name": "shapes", "on": "forward", "target_modules": ["0"], "enabled": True}]
    (norms,) = printed(["hooks", "norms", "--json"], 0, capsys)["hooks"]
    assert "total_norm" in [metric["name"] for metric in norms["metrics"]]


def test_a_plan_is_json_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what its table says, and makes nothing."""
    plan = printed(["run", TINY, "--hooks", "norms", "hessian", "stats", "--dry-run", "--json"], 0, capsys)
    assert plan["version"] == 2
    assert [row["hook"] for row in plan["hooks"] if row["point"] == "POST_EPOCH"][:2] == ["training_metrics", "norms"]
    assert not Path(plan["files"][0]["folder"]).exists()


PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
RUN_FILE = "experiment: parity.py:Parity\nconfig: {epochs: 3, lr: 1e-3}\nhooks:\n  with_hooks: observers\n  confg: {}\n"


def blocks() -> list[tuple[str, str]]:
    """Every command of the page, with what it prints."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for command, _, output in (part.partition("\n") for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]):
            found.append((command, output))
    return found


def test_the_console_blocks_of_the_page_are_what_is_printed(capsys, monkeypatch):
    """One after the other in one folder; ``…`` stands for what differs from run to run."""
    monkeypatch.setenv("COLUMNS", "110")
    Path("run.yaml").write_text(RUN_FILE)
    shown = blocks()
    assert len(shown) >= 10
    for command, output in shown:
        words = shlex.split(command)
        assert words[0] == "hookline"
        run_here(*words[1:])
        heard = capsys.readouterr()
        pattern = re.escape(output).replace("…", "[^\n]*")
        assert re.fullmatch(pattern, heard.out + heard.err), f"$ {command}\n{heard.out}{heard.err}"
