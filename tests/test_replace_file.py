"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookline.replace_file import replace_file


def test_text_and_bytes_are_written(tmp_path: Path) -> None:
    """Text is written as UTF-8 with its line ends as they are; nothing is left beside the file."""
    path = tmp_path / "page.html"
    replace_file(path, "ü\n")
    assert path.read_bytes() == "ü\n".encode()
    replace_file(path, b"\x00new")
    assert path.read_bytes() == b"\x00new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle of the draft costs neither the old file nor leaves the draft."""
    path = tmp_path / "run.json"
    replace_file(path, "old")
    write = Path.write_bytes

    def fill_up(draft: Path, content: bytes) -> int:
        write(draft, content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """No folder is made in silence."""
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "gone" / "run.json", "x")
