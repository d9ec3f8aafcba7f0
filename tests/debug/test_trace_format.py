"""The files of a trace: what is written is read back, damage is told, and however a trace ends the rest can be read."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers_waiting import PATIENCE
from helpers_warm import run_warm
from torch import Tensor, nn

import hookline as hl
from hookline.debug import Fingerprint, MeshPlacement, RowKey, read_trace
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.trace import trace
from hookline.debug.compare.trace_files import VERSION, TracePlace, TraceWriter
from hookline.errors import HooklineWarning, TraceError

HEAD = {"model": "Net", "ranks": 1}
LAID = MeshPlacement(("Shard(0)",), (2,), (1,))
ROWS = RowTable("padded", ("a", "b"), (0, 1), (2, 1), (0, 5))


def batch_of(writer: TraceWriter, sites: list[str], step: int = 0, tensors: Sequence[Tensor] = ()) -> None:
    """Write one record for each of ``sites``, with numbers that tell them apart."""
    writer.add_records(
        [
            (
                writer.number(TracePlace(site, "output", "", (2, 2, 3), "float32", LAID)),
                step,
                call,
                writer.number(ROWS),
                0 if tensors and call == 0 else None,
            )
            for call, site in enumerate(sites)
        ],
        np.array([[*(5.0 * call + np.arange(5)), *(2.0 * call + np.arange(2))] for call in range(len(sites))]),
        np.array([2**64 - 1 - call for call in range(len(sites))], np.uint64),
        tensors,
    )


def test_what_is_written_is_read_back(tmp_path):
    """Records with all fields, tensors, tables of rows, notes and settings make the round trip."""
    writer = TraceWriter(tmp_path / "t", 0, HEAD)
    kept = [torch.randn(2, 2, 3), torch.randn(3, dtype=torch.complex128), torch.ones(3, dtype=torch.bfloat16)]
    batch_of(writer, ["layers.0", "layers.1"], tensors=kept)
    writer.add_note("half of it", is_left_out=False)
    writer.add_note("gone", is_left_out=True)
    batch_of(writer, ["layers.0"], step=1)
    writer.close()
    writer.close()
    folder = read_trace(tmp_path / "t")
    assert folder.problems == ()
    assert (folder.notes, folder.left_out) == (("half of it", "gone"), ("gone",))
    assert folder.head["model"] == "Net"
    assert folder.steps == (0, 1)
    first, second, third = folder.records
    assert [each.order for each in folder.records] == [0, 1, 2]
    assert (first.site, first.kind, first.dtype, first.shape) == ("layers.0", "output", "float32", (2, 2, 3))
    assert (first.placements, second.call, third.step) == (LAID, 1, 1)
    assert second.fingerprint == Fingerprint(12, 5.0, 6.0, 7.0, 8, 9, 2**64 - 2, (2.0, 3.0))
    assert torch.equal(first.tensor(), kept[0])
    with pytest.raises(TraceError, match="only its fingerprint"):
        second.tensor()
    rows = first.rows
    assert rows is not None
    assert rows.dims == 2
    assert rows.keys == (RowKey("a", 0), RowKey("a", 1), None, RowKey("b", 5))


def test_hashes_keep_all_bits_in_a_batch_with_small_and_large_ones(tmp_path):
    """Those below 2**63 and those above it are written as whole numbers."""
    hashes = [2**63 - 1, 2**63 + 1, 1, 2**64 - 1]
    writer = TraceWriter(tmp_path, 0, HEAD)
    place = writer.number(TracePlace("a", "output", "", (2,), "float32"))
    records = [(place, 0, call, None, None) for call in range(4)]
    writer.add_records(records, np.zeros((4, 7)), np.array(hashes, np.uint64), [])
    writer.close()
    assert [each.fingerprint.hash for each in read_trace(tmp_path).records] == hashes


def test_damage_is_told_and_the_rest_is_read(tmp_path):
    """A cut line, a line that is no JSON and a missing end are problems; the other records are there."""
    writer = TraceWriter(tmp_path, 0, HEAD)
    batch_of(writer, ["a"])
    batch_of(writer, ["b"])
    file = tmp_path / "rank_0" / "records.jsonl"
    text = file.read_bytes()
    file.write_bytes(b"nonsense\n" + text[:-40])
    folder = read_trace(tmp_path)
    assert [each.site for each in folder.records] == ["a"]
    problems = " ".join(folder.problems)
    assert "line 1 of records.jsonl is no JSON" in problems
    assert "is cut off" in problems
    assert "was not closed" in problems
    writer.close()


def test_what_is_no_trace_is_refused(tmp_path):
    """Another folder, another version, and a folder that is taken each say what to do."""
    with pytest.raises(TraceError, match="no such folder"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="is no trace"):
        read_trace(tmp_path)
    writer = TraceWriter(tmp_path / "t", 0, HEAD)
    other = TraceWriter(tmp_path / "t", 1, HEAD)
    writer.close()
    other.close()
    with pytest.raises(TraceError, match="has a trace already"):
        TraceWriter(tmp_path / "t", 0, HEAD)
    assert read_trace(tmp_path / "t").ranks == (0, 1)
    file = tmp_path / "t" / "rank_0" / "records.jsonl"
    file.write_text(file.read_text().replace(f'"version":{VERSION}', '"version":99'))
    with pytest.raises(TraceError, match="version 99"):
        read_trace(tmp_path / "t")


KINDS = ("output", "input+output", "output+output_grad", "output_grad", "input_grad", "param_grad", "output+param_grad")
MODES = ("forward", "optimizer", "no_grad")

KILLED = """
import os, signal, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from hookline.debug.compare.trace import trace

