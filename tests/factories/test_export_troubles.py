"""``export`` where something goes wrong: folders that go, disks that are stuck or full."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers_factories import exported
from helpers_waiting import PATIENCE
from torch import nn

import hookline as hl
from hookline.factories import Tokens, export, read_export, serving
from hookline.factories.export_files import Shards


@pytest.mark.parametrize("nap", [0.0, 0.2])
def test_a_disk_that_is_full_in_the_middle_of_a_shard_loses_that_shard_and_says_how_much(
    nap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests for each output, two outputs for each shard: written and dropped are together what came."""
    monkeypatch.setattr("hookline.factories.exporting._NAP", nap)
    rows = Tokens.padded(("a", "b"), ((1,), (2,)), (0, 0), "decode")
    monkeypatch.setattr("hookline.factories.export_files.SHARD_BYTES", 1600)
    hook, module, written = export({"folder": str(tmp_path)}), nn.Identity(), []
    real = safetensors.torch.save_file

    def save(tensors: Any, file: Path) -> None:
        written.append(file)
        if len(written) > 1:
            raise safetensors.SafetensorError("No space left on device")
        real(tensors, file)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    for _ in range(5):
        with serving(rows):
            hook(module, (), torch.ones(2, 1, 100))
    hook.close()
    metrics = hook.to_metrics()
    assert (metrics["written_tensors"], metrics["written_bytes"]) == (4, 1600)
    assert (metrics["dropped"], metrics["dropped_bytes"]) == (3, 2400)
    assert metrics["queued_bytes"] == 0
    assert len(list(read_export(tmp_path))) == 4


def test_closing_over_a_stuck_disk_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for so long and no longer, and what was not written is no secret."""
    go, real = threading.Event(), Shards.add

    def add(self: Shards, *args: Any) -> None:
        assert go.wait(PATIENCE)
        real(self, *args)

    monkeypatch.setattr(Shards, "add", add)
    hook = export({"folder": str(tmp_path)})
    hook(nn.Identity(), (), torch.ones(100))
    hook._queue.close(timeout=0.05)
    assert caplog.messages == ["Export is not through after 0.05 s; 400 bytes still wait to be written"]
    go.set()
    hook.close()
    assert len(list(read_export(tmp_path))) == 1


def test_a_shard_that_was_cut_short_or_taken_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which file; what comes before it is read."""
    monkeypatch.setattr("hookline.factories.export_files.SHARD_BYTES", 1)
    exported(tmp_path, torch.ones(100), torch.ones(100))
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    for _ in range(2):
        records = read_export(tmp_path)
        next(records)
        with pytest.raises(hl.errors.OptionError, match=rf"{last.name} cannot be read, though it was complete once"):
            next(records)
        last.unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")  # which is what is tried here
def test_a_forked_process_exports_nothing_and_leaves_the_files_alone(tmp_path: Path) -> None:
    """Its copy of the hook has no thread, and a lock that nobody gives back; the parent's export goes on."""
    hook, module = export({"folder": str(tmp_path)}), nn.Identity()
    hook(module, (), torch.ones(3))
    with hook._queue._lock:
        child = os.fork()
    if not child:
        status = 1
        try:
            hook(module, (), torch.ones(3))
            hook.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    hook(module, (), torch.ones(3))
    hook.close()
    assert [each.call for each in read_export(tmp_path)] == [0, 1]
