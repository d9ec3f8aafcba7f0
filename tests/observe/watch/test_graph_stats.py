"""Statistics in compiled code have the numbers of eager code, and change nothing that the compiler does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from helpers_stats import assert_close, reference
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl
from hookline.observe.watch import graph as rows
from hookline.observe.watch.engine import StatsEngine
from hookline.observe.watch.row import DEFAULT_STATS, Layout


@pytest.fixture(autouse=True)
def compiled_as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Statistics are found by row, and every graph is compiled anew."""
    monkeypatch.setattr(rows, "_BY_ROW", frozenset({"cpu"}))
    torch.compiler.reset()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(9, 768), (5, 3072), (3, 4, 96), (2, 5, 12, 12), (64,), (2, 1), (7, 1031), (3, 8200), (0, 64)]
)
def test_rows_tell_what_the_whole_does(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As graphs on a GPU find it: by rows, or where those would be too long, short or uneven, not at all."""
    layout = Layout.of(None)
    for ratio, strided in itertools.product((0.0, -100.0, 1e4), (False, True)):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu() + ratio).to(dtype)
        x = x.transpose(0, -1).contiguous().transpose(0, -1) if strided else x
        found, each = rows.find_in(x, layout)
        assert each == {(2, 1): 1, (7, 1031): 1, (3, 8200): 1, (5, 3072): 1, (2, 5, 12, 12): 144}.get(shape, shape[-1])
        engine = StatsEngine(layout)
        engine.take_found([(engine.place("x", ""), found if each > 1 else [x], each)], None)
        metrics = {name.removeprefix("x/"): value for name, value in engine.to_metrics().items()}
        assert_close(metrics, reference([x], DEFAULT_STATS))


def test_the_rows_of_compiled_code_are_those_of_eager_code() -> None:
    """A watched model compiled as for a GPU, also for other sizes of batch: two graphs, the numbers of eager code."""
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
def test_what_inductor_looks_at_last_it_sees_once_and_before_it_is_written_to(make: type[nn.Module]) -> None:
    """As for a GPU: inputs and buffers that the graph changes, and tensors that the backward has as well."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        watch = hl.watch(model, "*", on=["forward", "backward"])
        run = torch.compile(model, fullgraph=True) if compiled else model
        for _ in range(2):
            run(torch.randn(4, 64).requires_grad_(make is Twice)).sum().backward()
        found.append(watch.to_metrics())
        watch.remove()
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
