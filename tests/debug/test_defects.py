"""Faults of traces and comparisons that were found once, each with what would show it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.debug import padded_rows, read_trace


class WritesUnseen(nn.Module):
    """Doubles what it is given by way of ``.data``, which counts no new version."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x


def test_a_tensor_that_was_written_to_unseen_has_a_new_fingerprint(tmp_path: Path) -> None:
    """The same object twice, with other numbers in it: each record has the norm of the tensor beside it."""
    with hl.trace(nn.Sequential(nn.Identity(), WritesUnseen()), to=tmp_path, kinds="output", tensors=True) as running:
        running._hooks._model(torch.ones(3))
    norms = [(record.fingerprint.norm, float(record.tensor().norm())) for record in read_trace(tmp_path).records]  # type: ignore[union-attr]
    assert [one for one, _ in norms] == pytest.approx([other for _, other in norms])
    assert len({round(one, 3) for one, _ in norms}) == 2


def test_gradients_of_forwards_long_ago_begin_no_steps(tmp_path: Path) -> None:
    """300 forwards, then one backward through all of them: what is forgotten is told, and gets no number."""
    model = nn.Linear(2, 1)
    with pytest.warns(hl.HooklineWarning, match="before the last 256"):  # noqa: SIM117
        with hl.trace(model, to=tmp_path, kinds=("output", "output_grad")):
            torch.stack([model(torch.ones(1, 2)).sum() for _ in range(300)]).sum().backward()
    folder = read_trace(tmp_path)
    assert folder.steps == tuple(range(300))
    assert sum(record.kind == "output_grad" for record in folder.records) == 256
    assert any("left out" in note for note in folder.left_out)


def test_what_a_user_notes_makes_no_difference(tmp_path: Path) -> None:
    """Whatever words it has."""
    for name in ("a", "b"):
        with hl.trace(nn.Identity(), to=tmp_path / name, kinds="output") as running:
            running._hooks._model(torch.ones(2))
            if name == "b":
                running.note("batch 7 was left out by the sampler; the budget is spent")
    found = hl.compare(tmp_path / "a", tmp_path / "b")
    assert found.ok
    assert any("by the sampler" in note for note in found.notes)


def test_rows_are_those_of_the_batch_and_never_of_parameters(tmp_path: Path) -> None:
    """A weight of as many rows as the batch has tokens, beside left and right padding."""
    torch.manual_seed(0)
    model, mask = nn.Linear(16, 8), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    tokens = torch.randn(2, 4, 16) * mask[..., None]
    turned, places = (
        mask.flip(1),
        torch.stack([row.roll(4 - int(count), 0) for row, count in zip(tokens, mask.sum(1), strict=True)]),
    )
    for name, x in (("a", tokens), ("b", places)):
        with hl.trace(model, to=tmp_path / name, kinds=("output", "parameter"), tensors=True), torch.no_grad():
            model(x)
    found = hl.compare(tmp_path / "a", tmp_path / "b", rows=(padded_rows(mask), padded_rows(turned)))
    assert found.ok
    assert all(not value.is_by_rows for value in found.values if value.kind == "parameter")


def test_warnings_of_a_trace_are_for_the_line_that_ends_it(tmp_path: Path) -> None:
    """Not for the finalizer in the standard library that closes the files; at the end of a block as well."""

    model = nn.Identity()

    def by_hand(folder: Path) -> None:
        running = hl.trace(model, to=folder, kinds="output", tensors=["nothing"])
        model(torch.ones(2))
        running.remove()

    def by_block(folder: Path) -> None:
        with hl.trace(model, to=folder, kinds="output", tensors=["nothing"]):
            model(torch.ones(2))

    for end in (by_hand, by_block):
        with pytest.warns(hl.HooklineWarning, match="nothing") as told:
            end(tmp_path / end.__name__)
        assert {Path(each.filename).name for each in told} == {"test_defects.py"}
