"""What the Triton kernel computes, in Triton's interpreter: run by test_kernel.py, in a process of its own."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers_columns import DTYPES, LAYOUTS, assert_close
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.observe.watch import graph as by_rows
from hookline.observe.watch import kernel as kernels
from hookline.observe.watch.engine import DeviceRows, ExponentBins, StatRow, StatsEngine
from hookline.observe.watch.graph import GraphHandover
from hookline.observe.watch.kernel import Kernel, readable
from hookline.observe.watch.pending import PendingTensors
from hookline.observe.watch.row import Layout
from hookline.sites.compiled.op_schemas import Share

# numpy, which the interpreter computes with, warns of NaN and Inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def small() -> Any:
    """Tiles of 128 numbers of 16 bits, so that a few hundred numbers meet full tiles, rests, and several programs."""
    sizes = {"_THREADS": 4, "_LEAST_TILES": 1, "_MOST_PROGRAMS": 3, "_MERGED": 2, "_ROWS_AT_A_TIME": 16, "_COUNTED": 64}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(kernels, name, size)
        yield


def _rows(layout: Layout, count: int) -> tuple[DeviceRows, list[StatRow]]:
    state = DeviceRows(layout, CPU)
    return state, [state.new_row() for _ in range(count)]


def _kernel(layout: Layout) -> Kernel:
    return Kernel(layout, CPU)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Tensors of any type and size, with what makes statistics hard."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.sampled_from([0, 1, 2, 31, 33, 100, 128, 129, 257, 500]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    if dtype is torch.bool:
        return torch.rand(size) > 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0 if dtype is torch.uint8 else -100, 100, (size,)).to(dtype)
    x = torch.randn(size, dtype=dtype if dtype.is_complex else torch.float64)
    x = x * draw(st.sampled_from([1.0, 1.0, 0.0, 3.0]))
    if dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (
            x * draw(st.sampled_from([1.0, 1e-25, 1e25]))
            if draw(st.booleans())
            else x + draw(st.sampled_from([0, 100]))
        )
    if size and draw(st.booleans()) and not dtype.is_complex:
        x[draw(st.integers(0, size - 1))] = 0.0
    if size and draw(st.booleans()) and dtype is not torch.float8_e4m3fn and not dtype.is_complex:
        for bad in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=2)):
            x[draw(st.integers(0, size - 1))] = bad
    x = x.to(dtype)
    return x[1:] if size > 1 and draw(st.booleans()) else x  # the second does not begin at a multiple of 16 bytes


@settings(
    max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(st.lists(tensors(), min_size=1, max_size=3), st.sampled_from(sorted(LAYOUTS)), st.sampled_from([None, 4.0]))
def test_every_column_is_that_of_float64(some: list[Tensor], name: str, scale: float | None) -> None:
    """Any tensors, alone or together, with NaN, Inf, zeros and extremes: counts exact, sums to 2e-6 of magnitudes."""
    layout = LAYOUTS[name]
    state, rows = _rows(layout, len(some))
    divisor = None if scale is None else torch.tensor(scale)
    _kernel(layout).take([(readable(x), row, divisor) for x, row in zip(some, rows, strict=True)])
    for x, found in zip(some, state.read(), strict=True):
        assert_close(found, x, layout, scale or 1.0)


@pytest.mark.parametrize("far", [100, 10_000])
def test_the_variance_survives_a_mean_far_from_zero(far: int) -> None:
    """With a mean of 100 and of 10,000 standard deviations, the variance has a relative error below 1e-3."""
    torch.manual_seed(0)
    x = torch.randn(2000) + far
    state, (row,) = _rows(LAYOUTS["default"], 1)
    _kernel(LAYOUTS["default"]).take([(readable(x), row, None)])
    _, count, total, squares = state.read()[0][:4]
    variance = squares / count - (total / count) ** 2
    assert variance == pytest.approx(x.double().var(correction=0).item(), rel=1e-3)
    naive = (x * x).sum() / count - (x.sum() / count) ** 2  # what the centre is for
    assert far < 1000 or naive.item() != pytest.approx(variance, rel=1e-2)


def test_together_and_alone_give_the_same_bits() -> None:
    """How many tensors are taken together changes no bit of what is found in each."""
    torch.manual_seed(0)
    some = [torch.randn(300).bfloat16(), torch.randn(777), torch.randn(500).half()[1:], torch.randn(40)]
    layout = LAYOUTS["two thresholds"]
    state, rows = _rows(layout, 2 * len(some))
    items = [(readable(x), row, None) for x, row in zip(some * 2, rows, strict=True)]
    kernel = _kernel(layout)
    kernel.take(items[:4])
    for item in items[4:]:
        kernel.take([item])
    found = state.read()
    assert np.array_equal(found[:4], found[4:])


def test_a_row_that_comes_several_times_counts_each() -> None:
    """Two firings of one place in one call are both added, and rows add up over calls, past 2^24 exactly."""
    layout = LAYOUTS["default"]
    state, (row, other) = _rows(layout, 2)
    row.added[layout.names.index("zeros")] = 2.0**25 + 1
    first, second = torch.tensor([0.0, 1.0, -3.0]), torch.tensor([0.0, 0.0, 5.0])
    kernel = _kernel(layout)
    kernel.take([(first, row, None), (first, other, None), (second, row, None)])
    kernel.take([(first, row, None)])
    cells = dict(zip(layout.names, state.read()[0], strict=True))
    assert (cells["fires"], cells["count"]) == (3, 9)
    assert cells["sum"] == pytest.approx(1, rel=1e-6)
    assert cells["zeros"] == 2.0**25 + 1 + 4
    assert (cells["-min"], cells["max"]) == (3, 5)
    assert state.read()[1][0] == 1


def _engine() -> StatsEngine:
    """One that takes the CPU for a GPU."""
    engine = StatsEngine(LAYOUTS["default"])
    engine._kernels[CPU] = _kernel(engine.layout)
    return engine


@pytest.mark.parametrize("joined", [True, False])
def test_rows_of_compiled_code_add_up_as_by_torch(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined in buffers, or each apart; NaN, Inf, nothing at all, and scales included; one place may come twice."""
    monkeypatch.setattr(by_rows, "_BY_ROW", frozenset({"cpu"}))
    monkeypatch.setattr(by_rows._torch, "current_stream_of", lambda index: lambda: 0)
    engine, plain = _engine(), StatsEngine(LAYOUTS["default"])
    plain._kernels[CPU] = None
    torch.manual_seed(0)
    usual = torch.randn(37, 32).relu()
    some = [usual, usual.index_fill(0, torch.tensor(1), math.nan), usual - 100, torch.empty(0, 32), usual / 0, usual]
    names = ["a", "b", "c", "d", "e", "a"]
    found = [by_rows.find_in(x, engine.layout) for x in some]
    begins = np.cumsum([0, *map(len, some)]).tolist()
    shares = [Share(begin, len(x), 32, in_rows=True) for begin, x in zip(begins, some, strict=False)]
    buffers = [torch.cat(kind) for kind in zip(*(parts for parts, _ in found), strict=True)]
    handover = GraphHandover(
        engine, [(engine.place(name, ""), share) for name, share in zip(names, shares, strict=True)]
    )
    for scale in (None, torch.tensor(8.0)):
        if joined:
            handover.take(buffers, scale)
        for each in (plain,) if joined else (plain, engine):
            each.take_found([(each.place(name, ""), *one) for name, one in zip(names, found, strict=True)], scale)
    ours, theirs = engine.snapshot().rows, plain.snapshot().rows
    assert np.allclose(ours, theirs, rtol=1e-12, equal_nan=True)
    assert ours[:, 0].tolist() == [4, 2, 2, 2, 2]


