"""Every way to reduce a tensor gives the numbers of a float64 reference, over random shapes, dtypes and values."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_stats import assert_close, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hookline as hl
from hookline.observe.watch.engine import StatsEngine, WatchedPlace
from hookline.observe.watch.row import DEFAULT_STATS, Layout, reduce_on_device

ALL = (*DEFAULT_STATS, "nan", "inf", "finite_min", "finite_max", "over:0.5", "over:2")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
WAYS = ["cpu", "device"]


def take(engine: StatsEngine, place: WatchedPlace, tensor: Tensor, way: str) -> None:
    """Show a tensor to a place: as on a CPU, or as on a device without a kernel."""
    if way == "cpu":
        engine.take(place, tensor)
    else:
        engine.row(place, torch.device("cpu")).merge_tensor(reduce_on_device(tensor, engine.layout))


def taken(tensors: list[Tensor], stats: tuple[str, ...], way: str) -> dict[str, object]:
    """The metrics of one place that was shown these tensors."""
    engine = StatsEngine(Layout.of(stats))
    place = engine.place("x", "")
    for tensor in tensors:
        take(engine, place, tensor, way)
    return {name.removeprefix("x/"): value for name, value in engine.to_metrics().items()}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any tensor a module may give out: shape, dtype, layout in memory, offset, size, special values."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale, ratio = 10.0 ** draw(st.integers(-6, 4)), draw(st.sampled_from([0.0, 0.0, 1.0, -10.0, 100.0]))
    numbers = (torch.randn(shape, generator=generator, dtype=torch.float64) + ratio) * scale
    if draw(st.booleans()):
        numbers = numbers * (torch.rand(shape, generator=generator) > 0.5)
    special = draw(st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]))
    if special is not None and numbers.numel():
        numbers.view(-1)[draw(st.integers(0, numbers.numel() - 1))] = special
    if not dtype.is_floating_point:
        numbers = numbers.nan_to_num(0, 0, 0).clamp(-100, 100)
    tensor = numbers.to(dtype)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=100, deadline=None)
@given(shown=st.lists(tensors(), min_size=1, max_size=3))
def test_statistics_equal_those_of_a_float64_reference(way: str, shown: list[Tensor]) -> None:
    """Counts and extremes exactly, moments within 1e-3, for one to three firings of unlike shapes and dtypes."""
    assert_close(taken(shown, ALL, way), reference(shown, ALL))


@pytest.mark.product(
    way=WAYS, ratio=[0.0, 1.0, 10.0, 100.0, 1e3, 1e4], dtype={"float32": torch.float32, "float64": torch.float64}
)
def test_the_spread_is_right_however_far_the_mean_is(way: str, ratio: float, dtype: torch.dtype) -> None:
    """Standard deviation and mean to 1e-3 of the spread, for a million numbers; beyond 1e4 float32 has none to show."""
    numbers = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + ratio
    shown = [numbers.to(dtype)]
    assert_close(taken(shown, DEFAULT_STATS, way), reference(shown, DEFAULT_STATS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [0.1, 1.1, -7.3, 1e-5])
def test_equal_numbers_have_no_spread(way: str, value: float) -> None:
    """Not that of rounding."""
    assert taken([torch.full((1001,), value)], ("std",), way)["std"] == 0.0


@pytest.mark.parametrize("way", WAYS)
def test_counts_are_exact_past_two_to_the_24(way: str) -> None:
    """Twenty million zeros and one that is none: float32 could not tell."""
    zeros = torch.zeros(20_000_001, dtype=torch.int8)
    zeros[7] = 1
    engine = StatsEngine(Layout.of(("zero_fraction", "over:0.5")))
    place = engine.place("x", "")
    take(engine, place, zeros, way)
    (cells,) = engine.read().values()
    assert (cells["count"], cells["zeros"], cells["over:0.5"]) == (20_000_001, 20_000_000, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_with_nan_here_and_there_is_one_firing_with_nan(way: str) -> None:
    """However far apart they are: long tensors are read in blocks."""
    tensor = torch.ones(1 << 20)
    tensor[::1000] = math.nan
    assert taken([tensor, torch.ones(3)], ("norm",), way)["nonfinite"] == 1.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e15, 1e25])
def test_numbers_whose_squares_no_float32_can_hold_are_right(way: str, scale: float) -> None:
    """Tiny gradients and huge activations: the norm is neither zero nor infinite, and there is no false alarm."""
    shown = [torch.linspace(0.5, 1.5, 999) * scale]
    for stats in (("norm", "rms", "mean", "min", "max", "nonfinite"), ("norm", "std", "mean")):
        assert_close(taken(shown, stats, way), reference(shown, stats))


def test_a_norm_alone_still_raises_the_alarm() -> None:
    """Whatever is not finite shows in the sums."""
    found = taken([torch.tensor([1.0, math.nan])], ("norm",), "cpu")
    assert found["nonfinite"] == 1.0
    assert found["nan"] == 1.0
    assert "nonfinite" not in taken(
        [torch.tensor([1e200, 1.0], dtype=torch.float64)], ("norm",), "cpu"
    )  # its square is


@pytest.mark.filterwarnings("ignore:.*(quantize|beta state|prototype)")
@pytest.mark.parametrize(
    "kind", ["sparse", "csr", "nested", "quantized", "neg", "conj", "expanded", "complex", "strided"]
)
def test_unusual_tensors_are_counted_by_the_numbers_they_have(kind: str) -> None:
    """Sparse, nested, quantized, views that negate, repeat or skip."""
    base = torch.tensor([[1.0, 0.0, -2.0], [0.0, 3.0, 0.0]])
    made = {
        "sparse": lambda: (base.to_sparse(), base[base != 0]),
        "csr": lambda: (base.to_sparse_csr(), base[base != 0]),
        "nested": lambda: (
            torch.nested.nested_tensor([base[0], base[1, :2]], layout=torch.jagged),
            torch.tensor([1.0, 0, -2, 0, 3]),
        ),
        "quantized": lambda: (torch.quantize_per_tensor(base, 0.5, 0, torch.qint8), base),
        "neg": lambda: (torch.complex(base, base).conj().imag, -base),
        "conj": lambda: (torch.complex(base, base).conj(), torch.complex(base, base)),
        "expanded": lambda: (base[0].expand(4, 3), base[0].repeat(4, 1)),
        "complex": lambda: (torch.complex(base, base), torch.complex(base, base)),
        "strided": lambda: (base[:, ::2], base[:, ::2].clone()),
    }
    shown, like = made[kind]()
    assert_close(taken([shown], DEFAULT_STATS, "cpu"), reference([like], DEFAULT_STATS))


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        (["meen"], r"Unknown statistic 'meen'; did you mean 'mean'\? There are mean, .*over:6"),
        ([], r"stats= is empty; leave it out for the default set \(mean,"),
        (["over:x"], "'over:x': write the threshold as a number"),
        (["over:-1"], "'over:-1': the threshold is for magnitudes, so it must be a finite number of at least 0"),
        (["over:nan"], "must be a finite number"),
        ([3], "Unknown statistic 3"),
    ],
)
def test_statistics_that_do_not_exist_are_errors(stats: list[object], text: str) -> None:
    """With what there is, and the one that was meant."""
    with pytest.raises(hl.errors.OptionError, match=text):
        Layout.of(stats)  # type: ignore[arg-type]
