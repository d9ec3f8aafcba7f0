"""The folder of a precision check has one name on all ranks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hookline.debug.precision import precision_checker
from hookline.debug.precision.precision_checker import PrecisionFiles
from hookline.distributed import _torch_distributed, ranks


def test_the_rank_that_comes_first_names_the_folder_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that begin in other seconds, one after the other in this process; the store is a real one."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "has_group", lambda: True)
    monkeypatch.setattr(_torch_distributed, "default_store", lambda: store)
    folders = {}
    for rank in range(2):
        monkeypatch.setattr(precision_checker, "this_rank", lambda rank=rank: rank)
        monkeypatch.setattr(precision_checker, "_NUMBERS", defaultdict(itertools.count))  # that of another process
        clock = SimpleNamespace(now=lambda rank=rank: datetime(2024, 1, 1, 0, 0, rank))
        monkeypatch.setattr(precision_checker, "datetime", clock)
        for check in range(2):
            files = PrecisionFiles(str(tmp_path), save=False)
            files.write(f"check {check}", "x", torch.ones(1))
            files.close()
            folders[rank, check] = files.folder
    assert folders[0, 0] == folders[1, 0] == tmp_path / "20240101_000000"
    assert folders[0, 1] == folders[1, 1] == tmp_path / "20240101_000000_2"
    assert len(list(tmp_path.rglob("*.log"))) == 4


def test_a_path_that_never_worked_is_an_error(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"):
        PrecisionFiles(str(tmp_path / "taken"), save=False).write("line", "a", torch.ones(1))


def test_a_full_disk_ends_the_files_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError("No space left on device")

    files = PrecisionFiles(str(tmp_path), save=True)
    files.write("first", "a", torch.ones(1))
    monkeypatch.setattr(precision_checker.np, "save", full)
    for stem in "bc":
        files.write("later", stem, torch.ones(1))
    files.close()
    assert caplog.text.count("No space left on device") == 1
