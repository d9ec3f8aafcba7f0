"""What ``--json`` prints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_cli import TINY
from torch import nn

import hookline as hl
from hookline.cli.main import main

MODEL = """
import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].register_forward_hook(print)
    model[0].register_forward_hook(print)
    return model

"""
SPECS = [{"name": "shapes", "target_modules": ["0"], "hook_factory": "hookline.factories:nan_alarm", "config": {}}]


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


CHECK = ["check", "hooks.json", "--model", "model.py:make_model", "--json"]
DRY_RUN = ["run", TINY, "--hooks", "norms", "hessian", "stats", "--dry-run", "--json"]


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
    checked = printed(CHECK, 0, capsys)
    assert checked["hooks"] == [{"name": "shapes", "on": "forward", "target_modules": ["0"], "matches": "0"}]
    (norms,) = printed(["hooks", "norms", "--json"], 0, capsys)["hooks"]
    assert "total_norm" in [metric["name"] for metric in norms["metrics"]]


def test_a_plan_is_json_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what its table says, and makes nothing."""
    plan = printed(DRY_RUN, 0, capsys)
    assert plan["version"] == 2
    assert [row["hook"] for row in plan["hooks"] if row["point"] == "POST_EPOCH"][:2] == ["training_metrics", "norms"]
    assert not Path(plan["files"][0]["folder"]).exists()
