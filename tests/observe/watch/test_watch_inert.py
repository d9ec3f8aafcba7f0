"""A watched run ends with the bits it would have had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_training import differences, plain_step, train
from torch import Tensor, nn

import hookline as hl

EVERYTHING = ("mean", "std", "norm", "min", "zero_fraction", "nan", "over:1", "dead_fraction", "histogram")


def watched(**options: Any) -> Callable[[nn.Sequential, Tensor, Tensor], None]:
    """One step under a watch that has been on since the first."""
    watches: dict[int, hl.Watch] = {}

    def step(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
        watch = watches.get(id(model))
        if watch is None:
            watch = watches[id(model)] = hl.watch(model, **options)
        F.cross_entropy(model(x), target).backward()
        assert watch.to_metrics()

    return step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on": "forward"},
        {"on": ("backward", "param_grad")},
        {"stats": EVERYTHING},
        {"every": 3},
        {"every": hl.StepSchedule("burst", stride=5, burst_length=2)},
    ],
    ids=["all kinds", "forward", "gradients", "all statistics", "every third", "bursts"],
)
def test_a_watched_run_ends_with_the_same_bits(options: dict[str, Any]) -> None:
    """Twenty steps of AdamW, dropout, BatchNorm and an in-place ReLU: weights, gradients, state, random stream."""
    assert differences(train(watched(**options)), train(plain_step)) == []


def test_the_comparison_notices_one_random_number() -> None:
    """The control: an observer that draws one leaves other weights behind."""

    def step(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
        with hl.attach(model, "0", lambda module, args, output: torch.rand(()) and None, observe=True):
            F.cross_entropy(model(x), target).backward()

    assert "weight 0.weight" in differences(train(step), train(plain_step))


def test_a_watched_run_with_an_optimizer_ends_with_the_same_bits() -> None:
    """Where parameters are read at the optimizer's step."""

    def run(watch: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        ).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        watches = [hl.watch(model, optimizer=optimizer, scaler=scaler, every=2)] if watch else []
        data = torch.Generator().manual_seed(1)
        for _ in range(20):
            optimizer.zero_grad()
            x, target = torch.randn(12, 6, generator=data), torch.randint(3, (12,), generator=data)
            scaler.scale(F.cross_entropy(model(x), target)).backward()
            scaler.step(optimizer)
            scaler.update()
        for each in watches:
            assert each.steps == 20
            each.remove()
        return {**model.state_dict(), "random": torch.get_rng_state()}

    assert differences(run(True), run(False)) == []


@pytest.mark.parametrize("options", [{}, {"every": 3}, {"stats": EVERYTHING}], ids=["all kinds", "every third", "all"])
def test_a_watched_compiled_run_ends_with_the_same_bits(options: dict[str, Any]) -> None:
    """With aot_eager, whose arithmetic is that of eager code: statistics in the graph change nothing."""

    def run(watch: bool) -> dict[str, Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        ).train()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watches = [hl.watch(compiled, optimizer=optimizer, **options)] if watch else []
        data = torch.Generator().manual_seed(1)
        for _ in range(20):
            optimizer.zero_grad()
            x, target = torch.randn(12, 6, generator=data), torch.randint(3, (12,), generator=data)
            F.cross_entropy(compiled(x), target).backward()
            optimizer.step()
        for each in watches:
            assert each.to_metrics()["0/forward/mean"]
            each.remove()
        return {**model.state_dict(), "random": torch.get_rng_state()}

    assert differences(run(True), run(False)) == []
