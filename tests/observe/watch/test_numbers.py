"""Every way to reduce a tensor gives the numbers of a float64 reference, over random shapes, dtypes and values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers_stats import assert_close, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl
from hookline.observe.watch import graph_stats as rows
from hookline.observe.watch.graph_stats import as_columns, summarize
from hookline.observe.watch.stat_columns import DEFAULT_STATS, Layout
from hookline.observe.watch.stats_engine import StatsEngine, WatchedPlace
from hookline.observe.watch.watch_hooks import ModuleStatsHook

ALL = (*DEFAULT_STATS, "nan", "inf", "finite_min", "finite_max", "over:0.5", "over:2")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
WAYS = ["numbers", "vector", "columns"]


def take(engine: StatsEngine, place: WatchedPlace, tensor: Tensor, way: str) -> None:
    """Show a tensor to a place: by numbers (CPU), by a vector (compiled code) or by columns (other devices)."""
    if way == "numbers":
        engine.take(place, tensor)
    elif way == "vector":
        engine.take_vector(place, summarize(tensor, engine.layout))
    else:
        columns = as_columns(summarize(tensor, engine.layout), engine.layout)
        engine.row(place, torch.device("cpu")).take(columns)


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
@settings(max_examples=150, deadline=None)
@given(shown=st.lists(tensors(), min_size=1, max_size=3))
def test_statistics_equal_those_of_a_float64_reference(way: str, shown: list[Tensor]) -> None:
    """Counts and extremes exactly, moments within 1e-3, for one to three firings of unlike shapes and dtypes."""
    assert_close(taken(shown, ALL, way), reference(shown, ALL))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ratio", [0.0, 1.0, 10.0, 100.0, 1e3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_spread_is_right_however_far_the_mean_is(way: str, ratio: float, dtype: torch.dtype) -> None:
    """Standard deviation and mean to 1e-3 of the spread, for a million numbers; beyond 1e4 float32 has none to show."""
    numbers = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + ratio
    shown = [numbers.to(dtype)]
    assert_close(taken(shown, DEFAULT_STATS, way), reference(shown, DEFAULT_STATS))


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
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e15, 1e25])
def test_numbers_whose_squares_no_float32_can_hold_are_right(way: str, scale: float) -> None:
    """Tiny gradients and huge activations: the norm is neither zero nor infinite, and there is no false alarm."""
    shown = [torch.linspace(0.5, 1.5, 999) * scale]
    for stats in (("norm", "rms", "mean", "min", "max", "nonfinite"), ("norm", "std", "mean")):
        assert_close(taken(shown, stats, way), reference(shown, stats))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_outliers_do_not_spoil_the_rest(way: str, dtype: torch.dtype) -> None:
    """First and last of mostly zeros; two among a million small ones; a mean of twenty times the spread."""
    sparse = torch.zeros(8, 128, 256)
    sparse[0, 0] = sparse[-1, -1] = 3.3
    small = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 1e-3
    small[0] = small[-1] = 1e4
    far = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) + 19.5
    for tensor in (sparse, small, far):
        shown = [tensor.to(dtype)]
        assert_close(taken(shown, DEFAULT_STATS, way), reference(shown, DEFAULT_STATS))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_told_of_nan_where_nobody_counted_them(way: str) -> None:
    """On the CPU they are counted at once; elsewhere only if asked for, and then zeros would be false."""
    found = taken([torch.tensor([1.0, math.nan, math.inf])], DEFAULT_STATS, way)
    assert found["nonfinite"] == 1.0
    counted = {name: found[name] for name in ("nan", "inf", "finite_min", "finite_max") if name in found}
    assert counted == ({"nan": 1.0, "inf": 1.0, "finite_min": 1.0, "finite_max": 1.0} if way == "numbers" else {})


def test_only_what_is_asked_for_is_computed_and_told() -> None:
    """A norm needs neither extremes nor zeros."""
    layout = Layout.of(("norm",))
    assert (layout.moments, layout.extremes, layout.zeros) == (True, False, False)
    shown = [torch.arange(6.0)]
    for way in WAYS:
        assert taken(shown, ("norm",), way) == {"norm": pytest.approx(math.sqrt(55))}
        assert taken(shown, ("zero_fraction",), way) == {"zero_fraction": pytest.approx(1 / 6)}
        assert taken(shown, ("max", "over:3"), way) == {"max": 5.0, "over:3": pytest.approx(2 / 6)}


def test_a_norm_alone_still_raises_the_alarm() -> None:
    """Whatever is not finite shows in the sums."""
    found = taken([torch.tensor([1.0, math.nan])], ("norm",), "numbers")
    assert found["nonfinite"] == 1.0
    assert found["nan"] == 1.0


def test_after_an_alarm_the_details_are_there_unasked() -> None:
    """How many NaN and Inf, and what the finite rest spans; before, there is no word of them."""
    engine = StatsEngine(Layout.of(None))
    place = engine.place("x", "")
    engine.take(place, torch.tensor([1.0, -2.0]))
    assert not {"x/nan", "x/inf"} & engine.to_metrics().keys()
    engine.take(place, torch.tensor([math.nan, math.inf, -math.inf, 3.0]))
    found = engine.to_metrics()
    assert (found["x/nan"], found["x/inf"], found["x/nonfinite"]) == (1.0, 2.0, 1.0)
    assert (found["x/finite_min"], found["x/finite_max"]) == (-2.0, 3.0)
    assert math.isnan(found["x/min"])
    engine.reset()
    engine.take(place, torch.tensor([1.0]))
    assert engine.to_metrics()["x/nonfinite"] == 0.0


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
    assert_close(taken([shown], DEFAULT_STATS, "numbers"), reference([like], DEFAULT_STATS))


def test_rows_never_move_and_the_state_grows_by_blocks() -> None:
    """A thousand places: the memory of the first row is where it was."""
    engine = StatsEngine(Layout.of(None))
    first = engine.row(engine.place("0", ""), torch.device("cpu"))
    where = first.added.data_ptr()
    for index in range(1000):
        engine.take(engine.place(str(index), ""), torch.full((3,), float(index)))
    engine.reset()
    engine.take(engine.place("0", ""), torch.ones(5))
    assert first.added.data_ptr() == where
    assert first.added[1] == 5
    metrics = engine.to_metrics()
    assert metrics == {name: value for name, value in metrics.items() if name.startswith("0/")}


def test_two_threads_on_one_place_lose_nothing() -> None:
    """Eight threads, two hundred tensors each."""
    from concurrent.futures import ThreadPoolExecutor

    engine = StatsEngine(Layout.of(None))
    place = engine.place("x", "")
    engine.take(place, torch.ones(4))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [engine.take(place, torch.ones(4)) for _ in range(200)], range(8)))
    (cells,) = engine.read().values()
    assert (cells["fires"], cells["count"], cells["sum"]) == (1601, 6404, 6404)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_finds_the_same(dtype: torch.dtype) -> None:
    """The vector, compiled into loops of its own, over unlike shapes and a mean that is far from zero."""
    torch.compiler.reset()
    layout = Layout.of(ALL)
    found = torch.compile(summarize, fullgraph=True, dynamic=True)
    numbers = torch.Generator().manual_seed(0)
    for shape, ratio in [((64, 257), 100.0), ((301, 43), -1.0)]:
        shown = [(torch.randn(shape, generator=numbers) + ratio).to(dtype)]
        engine = StatsEngine(layout)
        engine.take_vector(engine.place("x", ""), found(shown[0], layout))
        metrics = {name.removeprefix("x/"): value for name, value in engine.to_metrics().items()}
        assert_close(metrics, reference(shown, ALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(9, 768), (5, 3072), (3, 4, 96), (2, 5, 12, 12), (64,), (2, 1), (7, 1031), (3, 8200)]
)
def test_rows_tell_what_the_whole_does(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As graphs on a GPU find it: by rows, or where those would be too long, short or uneven, not at all."""
    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    layout = Layout.of(None)
    for ratio, strided in itertools.product((0.0, -100.0, 1e4), (False, True)):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu() + ratio).to(dtype)
        x = x.transpose(0, -1).contiguous().transpose(0, -1) if strided else x
        found, each = rows.find_in(x, layout)
        assert each == {(2, 1): 1, (7, 1031): 1, (3, 8200): 1, (5, 3072): 1024, (2, 5, 12, 12): 144}.get(
            shape, shape[-1]
        )
        engine = StatsEngine(layout)
        engine.take_found([(engine.place("x", ""), found if each > 1 else [x], each, None)])
        metrics = {name.removeprefix("x/"): value for name, value in engine.to_metrics().items()}
        assert_close(metrics, reference([x], DEFAULT_STATS))


