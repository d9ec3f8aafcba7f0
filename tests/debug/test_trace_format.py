"""The files of a trace: what is written is read back, and damage is told without losing the rest."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.debug import Fingerprint, MeshPlacement, RowKey, read_trace
from hookline.debug.compare.rows import RowTable
from hookline.debug.compare.trace_files import TracePlace, TraceWriter
from hookline.errors import TraceError

HEAD = {"model": "Net", "ranks": 1}
LAID = MeshPlacement(("Shard(0)",), ("tp",), (2,), (1,), (4, 3))
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
    assert (first.site, first.kind, first.dtype, first.shape) == (
        "layers.0",
        "output",
        "float32",
        (2, 2, 3),
    )
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


def test_a_copy_of_a_rank_beside_it_is_passed_over(tmp_path):
    """Folders whose names do not end in a number are not of the trace."""
    writer = TraceWriter(tmp_path, 0, HEAD)
    batch_of(writer, ["a"])
    writer.close()
    for name in ("rank_0 copy", "rank_x"):
        shutil.copytree(tmp_path / "rank_0", tmp_path / name)
    folder = read_trace(tmp_path)
    assert (folder.ranks, len(folder), folder.problems) == ((0,), 1, ())


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
    file.write_text(file.read_text().replace('"version":1', '"version":99'))
    with pytest.raises(TraceError, match="version 99"):
        read_trace(tmp_path / "t")
