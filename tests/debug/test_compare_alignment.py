"""Which value of one run is held against which of the other; never a wrong one in silence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_compared import captured, gpt2
from safetensors.torch import save_file
from torch import Tensor, nn

import hookline as hl
from hookline.debug import FusedRule, packed_rows, padded_rows
from hookline.debug.compare.compare import compare
from hookline.debug.compare.key import MeshPlacement, Value, ValueKey
from hookline.debug.compare.values import Run, unshard
from hookline.errors import CompareError, OptionError


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_dicts_caches_and_files_are_compared_by_name(tmp_path: Path) -> None:
    """The same run from memory and from disk is equal to the bit."""
    with hl.capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "#") as cache:
        pass
    with pytest.raises(CompareError, match="B holds nothing"):
        compare({"x": _random(2)}, cache)
    run = captured(gpt2())
    found = compare(run, captured(gpt2()))
    assert found.ok
    assert all(value.errors.is_equal for value in found.values)
    assert {value.kind for value in found.values} == {"output", "input"}
    assert str(found).startswith(f"{len(found.values)} values compared")
    save_file({"x": _random(2)}, tmp_path / "x.safetensors")
    assert compare({"x": _random(2)}, tmp_path / "x.safetensors").ok
    with pytest.raises(CompareError, match="an int"):
        compare({"x": _random(2)}, 3)  # type: ignore[arg-type]


def test_a_prefix_that_one_model_has_more_is_taken_off_and_said() -> None:
    """``model.layers.0`` is ``layers.0``; a name or two in common are no reason."""
    names = [f"layers.{index}" for index in range(4)]
    tensors = {name: _random(2, seed=index) for index, name in enumerate(names)}
    found = compare({f"model.{name}": tensor for name, tensor in tensors.items()}, tensors)
    assert found.ok
    assert len(found.values) == 4
    assert any("'model.'" in note for note in found.notes)
    with pytest.raises(CompareError):
        compare({"model.norm": _random(2)}, {"norm": _random(2)})


def test_fused_projections_are_compared_with_their_parts_both_ways() -> None:
    """Outputs along the last dimension; which rule was used is said, and a swapped order is a difference."""
    q, k, v = (_random(2, 4, seed=seed) for seed in range(3))
    parts = {"h.0.attn.q_proj": q, "h.0.attn.k_proj": k, "h.0.attn.v_proj": v}
    fused = {"h.0.attn.qkv_proj": torch.cat([q, k, v], -1)}
    for a, b in ((fused, parts), (parts, fused)):
        found = compare(a, b)
        (value,) = found.values
        assert found.ok
        assert "q_proj+k_proj+v_proj" in value.how
        assert not found.only_a + found.only_b
    assert not compare({"h.0.attn.qkv_proj": torch.cat([q, v, k], -1)}, parts).ok
    rules = [FusedRule("in", ("left", "right"))]
    assert compare({"m.in": torch.cat([q, k], -1)}, {"m.left": q, "m.right": k}, rules=rules).ok
    gate = {"m.gate_proj": q, "m.up_proj": k}
    assert compare(gate, {"m.gate_up_proj": torch.cat([q, k], -1)}).ok


def test_residual_pairs_are_summed_for_layers_and_norms_give_the_first() -> None:
    """As engines return them; the leaf "0" alone, which has the same name, is never taken for the sum."""
    hidden, residual = _random(3, 4), _random(3, 4, seed=1)
    engine = {"layers.0": (hidden, residual), "layers.0.norm": (hidden, residual)}
    trainer = {"layers.0": (hidden + residual,), "layers.0.norm": hidden}
    found = compare(engine, trainer)
    assert found.ok
    assert {value.how for value in found.values} == {"sum of hidden and residual", "the first of two"}
    assert compare(trainer, engine).ok
    assert not compare(engine, {"layers.0": (hidden,), "layers.0.norm": hidden}).ok
    assert compare(engine, engine).ok  # two pairs are compared leaf by leaf


def test_padded_packed_and_continuous_runs_are_compared_row_by_row() -> None:
    """Rows by request and position; padding is never compared, and a wrong row is named."""
    tokens = {"a": _random(5, 8), "b": _random(3, 8, seed=1)}
    mask = torch.zeros(2, 5)
    padded = torch.full((2, 5, 8), 77.0)
    for row, (name, start) in enumerate((("a", 0), ("b", 2))):
        mask[row, start : start + len(tokens[name])] = 1
        padded[row, start : start + len(tokens[name])] = tokens[name]
    packed = torch.cat([tokens["b"], tokens["a"]])
    rows = padded_rows(mask, ["a", "b"]), packed_rows([3, 5], ["b", "a"])
    found = compare({"h.0": padded}, {"h.0": packed}, rows=rows)
    assert found.ok
    assert found.values[0].shape == (8, 8)
    packed[1, 3] += 1
    found = compare({"h.0": padded}, {"h.0": packed}, rows=rows)
    assert found.first is not None
    assert found.first.where == "request b, position 1"
    with pytest.raises(CompareError, match="give rows="):
        compare({"h.0": padded.view(10, 8)}, {"h.0": padded})
    with pytest.raises(OptionError, match="padding between"):
        padded_rows(torch.tensor([[1, 0, 1]]))


@pytest.mark.parametrize(
    ("of_a", "of_b", "said"),
    [
        ((["a"], [0]), (["b"], [0]), "A has request a, position 0, …, B has request b, position 0"),
        ((["a"], [0]), (["a"], [9]), "A has request a, position 0, …, B has request a, position 9"),
    ],
)
def test_runs_without_a_row_in_common_are_told_the_first_of_both(of_a: Any, of_b: Any, said: str) -> None:
    """Names that differ are the usual mistake beside an engine, which makes names up."""
    x = torch.ones(4, 8)
    rows = [packed_rows([4], names, positions) for names, positions in (of_a, of_b)]
    with pytest.raises(CompareError, match=re.escape(said)):
        compare({"h.0": x}, {"h.0": x}, rows=(rows[0], rows[1]))
    assert compare({"h.0": x}, {"h.0": x}, rows=(rows[0], rows[0])).ok


def _joined(parts: list[Value], *options: Any) -> tuple[list[Value], Sequence[str]]:
    run = unshard(Run("A", {part.key: part for part in parts}), *options)
    return [*run.values.values()], run.notes


def _part(tensor: Tensor, rank: int, **options: Any) -> Value:
    key = ValueKey(rank, 0, "output", "h.0")
    return Value(key, 0, tuple(tensor.shape), "float32", lambda: tensor, **options)


def test_parts_of_ranks_are_put_together_by_dims() -> None:
    """``sum`` adds; a missing rank is said; two axes are refused."""
    whole = _random(2, 3, 4, 6)
    halves = whole.chunk(2, dim=2)
    joined, notes = _joined(([_part(half, rank) for rank, half in enumerate(halves)]), "b s h[tp] d")
    (value,) = joined
    assert torch.equal(value.tensor(), whole)
    assert value.shape == (2, 3, 4, 6)
    assert not notes
    run = [_part(half, rank) for rank, half in ((0, halves[0]), (2, halves[1]))]
    _, notes = _joined(run, {"h.#": "b s h[tp] d"})
    assert "[1]" in notes[0]
    with pytest.raises(OptionError, match="2 axes"):
        _joined(run, "b[dp] s h[tp] d")
    sums = [_part(whole / 2, rank) for rank in (0, 1)]
    (value,), _ = _joined(sums, "b s h d[tp:sum]")
    assert torch.allclose(value.tensor(), whole)


@pytest.mark.parametrize(
    ("operation", "whole"), [("sum", 7.0), ("avg", 3.5), ("max", 4.0), ("min", 3.0), ("product", 12.0)]
)
def test_partial_results_of_ranks_are_reduced_by_their_operation(operation: str, whole: float) -> None:
    """The trace says which; nothing else is taken for a sum."""
    run = [_partial(torch.full((3,), 3.0 + rank), rank, f"Partial({operation})") for rank in (0, 1)]
    (value,), _ = _joined(run)
    assert value.tensor().tolist() == [whole] * 3


def _partial(tensor: Tensor, rank: int, placement: str) -> Value:
    return _part(tensor, rank, placements=MeshPlacement((placement,), (2,), (rank,)))


class Twice(nn.Module):
    """Calls its layer as often as it is told."""

    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return self.head(x)


def test_a_site_that_is_called_more_often_in_one_run_is_compared_in_order_and_never_blamed() -> None:
    """Nobody knows which call of A belongs to which of B."""
    x = _random(2, 4)
    two, one = Twice(2), Twice(1)
    with hl.capture(two, "*") as a, torch.no_grad():
        two(x)
    with hl.capture(one, "*") as b, torch.no_grad():
        one(x)
    found = compare(a, b)
    (note,) = [note for note in found.missing if note.startswith("layer")]
    assert "called 2 time(s)" in note
    assert [value.is_sure for value in found.values if value.site == "layer"] == [False]
    assert all(value.is_same for value in found.values if value.site == "layer")
    assert not found.ok
    with hl.capture(one, "layer") as b, torch.no_grad():
        one(_random(2, 4, seed=9))
    found = compare(a, b)
    assert not found.ok
    assert not found.blamed  # which call it is cannot be known, so nothing is blamed


def test_missing_and_extra_sites_are_listed_and_make_the_runs_differ() -> None:
    """Six sites beside three of them, either way round."""
    six = {f"layers.{number}": _random(4, seed=number) for number in range(6)}
    three = {name: six[name] for name in list(six)[:3]}
    for a, b, lone in ((six, three, "only_a"), (three, six, "only_b")):
        found = compare(a, b)
        assert (found.ok, found.blame) == (False, None)
        assert getattr(found, lone) == [f"layers.{number} output" for number in (3, 4, 5)]


def test_noise_is_found_whatever_names_and_steps_b_has() -> None:
    """A and the noise run have a prefix that B has not."""
    a = {f"model.layers.{number}": _random(64, seed=number) for number in range(4)}
    noise = {name: value * (1 + 1e-3) for name, value in a.items()}
    b = {name.removeprefix("model."): value * (1 - 1e-3) for name, value in a.items()}
    assert not compare(a, b).ok
    found = compare(a, b, noise=noise)
    assert found.ok
    assert all(value.floor == pytest.approx(1e-3, rel=1e-3) for value in found.values)


def test_runs_of_other_models_are_said_to_be_such_and_nothing_is_blamed() -> None:
    """One name of many in common."""
    a = {f"a.{place}": torch.ones(2) for place in range(9)} | {"head": torch.ones(2)}
    b = {f"b.{place}": torch.ones(2) for place in range(9)} | {"head": torch.zeros(2)}
    found = compare(a, b)
    assert (found.ok, found.blame) == (False, None)
    assert "only 1 of 10 values of A, and 1 of 10 of B, have a partner" in found.summary
    assert compare(a, {"head": torch.zeros(2)}).blame == "head"  # all of B has a partner


def test_what_has_no_rows_is_not_blamed_where_rows_lie_in_other_places() -> None:
    """An expert is given its tokens in the order of the batch, which is another one in B."""
    x, chosen = _random(2, 4, 8), _random(3, 8, seed=1)
    mask, order = torch.ones(2, 4), [1, 0]
    rows = padded_rows(mask, ["a", "b"]), padded_rows(mask, ["b", "a"])
    a = {"layer": x, "expert": chosen, "head": x}
    found = compare(a, {"layer": x[order], "expert": chosen.flip(0), "head": x[order]}, rows=rows)
    assert (found.blame, found.ok) == (None, False)
    found = compare(a, {"layer": x[order], "expert": chosen.flip(0), "head": x[order] * 2}, rows=rows)
    assert found.blame == "head"