def test_the_rows_of_compiled_code_are_those_of_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watched model compiled as for a GPU, also for other sizes of batch: two graphs, the numbers of eager code."""
    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 2304), nn.LayerNorm(2304), nn.ReLU(), nn.Linear(2304, 96), nn.Linear(96, 1))
        graphs = CompileCounterWithBackend("aot_eager")
        watch = hl.watch(model, "*")
        run = torch.compile(model, backend=graphs, fullgraph=True) if compiled else model
        for batch in (3, 4, 6):
            run(torch.randn(batch, 5, 48)).sum().backward()
        found.append(watch.to_metrics())
        watch.remove()
        assert graphs.frame_count == 2 * compiled
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


class Widened(nn.Module):
    """What transformers do beside attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.narrow = nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.act(self.wide(self.norm(x))))


def _kept_for_backward(*, watched: bool) -> list[tuple[int, str]]:
    """Sizes and types of what the compiled forward of a small network keeps, weights apart."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Widened(64), nn.LayerNorm(64), nn.Linear(64, 64))
    watch = hl.watch(model, "*") if watched else None
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    run = torch.compile(model, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = run(torch.randn(48, 64))
    out.float().sum().backward()
    if watch is not None:
        assert watch.to_metrics()["1.act/backward/norm"] > 0
        watch.remove()
    return sorted((tensor.numel(), str(tensor.dtype)) for tensor in kept if tensor.numel() > 1)


def test_the_compiler_keeps_for_the_backward_what_it_would_have_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """WatchedPlace or not, the same bytes; and the switch that was borrowed for it is back."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        bare = _kept_for_backward(watched=False)
        assert _kept_for_backward(watched=True) == bare
        assert inductor.joint_custom_pre_pass is None
        monkeypatch.setattr("hookline.sites._torch._move_late", lambda graph, ops: None)
        assert _kept_for_backward(watched=True) != bare  # the negative control


