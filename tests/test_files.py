"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookline.files import replace_file


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


def test_a_name_of_the_greatest_length_has_room_for_its_draft(tmp_path: Path) -> None:
    """A name has at most 255 bytes, and a letter up to four of them."""
    path = tmp_path / ("ü" * 127)
    replace_file(path, lambda draft: draft.write_text("new"))
    assert path.read_text() == "new"
