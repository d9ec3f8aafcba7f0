"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import hookline as hl
from hookline.factories import ProbeHead, record_mean
from hookline.files import replace_file


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


def test_a_name_of_the_greatest_length_has_room_for_its_draft(tmp_path: Path) -> None:
    """A name has at most 255 bytes, and a letter up to four of them."""
    path = tmp_path / ("ü" * 127)
    replace_file(path, lambda draft: draft.write_text("new"))
    assert path.read_text() == "new"


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "gone" / "run.json", "x")


def save_means(path: Path, width: int) -> None:
    hook = record_mean({})
    model = nn.Identity()
    with hl.attach(model, "", hook):
        model(torch.ones(2, width))
    hook.save(path)


def save_probe(path: Path, width: int) -> None:
    ProbeHead([(torch.ones(1, width), torch.ones(1))]).save(path)


@pytest.mark.parametrize("save", [save_means, save_probe])
def test_tensors_on_a_full_disk_leave_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, int], None]
) -> None:
    """Also with a safetensors that writes straight to the file, as those before 0.8 do."""
    path = tmp_path / "numbers.safetensors"
    save(path, 4)
    old = path.read_bytes()

    def fill_up(tensors: Any, filename: Any, metadata: Any = None) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fill_up)
    with pytest.raises(OSError, match="No space"):
        save(path, 5)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
