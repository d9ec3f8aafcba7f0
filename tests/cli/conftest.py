"""Tests of the command line: each in an empty folder, with the process as it was afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline.lifecycle.registry import HookRegistry  # with the built-in hooks in it, before any test has a copy


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; files that are loaded, and hooks they register, are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # no line about threads
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("_hooks", "groups"):
        monkeypatch.setattr(HookRegistry, name, dict(getattr(HookRegistry, name)))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(tmp_path), str(Path(__file__).parent))):
            del sys.modules[name]
