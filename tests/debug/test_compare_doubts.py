"""What a comparison cannot know it says; what it can still compare it compares."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.debug.compare.compare import compare
from hookline.debug.compare.measure import tensor_errors
from hookline.debug.compare.result import Comparison
from hookline.debug.compare.start_trace import trace
from hookline.when import StepSchedule

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


def test_notes_of_users_decide_nothing(tmp_path: Path) -> None:
    """Whatever words are in them; they are shown."""
    model = _layers(1)
    for name in "ab":
        with trace(model, to=tmp_path / name, kinds="output") as running, torch.no_grad():
            running.note("batch 7 was left out by the sampler, whose budget is spent")
            model(X)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.ok
    assert any("by the sampler" in note for note in found.notes)


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


def test_rows_that_cancel_are_rounding(tmp_path: Path) -> None:
    """A token that is large at first, and small at the end, keeps the rounding of the large one."""

    def grow(x: Tensor) -> Tensor:
        x[0] *= 1e4
        return x

    def shrink(x: Tensor) -> Tensor:
        x[0] -= x[0].mean(-1, keepdim=True)
        return x

    torch.manual_seed(1)
    model: Any = nn.Sequential(
        Changed(lambda x: grow(x + 1)), nn.Linear(16, 16), Changed(shrink), nn.LayerNorm(16), nn.Linear(16, 16)
    )
    model[1].weight.data = torch.eye(16) + 1e-3 * model[1].weight.data
    half = copy.deepcopy(model).bfloat16()
    found = _of(model, half, tmp_path, X, X.bfloat16())
    assert not any(value.verdict == "wrong" for value in found.values)


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


def test_nan_at_another_place_is_unsure_by_fingerprints(tmp_path: Path) -> None:
    """Counts and norms are the same, hashes are not."""

    def spoil(place: int) -> Any:
        return Changed(lambda x: x.index_fill(1, torch.tensor([place]), float("nan")))

    ones = torch.ones(1, 6)
    found = _of(spoil(0), spoil(1), tmp_path, ones, tensors=False, kinds="output")
    assert (found.values[0].verdict, found.ok) == ("unsure", False)
    assert _of(spoil(0), spoil(0), tmp_path, ones, tensors=False, kinds="output").ok


def test_a_noise_run_of_the_dtype_of_b_is_the_floor(tmp_path: Path) -> None:
    """A right run in bfloat16 shows its rounding: a smaller bug than the model of rounding sees is found."""
    right, wrong = _layers(3), _layers(3)
    wrong[1].weight.data *= 1.03
    a = _traced(right, tmp_path / "a")
    good = _traced(_layers(3).bfloat16(), tmp_path / "good", X.bfloat16())
    exact = _traced(_layers(3).double(), tmp_path / "exact", X.double())
    b = _traced(wrong.bfloat16(), tmp_path / "b", X.bfloat16())
    assert compare(a, b).ok
    assert compare(a, good, noise=[exact, good]).ok
    assert compare(a, b, noise=[exact, good]).blame == "1"


def test_noise_is_found_whatever_names_and_steps_b_has(tmp_path: Path) -> None:
    """The noise run has those of A: a prefix more than B, and steps that B does not have."""
    values = {f"layers.{place}": torch.randn(64, generator=torch.Generator().manual_seed(place)) for place in range(4)}
    a = {f"model.{name}": value for name, value in values.items()}
    noise = {name: value * (1 + 1e-3) for name, value in a.items()}
    b = {name: value * (1 - 1e-3) for name, value in values.items()}
    found = compare(a, b, noise=noise)
    assert found.ok, found.summary
    assert {round(value.floor, 4) for value in found.values} == {1e-3}
    runs = []
    for name, first, factor in (("a", 0, 1.0), ("noise", 0, 1 + 1e-3), ("b", 1, 1 - 1e-3)):
        model = _layers(2)
        model[1].weight.data *= factor
        schedule = StepSchedule(warmup=first)
        runs.append(_traced(model, tmp_path / name, times=first + 1, every=schedule))
    found = compare(runs[0], runs[2], noise=runs[1])
    assert found.ok, found.summary


def test_what_has_no_partner_is_told_shortly(tmp_path: Path) -> None:
    """Other shapes are in the headline, with the leaf; dozens of other call counts are a few lines."""
    pair = {"x": (torch.ones(3), torch.ones(3)), "y": torch.ones(2)}
    found = compare(pair, {"x": (torch.ones(3), torch.ones(4)), "y": torch.ones(2)})
    assert found.headline[-1] == "The runs differ: 1 values could not be compared."
    assert found.headline[1].startswith("First divergence: x (output 1, step 0, call 0): wrong, its shape is (3,) in A")
    assert found.blame == "x"
    assert "x (output 1, step 0, call 0)" in found.summary
    same = compare({"x": torch.ones(3)}, {"x": torch.ones(3) + 1e-7})
    assert "would not be seen" in same.summary
    twice = nn.Sequential(*(Twice(layer, count=2) for layer in _layers(5)))
    once = nn.Sequential(*(Twice(layer, count=1) for layer in _layers(5)))
    notes = _of(once, twice, tmp_path).notes
    assert sum("compared in order" in note for note in notes) == 3
    assert any("more sites and steps" in note for note in notes)


class Twice(nn.Module):
    """Calls a layer some times."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, x: Tensor) -> Any:
        for _ in range(self.count):
            y = self.layer(x)
        return y


def test_no_bound_allows_nan_in_one_run_alone() -> None:
    """Not even an infinite one."""
    a, b = {"x": torch.ones(3)}, {"x": torch.tensor([1.0, float("nan"), 1.0])}
    assert not compare(a, b, thresholds={"*": float("inf")}).ok
    assert compare(a, {"x": torch.zeros(3)}, thresholds={"*": float("inf")}).ok
