"""Mistakes of the command line that a review found, each asked for by what a user sees.

They had one cause: the same settings were translated several times, and a default stood for "not given".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers_cli import TINY, hookline, records_of

QUIET = ("--no-report", "--no-console-output")
HOOK = """
import hookline as hl

class Own(hl.TrainingHook):
    name = "own"
    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx):
        return {"one": 1.0}
"""
SCRIPT = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""


def done(*arguments: str | Path, cwd: Path, **options: object) -> str:
    """Return what ``hookline ...`` prints to both streams; it must end well."""
    run = hookline(*arguments, cwd=cwd, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_a_sink_by_the_name_of_an_entry_point_works_in_a_script(tmp_path, monkeypatch):
    """As it does in an experiment: the same flag, the same sinks."""
    site = tmp_path / "site"
    (site / "mine-1.0.dist-info").mkdir(parents=True)
    (site / "mine-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (site / "mine-1.0.dist-info/entry_points.txt").write_text("[hookline.sinks]\nmine = mysinks:Mine\n")
    (site / "mysinks.py").write_text(
        "import hookline as hl\n\nclass Mine(hl.MetricSink):\n    def write(self, record):\n"
        f"        open({str(tmp_path / 'got.txt')!r}, 'a').write(' '.join(record.metrics) + '\\n')\n"
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "own.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    done("run", "--hooks", "own.py:Own", "--hook-sink", "mine", *QUIET, "--", sys.executable, "train.py", cwd=tmp_path)
    assert "own/one" in (tmp_path / "got.txt").read_text()


@pytest.mark.parametrize("trained", ["experiment", "script"])
def test_a_hook_in_a_file_is_looked_for_beside_the_run_file(tmp_path, trained):
    """Wherever the command is given, and whatever trains."""
    beside = tmp_path / "sub"
    beside.mkdir()
    (beside / "own.py").write_text(HOOK)
    (tmp_path / "train.py").write_text(SCRIPT)
    what = f"experiment: {TINY}\nconfig: {{epochs: 1}}\n" if trained == "experiment" else ""
    (beside / "run.yaml").write_text(what + "hooks: {names: ['own.py:Own']}\n")
    command = () if trained == "experiment" else ("--", sys.executable, "train.py")
    said = done("run", "--config", "sub/run.yaml", *QUIET, *command, cwd=tmp_path)
    (log,) = tmp_path.rglob("records.jsonl")
    assert any("own/one" in record["metrics"] for record in records_of(log.parent)), said
