"""The files of a precision check: a path that never worked is an error, a full disk none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hookline.debug.precision import precision_checker
from hookline.debug.precision.precision_checker import PrecisionFiles


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
