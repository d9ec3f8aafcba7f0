"""``export``: what comes back is what was given out, by request; the forward never waits, and nothing is half there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers_factories import PADDED, exported
from helpers_waiting import PATIENCE, until
from helpers_warm import WarmPopen
from safetensors import safe_open
from torch import Tensor, nn

import hookline as hl
from hookline.factories import export, read_export
from hookline.factories.exporting import Export, ExportOptions, ExportQueue, Shards


class Stuck:
    """A disk that takes nothing until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.waits = threading.Event()
        real = Shards.add

        def add(shards: Shards, *args: Any) -> None:
            self.waits.set()
            assert self.go.wait(PATIENCE)
            real(shards, *args)

        monkeypatch.setattr(Shards, "add", add)


def test_what_is_read_is_what_was_given_out(tmp_path: Path) -> None:
    """Every module and call of a model, bit for bit, in the order they were made."""
    torch.manual_seed(0)
    model, hook = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), export({"folder": str(tmp_path)})
    want: list[tuple[str, int, Tensor]] = []
    with hl.attach(model, "#", hook), torch.no_grad():
        for call in range(3):
            x = torch.randn(2, 4)
            model(x)
            x = model[0].forward(x)
            want += [("0", call, x), ("1", call, x.relu())]
    hook.close()
    records = list(read_export(tmp_path))
    assert [(each.module, each.call) for each in records] == [(name, call) for name, call, _ in want]
    assert all(torch.equal(each.tensor, tensor) for each, (_, _, tensor) in zip(records, want, strict=True))
    assert {(each.request, each.tokens, each.phase) for each in records} == {(None, (), None)}


def test_rows_of_a_padded_batch_are_separated_by_request(tmp_path: Path) -> None:
    """Each request gets its own tokens and none of the padding, whatever shape the module gives them in."""
    x = torch.arange(24.0).view(2, 3, 4)
    x[1, :2] = torch.nan
    shapes = {"batch": x, "flat": x.flatten(0, 1), "columns": x[:, :, 0]}
    for name, output in shapes.items():
        (first, second), _ = exported(tmp_path / name, (output, None), rows=PADDED)
        assert (first.request, first.tokens, first.positions, first.phase) == ("a", (1, 2, 3), (0, 1, 2), "prefill")
        assert (second.request, second.tokens, second.positions) == ("b", (9,), (0,))
        assert torch.equal(first.tensor.view(3, -1), output.reshape(2, 3, -1)[0])
        assert torch.equal(second.tensor.view(1, -1), output.reshape(2, 3, -1)[1, 2:])


def test_last_takes_the_last_token_of_each_request(tmp_path: Path) -> None:
    """positions="last"."""
    x = torch.arange(24.0).view(2, 3, 4)
    records, _ = exported(tmp_path, x, rows=PADDED, positions="last")
    found = [(each.request, each.tokens, each.positions, each.tensor.tolist()) for each in records]
    assert found == [("a", (3,), (2,), x[0, -1:].tolist()), ("b", (9,), (0,), x[1, -1:].tolist())]


def test_what_is_not_by_token_is_written_whole(tmp_path: Path) -> None:
    """A pooled vector and attention weights, with as many heads as there are tokens: of no request."""
    outputs = (torch.arange(10.0).view(2, 5), torch.arange(54.0).view(2, 3, 3, 3))
    records, _ = exported(tmp_path, *outputs, rows=PADDED)
    assert [(each.request, each.tokens) for each in records] == [(None, ())] * 2
    assert all(torch.equal(each.tensor, output) for each, output in zip(records, outputs, strict=True))


def test_what_changes_in_place_later_is_written_as_it_was(tmp_path: Path) -> None:
    """The copy is made in the call."""
    hook, x = export({"folder": str(tmp_path)}), torch.ones(3, 4)
    hook(nn.Identity(), (), x)
    x.zero_()
    hook.close()
    assert next(read_export(tmp_path)).tensor.eq(1).all()


