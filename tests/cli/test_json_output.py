"""What ``--json`` prints, and that every command with a table has it."""

from __future__ import annotations

import ast
import copy
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_cli import TINY
from torch import nn

import hookline as hl
from hookline.cli import screen
from hookline.cli.main import COMMANDS as ALL_COMMANDS
from hookline.cli.main import main
from hookline.tables import Table

MODEL = """
import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].register_forward_hook(print)
    model[0].register_forward_hook(print)
    return model


def train():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def draws(module, args, output):
    torch.rand(1)
"""
SPECS = [
    {"name": "shapes", "target_modules": ["0", "9"], "hook_factory": "hookline.factories:log_shapes", "config": {}}
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a file of hooks, and two traces that differ."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "hooks.json").write_text(json.dumps(SPECS))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    other = copy.deepcopy(model)
    other[0].weight.data[0] = float("nan")
    for name, one in {"a": model, "b": other}.items():
        with hl.trace(one, to=tmp_path / name, kinds=("input", "output")), torch.no_grad():
            one(torch.ones(2, 4))
    return tmp_path


COMMANDS = {
    "audit": (["audit", "--train", "model.py:train", "--hooks", "model.py:draws"], 1),
    "check": (["check", "hooks.json", "--model", "model.py:make_model", "--no-strict"], 0),
    "compare": (["compare", "a", "b"], 1),
    "doctor": (["doctor", "model.py:make_model"], 1),
    "dry-run": (["run", TINY, "--hooks", "norms", "hessian", "stats", "--dry-run"], 0),
    "find": (["find", "model.py:make_model", "#"], 0),
    "hooks": (["hooks"], 0),
    "run": (["run", TINY, "--epochs", "1", "--hooks", "norms", "--profile-hooks", "--no-report"], 0),
}
OTHERS = [
    ["run", "--hooks-list"],
    ["run", "--hooks-describe", "norms"],
    ["hooks", "norms"],
    ["schema"],
    ["report", "runs/tiny/forward", "-o", "page.html"],
    ["replay", "runs/tiny/forward", "--to", "jsonl", "--into", "all.jsonl"],
    ["new", "hook", "new.py"],
    ["serve", "--help"],
]
"""Forms of commands beside those of `COMMANDS`; a server prints addresses."""


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
    checked = printed([*COMMANDS["check"][0], "--json"], 0, capsys)
    assert checked["hooks"] == [{"name": "shapes", "on": "forward", "target_modules": ["0", "9"], "matches": "0"}]
    assert [text.partition(" in ")[0] for text in checked["warnings"]] == ["hook 'shapes': No module matches '9'"]
    (norms,) = printed(["hooks", "norms", "--json"], 0, capsys)["hooks"]
    assert "total_norm" in [metric["name"] for metric in norms["metrics"]]


def test_a_comparison_says_which_limit_it_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below the table, with what the columns mean and how to change it; and in the JSON."""
    assert main(["compare", "a", "b"]) == 1
    columns, limit = capsys.readouterr().out.splitlines()[-2:]
    assert all(f"{name}: " in columns for name in ("call", "max abs", "rel L2", "rounding"))
    assert limit.startswith("Limit: 3 times rounding (modelled). To change it: --threshold")
    given = ["compare", "a", "b", "--threshold", "0=1e-3", "--atol", "0.5"]
    assert main(given) == 1
    assert "Limit: rel_l2 0.001 at '0', else atol 0.5. To" in capsys.readouterr().out
    told = printed([*given, "--json"], 1, capsys)["limit"]
    assert told["thresholds"] == {"0": {"rel_l2": 0.001}}
    assert (told["atol"], told["rtol"], told["noise"]) == (0.5, None, "modelled")


# -- tables ------------------------------------------------------------------------------------------------------


class Drawn:
    """The tables that were drawn, and the modules of the command line that did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.modules: set[str] = set()
        for owner, name in (("rich.table.Table", "add_row"), ("hookline.tables.Table", "text")):
            monkeypatch.setattr(f"{owner}.{name}", self._noted(getattr(Table if "hook" in owner else _rich(), name)))

    def _noted(self, draw: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            self.count += 1
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None:
                self.modules.add(frame.f_globals["__name__"])
                frame = frame.f_back
            return draw(*args, **options)

        return noted

    def by(self, words: list[str]) -> int:
        """How many were drawn by a command; a mistake in its flags leaves at once."""
        before = self.count
        try:
            main(words)
        except SystemExit:  # of --help, or of a --json that there is not
            assert words[-1].startswith("--")
        return self.count - before


def _rich() -> Any:
    from rich.table import Table as RichTable

    return RichTable


def without_json(forms: list[list[str]], drawn: Drawn, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The forms that draw a table, and with ``--json`` do not print JSON of a known format instead."""
    found = []
    for words in forms:
        if not drawn.by(words) and words in OTHERS:
            continue
        capsys.readouterr()
        drawn.by([*words, "--json"])
        try:
            told = json.loads(capsys.readouterr().out)
            assert told["format"].removeprefix("hookline.") in COMMANDS
            assert told["version"] >= 1
        except ValueError:
            found.append(" ".join(words))
    return found


def printers() -> set[str]:
    """The modules of the command line that print tables of their own."""
    found = set()
    for path in Path(screen.__file__).parent.glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        if any(alias.name == "print_table" for node in imports for alias in node.names):
            found.add(f"hookline.cli.{path.stem}")
    return found


def test_every_command_that_prints_a_table_has_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command and every module that prints is run; control: a command with a table and no ``--json``."""
    forms = [words for words, _ in COMMANDS.values()] + OTHERS
    assert {words[0] for words in forms} == set(ALL_COMMANDS), "a new command has to be among the forms"
    drawn = Drawn(monkeypatch)
    assert without_json(forms, drawn, capsys) == []
    assert printers() <= drawn.modules, "a form is missing that prints these tables"

    listing = types.ModuleType("listing")
    listing.listing = lambda arguments: screen.print_table("", ("a",), [("1",)]) or 0
    monkeypatch.setitem(sys.modules, "listing", listing)
    monkeypatch.setitem(ALL_COMMANDS, "listing", ("listing", "list"))
    assert without_json([["listing"]], drawn, capsys) == ["listing"]


def test_a_run_prints_json_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan and the profile say what their tables say; files that are named are there. norms: 3 steps, a report."""
    plan = printed([*COMMANDS["dry-run"][0], "--json"], 0, capsys)
    assert plan["version"] == 2
    assert [row["hook"] for row in plan["hooks"] if row["point"] == "POST_EPOCH"][:2] == ["training_metrics", "norms"]
    assert not Path(plan["files"][0]["folder"]).exists()
    told = printed([*COMMANDS["run"][0], "--json"], 0, capsys)
    (one,) = told["runs"]
    assert (one["status"], one["steps"], told["comparison"]) == ("finished", 3, None)
    assert {row["section"]: row["count"] for row in one["profile"]} == {"training_metrics": 1, "norms": 4}
    assert set(one["files"]) == {"records", "checkpoints"}
    assert all(Path(path).exists() for path in one["files"].values())
