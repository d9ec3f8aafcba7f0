"""In compiled code the statistics are part of the graph: no breaks, the same counts and numbers as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_models import batch_for, make
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hookline as hl
from hookline.observe.watch import graph

STATS = ("mean", "std", "norm", "rms", "min", "max", "absmax", "zero_fraction", "nonfinite", "over:0.5", "nan")


# torch's own compiler looks at the .grad of what one block hands to the next.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()
    counters.clear()


class Block(nn.Module):
    """A layer with an in-place ReLU in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu, self.norm = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.relu(self.linear(x)))


class Net(nn.Module):
    """Three residual blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def run(
    model: nn.Module, called: Callable[..., Any], steps: int, watch: Callable[[], hl.observe.Watch]
) -> hl.observe.Watch:
    """Some training steps under a watch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = watch()
    for step in range(steps):
        optimizer.zero_grad()
        called(data(step)).square().sum().backward()
        optimizer.step()
    return found


def whole(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: str) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def by_block(model: Net, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize(
    ("compile_it", "late"),
    [
        pytest.param(whole, False, id="whole-before"),
        pytest.param(whole, True, id="whole-after the first call", marks=pytest.mark.full),
        pytest.param(in_place, False, id="in_place-before", marks=pytest.mark.full),
        pytest.param(in_place, True, id="in_place-after the first call"),
        pytest.param(by_block, False, id="by_block-before", marks=pytest.mark.full),
        pytest.param(by_block, True, id="by_block-after the first call"),
    ],
)
def test_compiled_and_eager_report_the_same(compile_it: Any, late: bool):
    """Places, counts and every statistic, forward and backward, however it is compiled; no graph breaks."""
    eager_model = make_net()
    eager = run(
        eager_model, eager_model, 3, lambda: hl.watch(eager_model, "*", on=("forward", "backward"), stats=STATS)
    )
    model = make_net()
    called = compile_it(model, "aot_eager")
    if late:
        called(data(0)).sum().backward()
        model.zero_grad()
    compiled = run(model, called, 3, lambda: hl.watch(called, "*", on=("forward", "backward"), stats=STATS))
    assert compiled.report()["fired"] == eager.report()["fired"]
    assert compiled.to_metrics() == pytest.approx(eager.to_metrics(), rel=1e-4, abs=1e-5)
    assert counters["graph_break"] == {}


@pytest.mark.full
def test_inductor_gives_the_numbers_of_eager_code():
    """The real compiler, a training step of a GPT-2 of one layer, forward and backward."""
    model, inputs = make("gpt2", n_layer=1), batch_for("gpt2")["input_ids"]
    targets = ["transformer.h.0", "transformer.h.#.mlp"]

    def step(called: Any) -> None:
        called(inputs).logits.square().mean().backward()

    with hl.watch(model, targets, on=("forward", "backward"), stats=STATS) as watch:
        step(model)
    eager, fired = watch.to_metrics(), watch.report()["fired"]
    compiled = torch.compile(model, fullgraph=True)
    with hl.watch(compiled, targets, on=("forward", "backward"), stats=STATS) as watch:
        step(compiled)
        step(compiled)
    assert watch.report()["fired"] == {place: 2 * count for place, count in fired.items()}
    assert watch.to_metrics() == pytest.approx(eager, rel=1e-3, abs=1e-4)


def test_watching_now_and_then_makes_two_graphs_and_no_more():
    """One with statistics and one without, by turns, twelve times."""
    model = make_net()
    called = whole(model, "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = hl.watch(called, "*", every=3, optimizer=optimizer)
    for step in range(24):
        optimizer.zero_grad()
        called(data(step)).sum().backward()
        optimizer.step()
    assert watch.report()["fired"]["head/forward"] == 8
    assert watch.report()["fired"]["head/backward"] == 8
    assert counters["stats"]["unique_graphs"] == 2


def test_watches_of_one_compiled_module_each_count_for_themselves_pause_and_come_off_at_once():
    """Of the same statistics, and of others; the graph runs as it is, and what it finds in a pause is left out."""
    model = make_net()
    called = whole(model, "aot_eager")
    watches = [hl.watch(called, "head", on=("forward", "backward"), stats=stats) for stats in (None, None, ["norm"])]
    for step in range(2):
        called(data(step)).sum().backward()
    first, second, third = (watch.to_metrics() for watch in watches)
    assert first == second
    assert third == {name: value for name, value in first.items() if name.endswith("/norm")}
    for watch in watches:
        assert watch.report()["fired"] == {"head/forward": 2, "head/backward": 2}
    with watches[0].paused():
        called(data(2)).sum().backward()
    loss = called(data(3)).sum()
    watches[2].remove()  # between a forward and its backward
    loss.backward()
    fired = [list(watch.report()["fired"].values()) for watch in watches]
    assert fired == [[3, 3], [4, 4], [4, 3]]
    for watch in watches:
        watch.remove()
    hl.assert_no_hooks(model)


@pytest.mark.parametrize("stats", [None, "norm"])
def test_compiled_code_counts_nan_and_inf_as_eager_code_does(stats: Any):
    """The same columns with the same values, of outputs and gradients, in the step where the first of them comes."""
    found: list[dict[str, Any]] = []
    bad = data(1)
    bad[0, 0], bad[1, 1] = float("nan"), -float("inf")
    for backend in ("", "aot_eager"):  # nothing is compiled by the first
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
        called = whole(model, backend) if backend else model
        with hl.watch(called, "#", on=("forward", "backward"), stats=stats) as watch:
            for batch in (data(0), bad):
                called(batch).sum().backward()
            found.append(watch.to_metrics())
    eager, compiled = found
    assert eager["2/forward/nan"] > 0
    assert set(eager) == set(compiled)
    for key, value in eager.items():
        assert compiled[key] == pytest.approx(value, rel=1e-5, abs=1e-12, nan_ok=True), key


def test_after_an_alarm_compiled_code_looks_closer(monkeypatch: pytest.MonkeyPatch):
    """By row, as on a GPU: once it was told of, NaN and Inf are counted from the next forward on; no false zero before.

    The next graph hands the tensor itself over.
    """
    monkeypatch.setattr(graph, "_BY_ROW", frozenset({"cpu"}))
    model = nn.Sequential(nn.Identity(), nn.Identity())
    called = whole(model, "aot_eager")
    bad = torch.ones(2, 64)
    bad[0, 1], bad[1, 2] = float("nan"), float("inf")
    with hl.watch(called, "0", on="forward") as watch:
        called(bad)
        first = watch.to_metrics(reset=True)
        called(bad)
        called(torch.ones(2, 64))
        second = watch.to_metrics()
    assert first["0/forward/nonfinite"] == 1.0
    assert "0/forward/nan" not in first
    assert (second["0/forward/nonfinite"], second["0/forward/nan"], second["0/forward/inf"]) == (1.0, 1.0, 1.0)
    assert second["0/forward/finite_max"] == 1.0
    with hl.watch(called, "0", on="forward") as off:
        called(bad)
    assert off.to_metrics()["0/forward/nonfinite"] == 1.0  # it is told of it, and stays off
    hl.assert_no_hooks(model)