def test_shards_end_at_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 bytes, each file has as many tensors as first exceed it; safetensors reads each by itself."""
    monkeypatch.setattr("hookline.factories.exporting.SHARD_BYTES", 1000)
    records, metrics = exported(tmp_path, *[torch.ones(100)] * 10)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 4
    counts = []
    for shard in shards:
        with safe_open(str(shard), "pt") as tensors:
            counts.append(len(list(tensors.keys())))
    assert counts == [3, 3, 3, 1]
    assert metrics["written_bytes"] == 4000
    assert len(records) == 10


def test_a_full_queue_drops_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that is stuck, a thousand forwards go through, three tensors wait, and the rest is counted."""
    stuck, options = Stuck(monkeypatch), ExportOptions(folder=tmp_path)
    hook, module = Export(options, ExportQueue(options, 1200)), nn.Identity()
    module.register_forward_hook(hook)
    for call in range(1000):
        module(torch.full((100,), float(call)))  # would never return if it waited: nobody lets the disk go
    assert stuck.waits.wait(PATIENCE)
    metrics = hook.to_metrics()
    assert (metrics["queued_bytes"], metrics["dropped"], metrics["written_tensors"]) == (1200, 997, 0)
    stuck.go.set()
    hook.close()
    metrics = hook.to_metrics()
    assert (metrics["queued_bytes"], metrics["dropped"], metrics["written_tensors"]) == (0, 997, 3)
    assert [each.call for each in read_export(tmp_path)] == [0, 1, 2]


def test_the_budget_ends_the_export_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was taken before is written; what comes later is dropped and counted."""
    records, metrics = exported(tmp_path, *[torch.ones(100)] * 5, max_bytes=1000)
    assert (metrics["dropped"], metrics["stopped"]) == (3, 1)
    assert caplog.messages == ["Export stops: more than max_bytes (1000) is asked for; 800 bytes were taken"]
    assert len(records) == 2


def test_a_disk_that_fails_ends_the_export_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged once; complete shards stay readable, and no half one is left."""
    monkeypatch.setattr("hookline.factories.exporting.SHARD_BYTES", 400)
    hook, module = export({"folder": str(tmp_path)}), nn.Identity()
    hook(module, (), torch.ones(100))
    until(lambda: list(tmp_path.glob("*.safetensors")))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    for _ in range(3):
        hook(module, (), torch.ones(100))
    hook.close()
    metrics = hook.to_metrics()
    assert (metrics["errors"], metrics["written_tensors"], metrics["dropped"], metrics["stopped"]) == (1, 1, 3, 1)
    assert metrics["queued_bytes"] == 0
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.messages[0]
    assert [each.call for each in read_export(tmp_path)] == [0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_half_written_line_is_not_read(tmp_path: Path) -> None:
    """As a kill in the middle of a write leaves it."""
    exported(tmp_path, torch.ones(3))
    with (tmp_path / "index-000.jsonl").open("a") as index:
        index.write('{"module": "x", "ca')
    assert len(list(read_export(tmp_path))) == 1


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    """A line that names a file elsewhere is refused."""
    line = {"module": "x", "call": 0, "request": None, "tokens": [], "positions": [], "phase": None, "key": "k"}
    (tmp_path / "index-000.jsonl").write_text(json.dumps({**line, "shard": "../other.safetensors"}) + "\n")
    with pytest.raises(hl.errors.OptionError, match="no file of its folder"):
        list(read_export(tmp_path))
    with pytest.raises(hl.errors.OptionError, match="no such folder"):
        list(read_export(tmp_path / "none"))


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


# -- processes that end --------------------------------------------------------------------------------------

RUN = """
import sys, torch
import hookline.factories.exporting as exporting
from hookline.factories import export
exporting.SHARD_BYTES = 200_000
hook = export({"folder": sys.argv[1]})
module = torch.nn.Identity()
module.register_forward_hook(hook)
for call in range(int(sys.argv[2])):
    module(torch.full((5000,), float(call)))
    if call == 100:
        print("running", flush=True)
"""


def run(folder: Path, calls: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(folder), str(calls)]
    return WarmPopen(command, stdout=subprocess.PIPE, text=True, env=environment, takes_down=True)


def test_a_process_that_ends_has_written_everything(tmp_path: Path) -> None:
    """Nobody closes the hook; the interpreter does, on its way out."""
    with run(tmp_path, 50) as process:
        assert process.wait(PATIENCE) == 0
    assert [each.call for each in read_export(tmp_path)] == list(range(50))


def test_a_killed_process_leaves_whole_shards_and_a_true_index(tmp_path: Path) -> None:
    """kill -9 in the middle: every file under its own name is whole, every line leads to its tensor."""
    with run(tmp_path, 10_000_000) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        until(lambda: len(list(tmp_path.glob("*.safetensors"))) > 20)
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    records = list(read_export(tmp_path))
    assert len(records) > 100
    for record in records:
        assert record.tensor.shape == (5000,)
        assert record.tensor.eq(record.call).all()
    indexed = {json.loads(line)["shard"] for line in (tmp_path / "index-000.jsonl").read_text().splitlines()}
    whole = {path.name for path in tmp_path.glob("*.safetensors")}
    assert indexed <= whole
    assert len(whole - indexed) <= 1  # renamed, and killed before its lines were written
    for name in whole:
        with safe_open(str(tmp_path / name), "pt") as tensors:
            assert all(tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118
