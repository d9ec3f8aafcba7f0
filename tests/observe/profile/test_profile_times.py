"""Whose time it is in a profile, against costs that are known.

The clock stands still but for what `Work` spends on purpose, so every time in the report has one right value.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers_profile import (
    STOPWATCH,
    Calls,
    Spend,
    Stopwatch,
    Work,
    calls,
    leaf,
    own,
    profiled,
    times,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookline as hl


def test_nested_modules_have_totals_and_own_times(stopwatch: Stopwatch) -> None:
    """A parent's total holds its children's, its own time holds none of it."""

    def both(self: Any, x: Tensor) -> Tensor:
        return Spend.apply(self.b(Spend.apply(self.a(x), 1, 2)), 3, 4)

    model = nn.Sequential(nn.Linear(3, 3), Calls(both, a=Work(10, 20), b=Work(30, 40)), Work(5, 6))
    prof = profiled(model)
    assert times(prof) == {
        "": (49, 0, 72, 0),
        "0": (0, 0, 0, 0),
        "1": (44, 4, 66, 6),
        "1.a": (10, 10, 20, 20),
        "1.b": (30, 30, 40, 40),
        "2": (5, 5, 6, 6),
    }
    assert prof.total == prof.rows[0]


def test_functions_are_measured_within_their_modules(stopwatch: Stopwatch) -> None:
    """Of a function, one row for all modules; what it takes is not the module's own."""

    def mixed(self: Any, x: Tensor) -> Tensor:
        STOPWATCH.advance(100)
        return self.a(Spend.apply(x, 1, 2))

    model = nn.Sequential(Calls(mixed, a=Work(3, 4)), Work(5, 6))
    prof = profiled(model, leaf(), functions=Spend)
    name = f"{Spend.__module__}.Spend"
    rows = {row.name: row for row in prof.rows}
    assert (rows[name].kind, rows[name].calls, rows["0"].kind) == ("function", 3, "Calls")
    assert own(prof) == {"": (0, 0), "0": (100, 0), "0.a": (0, 0), "1": (0, 0), name: (9, 12)}
    assert times(prof)["0"] == (104, 100, 6, 0)


def test_functions_of_torch_and_operators_are_counted_by_call() -> None:
    """Globs over torch.nn.functional, an operator, both inside each other and each with its output's size."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    prof = profiled(model, torch.ones(5, 4), steps=2, functions=["torch.nn.functional.*", "aten.mm"])
    rows = {row.name: row for row in prof.rows}
    assert rows["torch.nn.functional.linear"].calls == rows["aten.mm.default"].calls == 4
    assert rows["torch.nn.functional.relu"].calls == 2
    assert rows["aten.mm.default"].output_bytes == rows["torch.nn.functional.linear"].output_bytes == 2 * 4 * (40 + 10)
    assert rows["torch.nn.functional.linear"].forward_ms > rows["aten.mm.default"].forward_ms > 0
    assert rows["0"].forward_own_ms < rows["0"].forward_ms
    assert all(row.backward_ms > 0 for row in prof.rows if not row.name.startswith("aten."))


# -- several passes ----------------------------------------------------------------------------------------


def test_two_forwards_and_one_backward_share_it(stopwatch: Stopwatch) -> None:
    """As in a GAN's discriminator: neither call has the other's backward, though both hooks fire at the end."""
    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2))
    with hl.profile(model) as prof:
        (model(torch.ones(3)).sum() + model(torch.ones(3)).sum()).backward()
    assert times(prof) == {"": (2, 0, 4, 0), "0": (0, 0, 0, 0), "1": (2, 2, 4, 4)}


def test_two_backwards_through_one_forward_both_count(stopwatch: Stopwatch) -> None:
    """With retain_graph the backward time doubles and the calls do not; a pass that ends half-way adds its half."""
    scale = Calls(lambda self, x: Spend.apply(x * self.weight, 5, 6))
    scale.weight = nn.Parameter(torch.ones(3))
    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2), scale, Work(3, 4))
    with hl.profile(model) as prof:
        loss = model(torch.ones(3)).sum()
        loss.backward(retain_graph=True)
        stopwatch.advance(50)
        loss.backward(retain_graph=True)
        assert times(prof)[""] == (9, 0, 24, 0)
        stopwatch.advance(50)
        torch.autograd.grad(loss, scale.weight)
    assert calls(prof)[""] == 1
    assert times(prof) == {
        "": (9, 0, 34, 0),
        "0": (0, 0, 0, 0),
        "1": (1, 1, 4, 4),
        "2": (5, 5, 18, 18),
        "3": (3, 3, 12, 12),
    }


@pytest.mark.parametrize("way", ["reentrant", "to the end", "until it has all"])
def test_what_checkpointing_repeats_is_backward_time_and_no_call(stopwatch: Stopwatch, way: str) -> None:
    """The forward counts once; once more it is backward time, of the modules it is spent in."""

    def repeated(self: Any, x: Tensor) -> Tensor:
        for part in (self.a, self.b):
            with set_checkpoint_early_stop(way == "until it has all"):
                x = checkpoint(part, x, use_reentrant=way == "reentrant")
        return x

    def part() -> nn.Module:
        return nn.Sequential(Work(1, 2), nn.Linear(3, 3), Work(4, 8))

    model = nn.Sequential(nn.Linear(3, 3), Calls(repeated, a=part(), b=part()), Work(16, 32))
    prof = profiled(model, steps=2)
    assert set(calls(prof).values()) == {2}
    found = own(prof)
    assert found["2"] == (32, 64)
    for name in ("1.a", "1.b"):
        assert found[f"{name}.0"] == (2, 4 + 2)
        assert found[f"{name}.2"] == (8, 16 + 8)
    assert times(prof)["1"] == (20, 0, 60, 0)
    assert times(prof)[""] == (52, 0, 124, 0)


def test_threads_on_one_model_are_measured_apart(stopwatch: Stopwatch) -> None:
    """Four threads at once: every call is there once, with its own time (the stopwatch runs in each thread)."""
    model = nn.Sequential(nn.Linear(3, 3), Calls(lambda self, x: self.a(x) + self.b(x), a=Work(1, 2), b=Work(3, 4)))
    start = threading.Barrier(4)

    def train() -> None:
        start.wait()
        for _ in range(20):
            torch.autograd.grad(model(torch.ones(3)).sum(), list(model.parameters()))

    with hl.profile(model) as prof:
        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(calls(prof).values()) == {80}
    assert own(prof) == {"": (0, 0), "0": (0, 0), "1": (0, 0), "1.a": (80, 160), "1.b": (240, 320)}