def test_a_graph_hands_over_all_that_it_found_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the forward, one for the backward, whatever else a graph hands over; with the numbers of each module."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    received: list[tuple[bool, int]] = []
    receive = ModuleStatsHook.receive

    def spy(self: ModuleStatsHook, items: Any) -> None:
        received.append((self._is_forward, len(items)))
        receive(self, items)

    monkeypatch.setattr(ModuleStatsHook, "receive", spy)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Widened(64), nn.LayerNorm(64), nn.Linear(64, 10))
    with (
        hl.watch(model, "*") as watch,
        inductor.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
    ):
        x = torch.randn(48, 64)
        torch.compile(model, fullgraph=True)(x).sum().backward()
        found = watch.to_metrics()
    # The model and its last layer give out rows of 10, which are too short, and are handed over one by one.
    assert sorted(received) == [(False, 1)] * 2 + [(False, 7)] + [(True, 1)] * 2 + [(True, 7)]
    wide = model[1].wide(model[1].norm(model[0](x)))
    assert found["1.wide/forward/norm"] == pytest.approx(wide.norm().item(), rel=1e-5)


class Rewritten(nn.Module):
    """Gives its input and a buffer out as they are, and then writes to both; and one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.kept, self.layer = nn.Identity(), nn.Identity(), nn.Linear(64, 64)
        self.register_buffer("memory", torch.zeros(4, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.same(x) * 1.5) + self.kept(self.memory)
        x.add_(1)
        self.memory.add_(1)
        return self.same(y.relu())


class Twice(nn.Module):
    """What comes in and what goes out passes by the same module; the backward needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.layer = nn.Identity(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.layer(self.same(x)).relu())


@pytest.mark.parametrize("make", [Rewritten, Twice])
def test_what_inductor_looks_at_last_it_sees_once_and_before_it_is_written_to(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a GPU: inputs and buffers that the graph changes, and tensors that the backward has as well."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        watch = hl.watch(model, "*", on=["forward", "backward"])
        run = torch.compile(model, fullgraph=True) if compiled else model
        with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
            for _ in range(2):
                run(torch.randn(4, 64).requires_grad_(make is Twice)).sum().backward()
        found.append(watch.to_metrics())
        watch.remove()
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_a_row_of_open_length_with_a_bound_leaves_the_graph_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mark_dynamic(..., max=)``: known to be short, and no number. One graph for all lengths."""
    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    torch.compiler.reset()
    model = nn.Sequential(nn.GELU(), nn.Tanh())
    graphs = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=graphs, fullgraph=True)
    with hl.watch(model, "*", on="forward") as watch:
        for length in (64, 96, 128):
            x = torch.randn(4, length)
            torch._dynamo.mark_dynamic(x, 1, min=32, max=1024)
            watch.reset()
            out = run(x)
            assert watch.to_metrics()["1/forward/norm"] == pytest.approx(out.norm().item(), rel=1e-5)
    assert graphs.frame_count == 1


def test_rows_of_nothing_are_a_firing_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty batch, where no kernel adds up."""
    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    for stats in (None, ("norm",), ("max",)):
        engine = StatsEngine(Layout.of(stats))
        found, each = rows.find_in(torch.ones(0, 64), engine.layout)
        assert each == 64
        place = engine.place("x", "")
        engine.take_found([(place, found, each, None)])
        cells = engine.read()[place]
        assert (cells["fires"], cells["count"], cells["bad"]) == (1, 0, 0)


def test_passes_of_the_user_are_called_before_ours_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, several, none: in their order, once for a graph."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import torch._inductor.custom_graph_pass as passes

    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    called: list[str] = []
    monkeypatch.setattr("hookline.sites._torch._move_late", lambda graph, ops: called.append("ours"))
    several = [lambda graph: called.append("a"), lambda graph: called.append("b")]
    cases: list[tuple[Any, list[str]]] = [(several[0], ["a", "ours"]), (None, ["ours"])]
    if hasattr(passes, "get_custom_graph_passes"):  # lists are taken since 2.13
        cases.append((several, ["a", "b", "ours"]))
    for theirs, expected in cases:
        torch.compiler.reset()
        called.clear()
        model = nn.Linear(64, 64)
        with (
            inductor.patch(fx_graph_cache=False, joint_custom_pre_pass=theirs),
            functorch.patch(enable_autograd_cache=False),
            hl.watch(model, None, on="forward"),
            torch.no_grad(),
        ):
            torch.compile(model, fullgraph=True)(torch.randn(4, 64))
            assert inductor.joint_custom_pre_pass is theirs
        assert called == expected
