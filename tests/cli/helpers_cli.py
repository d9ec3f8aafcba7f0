"""Running the command line in this process or another, and what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_waiting import PATIENCE
from helpers_warm import run_warm

from hookline.lifecycle.registry import HookRegistry

EXPERIMENTS = Path(__file__).parent / "experiments.py"
TINY = f"{EXPERIMENTS}:Tiny"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; files that are loaded, and hooks they register, are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("_hooks", "groups"):
        monkeypatch.setattr(HookRegistry, name, dict(getattr(HookRegistry, name)))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(tmp_path), str(Path(__file__).parent))):
            del sys.modules[name]


def hookline(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``hookline ...`` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return run_warm(
        [sys.executable, "-m", "hookline", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **options,
    )


def facts_of(folder: Path) -> dict[str, Any]:
    """What run.json says."""
    return json.loads((folder / "run.json").read_text())


def records_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the record log that are records."""
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [found for line in lines if "n" in (found := json.loads(line))]


def run_here(*arguments: str | Path) -> int:
    """``hookline ...`` in this process; the exit code, also where a mistake in a flag leaves at once."""
    from hookline.cli.main import main

    try:
        return main([str(one) for one in arguments])
    except SystemExit as left:
        return int(left.code or 0)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same model, bit for bit, as their newest checkpoints say."""
    from helpers_training import differences

    from hookline.lifecycle.checkpoint_file import read

    newest = [max((folder / "checkpoints").glob("step_*.pt")) for folder in (one, other)]
    mine, theirs = (read(path)["core"]["model"]["tensors"] for path in newest)
    assert len(mine) >= 4
    return differences(mine, theirs) == []
