"""The folder of a precision check: one name on all ranks, and disks that are full."""

from __future__ import annotations

import errno
import itertools
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hookline.debug.precision import precision_record
from hookline.debug.precision.precision_record import PrecisionFiles
from hookline.distributed import _torch_distributed, ranks


def test_the_rank_that_comes_first_names_the_folder_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that begin in other seconds, one after the other in this process; the store is a real one."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(ranks, "has_group", lambda: True)
    monkeypatch.setattr(_torch_distributed, "default_store", lambda: store)
    folders = {}
    for rank in range(2):
        monkeypatch.setattr(precision_record, "this_rank", lambda rank=rank: rank)
        monkeypatch.setattr(precision_record, "_NUMBERS", defaultdict(itertools.count))  # that of another process
        clock = SimpleNamespace(now=lambda rank=rank: datetime(2024, 1, 1, 0, 0, rank))
        monkeypatch.setattr(precision_record, "datetime", clock)
        for check in range(2):
            files = PrecisionFiles(str(tmp_path), save=False)
            files.write(f"check {check}", "x", torch.ones(1))
            files.close()
            folders[rank, check] = files.folder
    assert folders[0, 0] == folders[1, 0] == tmp_path / "20240101_000000"
    assert folders[0, 1] == folders[1, 1] == tmp_path / "20240101_000000_2"
    assert len(list(tmp_path.rglob("*.log"))) == 4


@pytest.mark.parametrize("save", [False, True])
def test_a_full_disk_ends_the_files_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, save: bool
) -> None:
    """The second tensor does not fit any more: said once, and later ones are left out."""
    files = PrecisionFiles(str(tmp_path), save=save)
    files.write("first", "a", torch.ones(2))
    full = OSError(errno.ENOSPC, "No space left on device")
    failing = "_write_tensor" if save else "_write_line"
    monkeypatch.setattr(files, failing, Mock(side_effect=full))
    for name in "bc":
        files.write("later", name, torch.ones(2))
    files.close()
    assert caplog.text.count("No space left on device") == 1
    assert len(list(tmp_path.rglob("*.npy"))) == (1 if save else 0)


def test_a_path_that_never_worked_is_an_error(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"):
        PrecisionFiles(str(tmp_path / "taken"), save=False).write("line", "a", torch.ones(1))
