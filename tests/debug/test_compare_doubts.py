"""What a comparison cannot know it says; what it can still compare it compares."""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.cli.main import main
from hookline.debug.compare.compare import compare
from hookline.debug.compare.judge import parse_thresholds
from hookline.debug.compare.key import Fingerprint
from hookline.debug.compare.measure import sketch_errors, tensor_errors
from hookline.debug.compare.result import Comparison
from hookline.debug.compare.trace import trace
from hookline.errors import OptionError

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


class Doubled(nn.Linear):
    """Computes in another order: the same but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x[..., :8], self.weight[:, :8]) + nn.functional.linear(
            x[..., 8:], self.weight[:, 8:]
        )


def model() -> nn.Sequential:
    """Six layers, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())))


def traced(net: nn.Module, to: Path, *, steps: int = 1, tensors: bool = True, **options: Any) -> Path:
    """One forward for each step."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with hl.trace(net, to=to, kinds=("input", "output"), tensors=tensors, **options), torch.no_grad():
        for _ in range(steps):
            net(x.to(next(net.parameters()).dtype))
    return to


def test_a_run_that_ended_early_is_not_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever run it is; the exit status is that of runs that differ. For a page that cannot be written it is 2."""
    a, b = traced(model(), tmp_path / "a", steps=3), traced(model(), tmp_path / "b")
    for pair in ((a, b), (b, a)):
        found = hl.compare(*pair)
        assert (found.ok, found.blamed) == (False, [])
        assert "The runs differ: Only some steps: [1, 2] are only in" in found.summary
    assert main(["compare", str(a), str(b)]) == 1
    capsys.readouterr()
    same = traced(model(), tmp_path / "c")
    assert (
        main(["compare", str(b), str(same), "--html", str(tmp_path / "a" / "rank_0" / "records.jsonl" / "page.html")])
        == 2
    )
    out, err = capsys.readouterr()
    assert "Nothing differs." in out
    assert "the page cannot be written" in err


def test_a_noise_run_that_is_equal_to_the_bit_measures_nothing(tmp_path: Path) -> None:
    """A repeated run neither lowers the floor below the modelled one nor below that of a float64 run."""
    a, again = traced(model(), tmp_path / "a"), traced(model(), tmp_path / "again")
    exact = traced(model().double(), tmp_path / "exact")
    other = model()
    for place in (0, 2, 4):
        other[place].__class__ = Doubled  # type: ignore[assignment]
    b = traced(other, tmp_path / "b")
    assert hl.compare(a, b, noise=again).ok
    floors = [
        [value.floor for value in hl.compare(a, b, noise=noise).values] for noise in ([exact], [exact, again], [again])
    ]
    assert floors[0] == floors[1] != floors[2]


def test_one_module_in_another_dtype_is_no_rounding(tmp_path: Path) -> None:
    """The runs differ, with its name; a whole run in bfloat16 is the same up to rounding."""

    def wrapped() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(each) for each in model()))

    a = traced(wrapped(), tmp_path / "a")
    assert hl.compare(a, traced(wrapped().bfloat16(), tmp_path / "half")).ok
    other: Any = wrapped()
    inner = other[2][0]
    inner.bfloat16()
    inner.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    other[2].register_forward_hook(lambda module, args, output: output.float())
    found = hl.compare(a, traced(other, tmp_path / "b"))
    assert (found.ok, found.blamed) == (False, [])
    assert "only 2.0 is bfloat16 in B where A has float32" in found.summary


def _pair(dtype: torch.dtype, count: int = 150_001) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    a = torch.randn(count, generator=source, dtype=torch.float64)
    return a.to(dtype), (a + 1e-2 * torch.randn(count, generator=source, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_measures_are_those_of_float64_over_several_blocks(dtype: torch.dtype) -> None:
    """Each is computed here by its definition, with the sum of products that the block-wise one avoids."""
    a, b = _pair(dtype)
    x, y = a.double(), b.double()
    found = tensor_errors(a, b)
    assert found.max_abs == pytest.approx((x - y).abs().max().item(), rel=1e-6)
    assert found.mean_abs == pytest.approx((x - y).abs().mean().item(), rel=1e-5)
    assert found.rel_l2 == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-5)
    assert found.rel_diff == pytest.approx((1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item(), rel=1e-4, abs=1e-12)
    assert found.rms_a == pytest.approx(x.square().mean().sqrt().item(), rel=1e-5)
    assert not found.is_equal
    assert tensor_errors(a, a.clone()).is_equal


def test_what_is_not_finite_in_one_alone_is_an_error_and_in_both_is_none() -> None:
    """NaN beside NaN is equal; NaN beside a number, or the other infinity, is not."""
    nan, inf = math.nan, math.inf
    both = tensor_errors(torch.tensor([nan, inf, 1.0, 2.0]), torch.tensor([nan, inf, 1.0, 2.5]))
    assert (both.mismatched, both.bad_a, both.bad_b, both.max_abs) == (0, 2, 2, 0.5)
    one = tensor_errors(torch.tensor([1.0, inf, 1.0]), torch.tensor([nan, -inf, 1.0]))
    assert (one.mismatched, one.bad_a, one.bad_b, one.rel_l2) == (2, 1, 2, inf)
    same = tensor_errors(torch.tensor([nan, 3.0]), torch.tensor([nan, 3.0]))
    assert same.is_equal
    assert same.norm_a == 3


def test_an_estimate_from_sketches_is_near_the_error_and_says_so() -> None:
    """Signs in groups, as traces have them; within a factor of 2 for this seed, and no more is promised."""
    a, b = _pair(torch.float64, 4096)
    signs = torch.randint(0, 2, (4096,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1

    def of(x: Tensor) -> Fingerprint:
        sketch = (x * signs).view(-1, 16).sum(0)
        return Fingerprint(4096, x.mean().item(), x.norm().item(), x.abs().max().item(), 0, 0, hash(x.sum().item()),
                           tuple(sketch.tolist()))  # fmt: skip

    exact = tensor_errors(a, b)
    found = sketch_errors(of(a), of(b), same_dtype=True)
    assert found.is_estimate
    assert exact.rel_l2 / 2 < found.rel_l2 < 2 * exact.rel_l2
    assert sketch_errors(of(a), of(a), same_dtype=True).is_equal
    without = sketch_errors(replace(of(a), sketch=()), replace(of(b), sketch=()), same_dtype=True)
    assert without.rel_l2 <= exact.rel_l2  # the norms alone: no more than a lower bound
    assert without.is_blind


@pytest.mark.parametrize("text", ["no sign", "=1", "a=", "a=rel:x", "a=rel:1,b"])
def test_a_threshold_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--threshold"):
        parse_thresholds([text])
