"""Statistics on a GPU: the kernel, reducing later, and whole watched runs; skipped where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers_columns import DTYPES, LAYOUTS, assert_close
from torch import Tensor, nn

import hookline as hl
from hookline.observe.watch.engine import DeviceRows, ExponentBins, StatRow, StatsEngine
from hookline.observe.watch.graph import find_in
from hookline.observe.watch.kernel import Kernel, readable
from hookline.observe.watch.row import Layout, reduce_on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # torch's own compiler looks at the .grad of what one block hands to the next.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # Of a part that has nothing but our operators, which are called around graphs.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]
DEVICE = torch.device("cuda", 0)


def _rows(layout: Layout, count: int) -> tuple[DeviceRows, list[StatRow]]:
    state = DeviceRows(layout, DEVICE)
    return state, [state.new_row() for _ in range(count)]


def _tensor(dtype: torch.dtype, size: int, *, bad: bool = False) -> Tensor:
    torch.manual_seed(size)
    if dtype is torch.bool:
        return torch.rand(size, device=DEVICE) > 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, (size,), device=DEVICE).to(dtype)
    x = torch.randn(size, device=DEVICE, dtype=dtype if dtype.is_complex else torch.float32)
    if not dtype.is_complex:
        x = x.relu() * 2 - (torch.rand(size, device=DEVICE) > 0.7).float()
        if bad and size > 3 and dtype is not torch.float8_e4m3fn:
            x[size // 2], x[size // 3], x[-1] = math.nan, math.inf, -math.inf
    return x.to(dtype)


# -- the kernel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_finds_the_numbers_of_float64(dtype: torch.dtype) -> None:
    """All types, sizes around tiles and programs, aligned or not, with and without NaN and Inf, alone and together."""
    layout = LAYOUTS["two thresholds"]
    sizes = [0, 1, 2, 31, 1000, 4096, 8192, 8193, 100_003, 5_000_000]
    some = [_tensor(dtype, size, bad=bad) for size in sizes for bad in (False, True)]
    some += [x[1:] for x in some if x.numel() > 1000]
    state, rows = _rows(layout, 2 * len(some))
    kernel = Kernel(layout, DEVICE)
    items = [(readable(x), row, None) for x, row in zip(some * 2, rows, strict=True)]
    kernel.take(items[: len(some)])
    for item in items[len(some) :]:
        kernel.take([item])
    found = state.read()
    assert np.array_equal(found[: len(some)], found[len(some) :], equal_nan=True)
    for x, columns in zip(some, found, strict=False):
        # The absolute value of a complex number is rounded otherwise on the CPU.
        assert_close(columns, (x.abs() if x.is_complex() else x).cpu(), layout)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("scale", [None, 4.0])
def test_the_kernel_and_torch_find_the_same(name: str, scale: float | None) -> None:
    """For every layout, with and without a scale: counts and extremes equal, sums to 1e-5, also found by row."""
    layout = LAYOUTS[name]
    divisor = None if scale is None else torch.tensor(scale, device=DEVICE)
    state, (ours, by_torch, by_row) = _rows(layout, 3)
    kernel = Kernel(layout, DEVICE)
    for size in (1000, 300_032, 3_000_064):  # rows for one program, and for several
        x = _tensor(torch.bfloat16, size)
        kernel.take([(readable(x), ours, divisor)])
        by_torch.merge_tensor(reduce_on_device(x, layout, divisor))
        parts, each = find_in(x.view(-1, 8 if size == 1000 else 64), layout)
        assert each == (1 if layout.details or layout.thresholds or size <= 1000 else 64)
        if each == 1:
            kernel.take([(readable(parts[0]), by_row, divisor)])
        else:
            kernel.add_found([(by_row, parts, each)], divisor)
        assert_close(_one(kernel, layout, x, divisor), x.cpu(), layout, scale or 1.0)
    found = state.read()
    assert np.allclose(found[0], found[2], rtol=1e-5)
    counted = [place for place, each in enumerate(layout.names) if not (scale and each.startswith("over"))]
    assert np.allclose(found[0][counted], found[1][counted], rtol=1e-5)


def _one(kernel: Kernel, layout: Layout, x: Tensor, scale: Any) -> np.ndarray:
    state, (row,) = _rows(layout, 1)
    kernel.take([(readable(x), row, scale)])
    return state.read()[0]


def test_each_replay_of_a_cuda_graph_counts() -> None:
    """Recorded with the watch on: each replay counts once more, with the numbers of that moment; histograms too."""
    engine = StatsEngine(Layout.of(["max", "mean", "histogram"]))
    place = engine.place("x", "forward")
    x = torch.ones(100_000, device=DEVICE)
    engine.take(place, x)
    engine.flush()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.take(place, x)
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
    metrics = engine.to_metrics()
    assert engine.read()[place]["fires"] == 3
    assert (metrics["x/forward/max"], metrics["x/forward/mean"]) == (3.0, pytest.approx(2.0))
    assert metrics["x/forward/histogram"] == {"0": 100_000, "1": 200_000}


# -- watched runs --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with an in-place ReLU, a residual, and a tensor that two modules give out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.relu, self.down = nn.ReLU(inplace=True), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.relu(self.up(self.norm(x)))))


def _model(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), Block(width), Block(width), nn.Linear(width, 4)).to(DEVICE)


def _step(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None, scaler: Any = None) -> None:
    x, y = torch.randn(32, 16, device=DEVICE), torch.randn(32, 4, device=DEVICE)
    loss = F.mse_loss((run or model)(x).float(), y)
    (loss if scaler is None else scaler.scale(loss)).backward()


def _train(model: nn.Module, steps: int = 10, *, half: bool = True, watch: dict[str, Any] | None = None) -> Any:
    """Weights, random state and metrics after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    watched = None if watch is None else hl.watch(model, "*", optimizer=optimizer, **watch)
    torch.manual_seed(1)
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            _step(model)
        optimizer.step()
        optimizer.zero_grad()
    state = {**{k: v.clone() for k, v in model.state_dict().items()}, "rng": torch.cuda.get_rng_state()}
    metrics = {} if watched is None else watched.to_metrics()
    if watched is not None:
        assert not watched.report()["silent"]
        watched.remove()
    return state, metrics