def test_tensors_of_compiled_code_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """At other addresses, back at those of before, and where two of them share memory: launches are kept for each."""
    monkeypatch.setattr(by_rows._torch, "current_stream_of", lambda index: lambda: 0)
    engine, plain = _engine(), StatsEngine(LAYOUTS["default"])
    names, numbers = ["a", "b", "c", "d", "a"], [0, 1, 1, 2, 2]
    handover = GraphHandover(
        engine, [(engine.place(n, ""), Share(at, 1, 1)) for n, at in zip(names, numbers, strict=True)]
    )
    torch.manual_seed(0)
    kept: list[list[Tensor]] = []
    for number in range(5):
        one, other = torch.randn(30), torch.randn(9).bfloat16()
        found = [one, other, one.view(3, 10) if number < 3 else torch.randn(10, 3).t()]
        kept.append(kept[0] if number == 1 else found)
        kept[-1][1].fill_(number)  # read as it is at the call
        scale = torch.tensor(4.0) if number == 2 else None
        handover.take(kept[-1], scale)
        for name, at in zip(names, numbers, strict=True):
            plain.take(plain.place(name, ""), kept[-1][at], scale)
        assert len(handover._calls) == (1, 1, 2, 2, 2)[number]  # the last two do not lie in one piece
    assert np.allclose(engine.snapshot().rows, plain.snapshot().rows, rtol=1e-5)


