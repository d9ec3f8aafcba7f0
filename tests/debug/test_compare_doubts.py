"""What a comparison cannot know it says; what it can still compare it compares."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.debug.compare.compare import compare
from hookline.debug.compare.tensor_errors import tensor_errors
from hookline.debug.trace.start_trace import trace

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))


def _traced(model: nn.Module, to: Path, x: Tensor = X, **options: Any) -> Path:
    options = {"kinds": ("input", "output"), "tensors": True, **options}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that something is left out is what the tests ask for
        with trace(model, to=to, **options):
            model(x)
    return to


def _layers(count: int = 3, width: int = 16) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def test_lost_tensor_files_leave_the_fingerprints(tmp_path: Path) -> None:
    """Errors are estimates, and the files that are gone are a problem that is told."""
    a, b = _traced(_layers(), tmp_path / "a"), tmp_path / "b"
    shutil.copytree(a, b)
    for file in b.rglob("*.safetensors"):
        file.unlink()
    same = compare(a, b)
    assert same.ok
    assert any("cannot be read; their fingerprints are compared" in problem for problem in same.problems)
    wrong = _layers()
    wrong[1].weight.data *= 1.5
    c = _traced(wrong, tmp_path / "c")
    for file in c.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:20])
    found = compare(a, c)
    assert (found.blame, found.is_estimate) == ("1", True)
    assert len(found.problems) == 1


class Sparse(nn.Module):
    """Returns a tensor that no trace can hold."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).to_sparse()


def test_what_a_trace_left_out_is_told_and_not_called_the_same(tmp_path: Path) -> None:
    """A budget that was spent, and a sparse output that is wrong in one run."""
    a = _traced(_layers(6), tmp_path / "a")
    assert compare(a, _traced(_layers(6), tmp_path / "b")).ok
    spent = compare(a, _traced(_layers(6), tmp_path / "c", budget=3_000))
    assert not spent.ok
    assert any(line.startswith("Unsure: ") for line in spent.headline)
    assert any("B: " in line and "is spent" in line for line in spent.remarks)
    models: list[Any] = [nn.Sequential(nn.Identity(), Sparse()) for _ in range(2)]
    models[1][1].factor = 3.0
    sparse = compare(*(_traced(model, tmp_path / f"s{place}") for place, model in enumerate(models)))
    assert not sparse.ok
    assert len(sparse.left_out) >= 2


def test_sparse_and_nested_tensors_are_compared_in_full() -> None:
    """Those that are given to compare themselves."""
    eye = torch.eye(3).to_sparse()
    assert compare({"x": eye}, {"x": eye.clone()}).ok
    assert compare({"x": eye}, {"x": eye * 2}).values[0].verdict == "wrong"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert compare({"x": nested}, {"x": nested * 2}).values[0].verdict == "wrong"


class Heads(nn.Module):
    """Two projections of one input, and one of their product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.k(x) * self.v(x))  # type: ignore[no-any-return]


def test_a_second_bug_with_equal_inputs_does_not_follow_from_the_first(tmp_path: Path) -> None:
    """Two weights are swapped: both modules are blamed, what comes after follows."""
    swapped = Heads()
    swapped.k.weight, swapped.v.weight = swapped.v.weight, swapped.k.weight
    found = compare(_traced(Heads(), tmp_path / "a"), _traced(swapped, tmp_path / "b"))
    assert [blame.module for blame in found.blamed] == ["k", "v"]
    after = {value.site: value.follows for value in found.values if value.kind == "output"}
    assert after == {"k": "", "v": "", "o": "k", "": "k"}


def _verdict(a: Tensor, b: Tensor) -> str:
    return compare({"x": a}, {"x": b}).values[0].verdict


def test_numbers_whose_squares_are_lost_are_still_told_apart() -> None:
    """Tiny and huge ones, and whole ones that float64 does not hold."""
    ones = torch.ones(1000)
    for size in (1e-24, 1e-38, 1e30):
        assert _verdict(ones * size, ones * (1.1 * size)) == "wrong"
    wide = ones.double()
    for size in (1e-200, 1e200):
        assert _verdict(wide * size, wide * (1.1 * size)) == "wrong"
        assert abs(tensor_errors(wide * size, wide * (1.1 * size)).rel_l2 - 0.1) < 1e-9
    assert _verdict(torch.zeros(3), torch.full((3,), 1e-30)) == "wrong"
    big = torch.tensor([2**53])
    assert _verdict(big, big + 1) == "wrong"
    assert tensor_errors(big, big + 1).max_abs == 1
    assert tensor_errors(torch.tensor([-(2**62)]), torch.tensor([2**62])).max_abs == 2.0**63
