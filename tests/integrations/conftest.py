"""Run each test in a folder of its own: followed loops and callbacks write their log to ``hookline/`` beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _folder_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures of a whole module train, too."""
    with contextlib.chdir(tmp_path_factory.mktemp("here")):
        yield


@pytest.fixture(autouse=True)
def _own_folder(_folder_of_module: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