def test_a_tensor_of_another_type_at_the_same_address_is_read_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs of one model have the same texts, and one may run under autocast."""
    monkeypatch.setattr(by_rows._torch, "current_stream_of", lambda index: lambda: 0)
    engine = _engine()
    handover = GraphHandover(engine, [(engine.place("x", ""), Share(0, 1, 1))])
    x = torch.ones(32)
    handover.take([x], None)
    handover.take([x.view(torch.bfloat16)[:32].fill_(3)], None)
    cells = engine.read()[engine.place("x", "")]
    assert (cells["sum"], cells["max"]) == (32 + 96, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_prepared_work_takes_tensors_of_any_type(dtype: torch.dtype) -> None:
    """Those that programs do not read where they lie, too: twice, as launches are worked out for the first time."""
    engine, x = _engine(), torch.arange(-3.0, 5.0).to(dtype)
    place = engine.place("x", "")
    run = engine.prepare([(place, x, None)])
    run()
    run()
    assert engine.read()[place]["count"] == 2 * x.numel()


def test_an_engine_that_defers_gives_the_metrics_of_one_that_does_not() -> None:
    """Noted, reduced together by the kernel, and read: as by the CPU's own way, also with in-place changes."""
    layout = LAYOUTS["two thresholds"]
    deferring, plain = StatsEngine(layout), StatsEngine(layout)
    deferring._kernels[CPU] = _kernel(layout)
    pending = deferring._pending[CPU] = PendingTensors(partial(deferring._take_notes, CPU), CPU)
    torch.manual_seed(0)
    for step in range(3):
        for name in ("kept", "changed", "kept"):
            x = torch.randn(300) + step
            plain.take(plain.place(name, "forward"), x)
            pending.take(deferring.place(name, "forward"), x)
            if name == "changed":
                x.relu_()
        assert len(pending) == (2 if step else 0)
        assert deferring.read().keys()  # reduces what is noted
        assert not len(pending)
    found, wanted = deferring.to_metrics(), plain.to_metrics()
    assert found.keys() == wanted.keys()
    assert found["kept/forward/mean"] != found["changed/forward/mean"]
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
    pending.take(deferring.place("kept", "forward"), torch.ones(2))
    deferring.reset()
    assert deferring.to_metrics() == {}


# -- histograms ----------------------------------------------------------------------------------------------

COUNTED = Layout.of("histogram")


def _spread_out(dtype: torch.dtype, size: int) -> Tensor:
    torch.manual_seed(size)
    if dtype is torch.bool:
        return torch.rand(size) > 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, (size,)).to(dtype)
    x = (torch.randn(size) * torch.exp(8 * torch.randn(size))).relu()
    if size > 3:
        x[0], x[1], x[2] = math.nan, math.inf, 1e-42
    return x.to(dtype)


def _views(x: Tensor) -> list[Tensor]:
    """A tensor of 300 numbers, views that are not contiguous or not aligned, one without dimensions, an expanded one.

    The gradient that ``sum`` gives is an expanded one.
    """
    return [x, x.reshape(20, 15)[:, ::3], x[1:].reshape(13, 23).t(), x[4], x[5:6].expand(40, 3), x[::2]]


def test_counts_are_those_of_torch() -> None:
    """Types that are read each in their way, with and without a scale, alone and together: exact whole numbers."""
    kernel = _kernel(COUNTED)
    items: list[tuple[Any, ExponentBins]] = []
    scale = torch.tensor(1024.0)
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
    for dtype in types:
        items.clear()
        big = _spread_out(dtype, 300)
        for x in (_spread_out(dtype, 1), *_views(big)):
            for by in (None, scale) if dtype.is_floating_point and dtype.itemsize > 1 else (None,):
                wanted = ExponentBins()
                wanted.take(x if by is None else x * (1 / 1024))
                items.append(((readable(x), torch.zeros(256, dtype=torch.int64), by), wanted))
        kernel.count([item for item, _ in items])
        for item, _ in items[::2]:
            kernel.count([item])
        for number, (item, wanted) in enumerate(items):
            assert wanted.kept is not None
            assert torch.equal(item[1], wanted.kept * (2 - number % 2)), (dtype, number)


def test_where_the_kernels_cannot_be_compiled_torch_counts_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program for one type could be, and that for another not: nothing is lost or counted twice."""
    engine, plain = StatsEngine(COUNTED), StatsEngine(COUNTED)
    counting = engine._kernels[CPU] = _kernel(COUNTED)
    launch = counting._launch

    def refuse(name: str, constants: tuple[Any, ...], *args: Any) -> None:
        if constants[0] == kernels.kernel_types()[torch.float64][0]:
            raise RuntimeError("no C compiler")
        launch(name, constants, *args)

    monkeypatch.setattr(counting, "_launch", refuse)
    pending = engine._pending[CPU] = PendingTensors(partial(engine._take_notes, CPU), CPU)
    types = {"a": torch.float32, "b": torch.float64, "c": torch.float64, "d": torch.int64, "e": torch.float32}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            for name, dtype in types.items():
                x = torch.full((0 if name == "e" else 40,), step + 1, dtype=dtype)
                place = engine.place(name, "forward")
                place.deferred = pending
                pending._stays[place] = True
                assert pending.note(place, x)
                plain.take(plain.place(name, "forward"), x)
            engine.flush()
    assert len([each for each in said if "no C compiler" in str(each.message)]) == 1
    found, wanted = engine.to_metrics(), plain.to_metrics()
    assert found == wanted
    assert found["b/forward/histogram"]
