"""What a comparison cannot know it says; what it can still compare it compares."""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline.debug.compare.compare import compare
from hookline.debug.compare.measure import tensor_errors
from hookline.debug.compare.result import Comparison
from hookline.debug.compare.trace import trace

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))


def _traced(model: nn.Module, to: Path, x: Tensor = X, times: int = 1, **options: Any) -> Path:
    options = {"kinds": ("input", "output"), "tensors": True, **options}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that something is left out is what the tests ask for
        with trace(model, to=to, **options):
            for _ in range(times):
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
    a = _traced(_layers(6), tmp_path / "a", times=8)
    assert compare(a, _traced(_layers(6), tmp_path / "b", times=8)).ok
    spent = compare(a, _traced(_layers(6), tmp_path / "c", times=8, budget=3_000))
    assert not spent.ok
    assert any(line.startswith("Unsure: ") for line in spent.headline)
    assert any("B: " in line and "is spent" in line for line in spent.remarks)
    models: list[Any] = [nn.Sequential(nn.Identity(), Sparse()) for _ in range(2)]
    models[1][1].factor = 3.0
    sparse = compare(*(_traced(model, tmp_path / f"s{place}") for place, model in enumerate(models)))
    assert not sparse.ok
    assert len(sparse.left_out) >= 2


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
    ends = torch.iinfo(torch.int64)
    assert tensor_errors(torch.tensor([ends.max, 0]), torch.tensor([ends.min, 0])).max_abs == 2.0**64
    lowest = torch.finfo(torch.float64).min
    assert _verdict(torch.tensor([lowest, 0.0]).double(), torch.tensor([lowest, 1.0]).double()) == "wrong"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_mask_is_filled_with_the_lowest_number_of_its_dtype(dtype: torch.dtype) -> None:
    """That is another number in each dtype, and means the same; an entry that is masked in one run alone is wrong."""
    masks = [torch.zeros(4, 4, dtype=one) for one in (torch.float32, dtype)]
    for mask in masks:
        mask.masked_fill_(torch.ones(4, 4).triu(1).bool(), torch.finfo(mask.dtype).min)
    assert _verdict(*masks) == "within rounding"
    masks[1][3, 0] = torch.finfo(dtype).min
    assert _verdict(*masks) == "wrong"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_numbers_are_compared_with_wider_ones(dtype: torch.dtype) -> None:
    """The largest number of an 8-bit dtype is an ordinary one: 448 in one run and infinity in the other is wrong."""
    wide = X.clone()
    wide[0, 0] = torch.finfo(dtype).max
    assert _verdict(wide.to(dtype), wide.bfloat16()) == _verdict(wide.bfloat16(), wide.to(dtype)) == "within rounding"
    infinite = wide.clone()
    infinite[0, 0] = math.inf
    assert _verdict(wide.to(dtype), infinite.bfloat16()) == "wrong"


def _of(a: nn.Module, b: nn.Module, to: Path, x: Tensor = X, x_b: Tensor | None = None, **options: Any) -> Comparison:
    runs = _traced(a, to / "a", x, **options), _traced(b, to / "b", x if x_b is None else x_b, **options)
    found = compare(*runs)
    for run in runs:
        shutil.rmtree(run)
    return found