@contextmanager
def _copies(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What each module gives out and the gradient of that, copied at once by torch's own hooks."""
    found: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        prefix = f"{name}/" if name else ""

        def forward(module: nn.Module, args: Any, output: Tensor, prefix: str = prefix) -> None:
            found.setdefault(f"{prefix}forward", []).append(output.detach().double().clone())

            def backward(grad: Tensor) -> None:
                found.setdefault(f"{prefix}backward", []).append(grad.double().clone())

            output.register_hook(backward)

        handles.append(module.register_forward_hook(forward))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_watch_tells_what_copies_made_at_once_do(half: bool) -> None:
    """Six steps, the first reduced at once and the others later, with in-place ReLUs: numbers of float64 to 1e-3."""
    model = _model()
    watch = hl.watch(model, "*", on=("forward", "backward"))
    with _copies(model) as copies:
        for _ in range(6):
            with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
                _step(model)
            model.zero_grad()
    metrics = watch.to_metrics()
    assert not watch.report()["silent"]
    watch.remove()
    for key, tensors in copies.items():
        x = torch.cat([each.reshape(-1) for each in tensors])
        assert metrics[f"{key}/max"] == x.max().item(), key
        assert metrics[f"{key}/min"] == x.min().item(), key
        assert metrics[f"{key}/zero_fraction"] == (x == 0).sum().item() / x.numel(), key
        assert metrics[f"{key}/std"] == pytest.approx(x.std(correction=0).item(), rel=1e-3), key
        assert abs(metrics[f"{key}/mean"] - x.mean().item()) <= 1e-4 * x.abs().mean().item(), key


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_watched_run_ends_with_the_same_bits(half: bool) -> None:
    """Weights and the device's random stream are those of a run without the watch, and of another one with it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        bare, _ = _train(_model(), half=half)
        watched, first = _train(_model(), half=half, watch={})
        again, second = _train(_model(), half=half, watch={})
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == second
    for key, value in bare.items():
        assert torch.equal(value, watched[key]), key
        assert torch.equal(value, again[key]), key


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("stats", [None, "norm", "histogram"])
def test_nothing_waits_for_the_device(stats: str | None) -> None:
    """A watched step makes no call that synchronizes; reading the numbers does."""
    model = _model()
    watch = hl.watch(model, "*", on=("forward", "backward"), stats=stats)
    for _ in range(3):
        _step(model)  # compiles, and sees each place
    try:
        torch.cuda.set_sync_debug_mode("error")
        _step(model)
        with pytest.raises(RuntimeError, match="synchronizing"):
            watch.to_metrics()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    watch.remove()


def test_histograms_are_those_of_torch() -> None:
    """Of outputs, gradients and parameters, over four steps, to the last count; also divided by a scale."""
    model = _model()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = hl.watch(model, "*", stats="histogram", optimizer=optimizer, scaler=scaler)
    wanted: dict[str, ExponentBins] = {}
    with _copies(model) as copies:
        for _ in range(4):
            _step(model, scaler=scaler)
            scaler.unscale_(optimizer)
            for name, parameter in model.named_parameters():
                wanted.setdefault(f"{name}/param_grad", ExponentBins()).take(parameter.grad.cpu())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for key, tensors in copies.items():
        for each in tensors:
            x = each.float().cpu() / (1024.0 if key.endswith("backward") else 1.0)
            wanted.setdefault(key, ExponentBins()).take(x)
    for name, parameter in model.named_parameters():
        wanted.setdefault(f"{name}/param", ExponentBins()).take(parameter.detach().cpu())
    metrics = watch.to_metrics()
    assert not watch.report()["silent"]
    watch.remove()
    for key, bins in wanted.items():
        assert bins.kept is not None
        assert metrics[f"{key}/histogram"] == ExponentBins.as_metric(bins.kept.tolist()), key


def test_a_side_stream_is_followed() -> None:
    """Tensors made on another stream are reduced in its order, whichever stream is current when they are."""
    model = _model()
    watch = hl.watch(model, "*", on="forward")
    side = torch.cuda.Stream()
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                model[1](torch.full((64, 64), value, device=DEVICE))  # below the root: noted, not yet reduced
            metrics = watch.to_metrics(reset=True)
            expected = model[1].norm(torch.full((64, 64), value, device=DEVICE))
            assert metrics["1.norm/forward/mean"] == pytest.approx(expected.double().mean().item(), abs=1e-6)
    watch.remove()
