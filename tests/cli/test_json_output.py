"""What ``--json`` prints is what its published schema says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.cli.json_output import OUTPUTS
from hookline.cli.main import main
from hookline.cli.schema_command import Output

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
    "check": (["check", "hooks.json", "--model", "model.py:make_model"], 0),
    "compare": (["compare", "a", "b"], 1),
    "doctor": (["doctor", "model.py:make_model"], 1),
    "find": (["find", "model.py:make_model", "#"], 0),
    "hooks": (["hooks"], 0),
}


def printed(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(words) == code
    return json.loads(capsys.readouterr().out)


def test_what_a_command_prints_fits_its_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real output of each command; control: without one of its keys it does not fit."""
    for command, (words, code) in COMMANDS.items():
        found = printed([*words, "--json"], code, capsys)
        schema = printed(["schema", "--output", command], 0, capsys)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(found, schema)
        for key in schema["required"]:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({name: value for name, value in found.items() if name != key}, schema)


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
    assert checked["warnings"] == ["hook 'shapes': nothing matches '9'."]
    (norms,) = printed(["hooks", "norms", "--json"], 0, capsys)["hooks"]
    assert "total_norm" in [metric["name"] for metric in norms["metrics"]]


def test_every_command_with_json_has_a_schema_and_the_flag_names_them_all() -> None:
    """The choices of ``hookline schema --output`` are the commands that have one."""
    assert sorted(get_args(Output)) == sorted(OUTPUTS) == sorted(COMMANDS)