class Changed(nn.Module):
    """Applies a function to what it is given."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(x.clone())


def test_one_wrong_row_or_channel_is_found_in_a_large_tensor(tmp_path: Path) -> None:
    """One token of 4096 in bfloat16 has the other sign; one channel is 20 % off beside one of a million."""

    def flip(x: Tensor) -> Tensor:
        x[1000] *= -1
        return x

    def stretch(x: Tensor) -> Tensor:
        x[:, 10] *= 1.2
        return x

    rows = torch.randn(4096, 16, generator=torch.Generator().manual_seed(6)).bfloat16()
    right, wrong = (
        nn.Sequential(_layers(1), Changed(change)).bfloat16() for change in (torch.tanh, lambda x: flip(x.tanh()))
    )
    found = _of(right, wrong, tmp_path, rows)
    assert (found.blame, found.values[-1].verdict) == ("1", "wrong")
    assert found.first is not None
    assert found.first.where.startswith("[1000, ")
    models: list[Any] = [nn.Sequential(_layers(1), Changed(change)) for change in (torch.clone, stretch)]
    for model in models:
        model[0][0].bias.data[3] = 1e6
    found = _of(models[0], models[1], tmp_path)
    assert (found.blame, found.blamed[0].value.verdict) == ("1", "wrong")
    assert "of one row or channel" in found.summary


def test_a_coarse_side_branch_does_not_hide_errors_in_float32(tmp_path: Path) -> None:
    """It is the same to the bit in both runs, so no later value has its rounding."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.a = Changed(lambda x: x.bfloat16()), _layers(2)

        def forward(self, x: Tensor) -> Any:
            self.side(x)
            return self.a(x)

    wrong = Branched()
    wrong.a[0].weight.data *= 1.02
    found = _of(Branched(), wrong, tmp_path)
    assert (found.blame, found.blamed[0].value.verdict) == ("a.0", "wrong")


def test_amplified_rounding_is_unsure_and_a_bug_behind_it_is_not(tmp_path: Path) -> None:
    """A norm after a common offset: no module is blamed, until noise is measured or a weight is wrong."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    model[0].bias.data += 300
    for dtype in (torch.float64, torch.bfloat16):
        found = _of(model, copy.deepcopy(model).to(dtype), tmp_path, X, X.to(dtype))
        assert (found.blame, found.ok) == (None, False)
        assert {value.verdict for value in found.values} == {"within rounding", "unsure"}
        assert "Unsure: 1 (output" in found.summary
        assert "noise=" in found.summary
    nudged = copy.deepcopy(model)
    nudged[0].register_forward_hook(lambda *call: call[2] * (1 + 6e-8))
    assert _of(model, nudged, tmp_path).blame is None
    exact = _traced(copy.deepcopy(model).double(), tmp_path / "exact", X.double())
    a, b = _traced(model, tmp_path / "a"), _traced(nudged, tmp_path / "b")
    assert compare(a, b, noise=exact).ok
    nudged[1].weight.data *= 1.1
    found = compare(a, _traced(nudged, tmp_path / "c"))
    assert found.blame == "1"
    assert "is given the same up to rounding" in found.summary


def test_rounding_that_grows_with_depth_is_not_blamed(tmp_path: Path) -> None:
    """Sixty layers of a net that doubles small differences."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers(60)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x) * 3)
            return x.softmax(-1)

    found = _of(Deep(), Deep().double(), tmp_path, X, X.double())
    assert found.blame is None


def test_no_bound_allows_nan_in_one_run_alone() -> None:
    """Not even an infinite one."""
    a, b = {"x": torch.ones(3)}, {"x": torch.tensor([1.0, float("nan"), 1.0])}
    assert not compare(a, b, thresholds={"*": float("inf")}).ok
    assert compare(a, {"x": torch.zeros(3)}, thresholds={"*": float("inf")}).ok


def test_a_module_that_is_given_the_same_has_the_rounding_of_one_operation(tmp_path: Path) -> None:
    """Two channels are 5 % off, or all are 2 % off, in bfloat16, after layers that would have rounded by more."""
    for rows, factor in ((2, 1.05), (16, 1.02)):
        right = _layers(8).bfloat16()
        wrong = copy.deepcopy(right)
        wrong[6].weight.data[:rows] *= factor
        wrong[6].bias.data[:rows] *= factor
        found = _of(right, wrong, tmp_path, X.bfloat16())
        (value,) = [value for value in found.values if value.site == "6" and value.kind == "output"]
        assert (found.ok, found.blame, value.verdict) == (False, None, "unsure")
        assert "it is given the same" in value.doubt