folder, modes, kinds = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
trace(nn.Sequential(model[0]), to=f"{folder}/laid", kinds="parameter").remove()
alive = []
for mode in modes:
    for kind in kinds:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        made = {"forward": "forward", "no_grad": "forward", "optimizer": optimizer}[mode]
        running = trace(model, to=f"{folder}/{mode}-{kind}", tensors="1", kinds=kind.split("+"), step=made)
        alive.append(running)
        for step in range(3):
            with torch.set_grad_enabled(mode != "no_grad"):
                found = model(torch.ones(2, 4, requires_grad=True))
            if mode != "no_grad":
                found.sum().backward()
            if step < 2:
                optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_steps_before_the_last_one(tmp_path):
    """``kill -9`` in the third step leaves two at least, whatever a step is and whatever is traced."""
    done = run_warm(
        [sys.executable, "-c", KILLED, str(tmp_path), " ".join(MODES), " ".join(KINDS)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    for mode in MODES:
        for kinds in KINDS:
            name = f"{mode}-{kinds}"
            folder = read_trace(tmp_path / name)
            assert any("was not closed" in each for each in folder.problems)
            wanted = {each for each in kinds.split("+") if mode != "no_grad" or not each.endswith("grad")}
            for kind in wanted:
                steps = {each.step for each in folder.records if each.kind == kind}
                assert steps >= {0, 1}, (name, kind, steps)
            stored = [each for each in folder.records if each.read is not None]
            assert bool(stored) == any(kind != "param_grad" for kind in wanted), name
            assert all(each.tensor().shape == (2, 4) for each in stored)
    with pytest.raises(TraceError, match="has a trace already"):
        trace(nn.Linear(2, 2), to=tmp_path / "forward-output")
    laid = {each.site: each.placements for each in read_trace(tmp_path / "laid").records}
    assert laid["0.bias"] is None
    weight = laid["0.weight"]
    assert weight is not None
    assert (weight.placements, weight.mesh_shape, weight.coordinate) == (("Shard(0)",), (1,), (0,))


class Interrupted:
    """``os.write`` that writes half of a text and then is ended by an exception, once it is due."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.is_due = error, False

    def __call__(self, file: int, text: bytes) -> int:
        """Write, or half of it."""
        if not self.is_due:
            return WRITE(file, text)
        WRITE(file, text[: len(text) // 2])
        raise self.error


WRITE = os.write


def end_in_the_fourth(model: nn.Sequential, to: Any, error: BaseException) -> None:
    """Trace four forwards; the last one is ended by an exception before its second module."""
    with trace(model, to=to, kinds="output", tensors="0"):
        for _ in range(3):
            model(torch.ones(2, 4))
        with hl.attach(model, "1", lambda module, args: (_ for _ in ()).throw(error), on="forward_pre"):
            model(torch.ones(2, 4))


def four_forwards(to: Any, write: Interrupted) -> None:
    """Trace four forwards; writing is interrupted in the third."""
    model = nn.Linear(4, 4)
    with trace(model, to=to, kinds="output"):
        for step in range(4):
            write.is_due = write.is_due or step == 2
            model(torch.ones(2, 4))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the run")])
def test_ctrl_c_and_exceptions_leave_all_records(tmp_path, error):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(type(error)):
        end_in_the_fourth(model, tmp_path / "t", error)
    folder = read_trace(tmp_path / "t")
    assert folder.problems == ()
    assert [(each.site, each.step) for each in folder.records][-2:] == [("", 2), ("0", 3)]


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch):
    """One warning; whoever reads it later finds a trace that was not closed."""
    write = Interrupted(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("hookline.debug.compare.trace_files.os.write", write)
    with pytest.warns(HooklineWarning, match="could not be written") as told:
        four_forwards(tmp_path / "full", write)
    assert len(told) == 1
    folder = read_trace(tmp_path / "full")
    assert folder.steps == (0,)  # what was not yet on disk when the third forward began is lost
    assert any("was not closed" in each for each in folder.problems)


class Sparse(nn.Module):
    """Returns a sparse tensor beside a dense one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.to_sparse()


def notes_of(folder: Any, model: nn.Module, **options: Any) -> tuple[tuple[str, ...], list[str]]:
    """Trace two steps of SGD; return notes and warnings."""
    optimizers = options.pop("optimizers", [torch.optim.SGD(model.parameters(), lr=0.1)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with trace(model, to=folder, **options):
            for _ in range(2):
                found = model(torch.ones(2, 4))
                (found[0] if isinstance(found, tuple) else found).sum().backward()
                for each in optimizers:
                    each.step()
    return read_trace(folder).notes, [str(each.message) for each in told]


def test_what_a_trace_leaves_out_is_in_its_notes(tmp_path):
    """Sparse outputs and a spent budget; nothing of a whole trace."""
    notes, told = notes_of(tmp_path / "sparse", nn.Sequential(nn.Linear(4, 4), Sparse()), kinds="output")
    assert any("1 output 1: a tensor of torch.sparse_coo on cpu without numbers" in each for each in notes)
    assert len(told) == len(notes) == 2
    notes, _ = notes_of(tmp_path / "budget", nn.Linear(4, 4), kinds="output", budget=300)
    assert "is spent" in notes[0]
    assert "all from step 1, (model) output, on was left out" in notes[0]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
    for name, given in (("one", both[0]), ("both", both)):  # parameters that no optimizer of step= has are read too
        assert notes_of(tmp_path / name, model, step=given, optimizers=both, tensors="1") == ((), [])
        biases = [each.site for each in read_trace(tmp_path / name).records if each.kind == "param_grad"]
        assert biases.count("0.bias") == biases.count("1.bias") == 2


def test_names_of_tensors_that_match_nothing_are_told(tmp_path):
    """Each pattern for itself, with the nearest names; nothing of it is missing in the trace."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    notes, told = notes_of(tmp_path / "t", model, tensors=["0", "nothing_matches", "0.weight"])
    assert notes == ()
    assert len(told) == 1
    assert "tensors='nothing_matches'" in told[0]
    assert "nearest: " in told[0]
