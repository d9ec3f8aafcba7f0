"""What ``profile`` takes and gives: options, tables, metrics; and that it disturbs nothing."""

from __future__ import annotations

import pytest
import torch
from helpers_profile import (
    Spend,
    Stopwatch,
    Work,
    leaf,
    own,
    profiled,
    run,
    times,
    tower,
)
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import hookline as hl

# -- options -----------------------------------------------------------------------------------------------


def test_the_model_is_measured_whatever_the_target(stopwatch: Stopwatch) -> None:
    """What is not chosen counts as own time of what is around it."""
    model = tower()
    with hl.profile(model, "3.0") as prof:
        run(model)
    assert times(prof) == {"": (9, 4, 12, 6), "3.0": (5, 5, 6, 6)}
    prof = profiled(model, exclude=["1", nn.Linear])
    assert own(prof) == {"": (1, 2), "2": (3, 4), "3": (0, 0), "3.0": (5, 6)}


def test_the_backward_can_be_left_out(stopwatch: Stopwatch) -> None:
    """With backward=False there is none in the report, a repeated forward included."""
    model = tower()
    with hl.profile(model, backward=False, functions=Spend) as prof:
        checkpoint(model, torch.ones(3), use_reentrant=False).sum().backward()
    assert times(prof)[""] == (9, 0, 0, 0)
    assert all(row.backward_ms == 0 for row in prof.rows)


def test_reset_begins_anew(stopwatch: Stopwatch) -> None:
    """Between steps, between forward and backward, and when the hooks are off."""
    model = tower()
    with hl.profile(model) as prof:
        for _ in range(3):
            run(model)
        prof.reset()
        assert (prof.rows, prof.total.calls) == ((), 0)
        assert "Nothing was measured" in repr(prof)
        run(model)
        assert times(prof)[""] == (9, 0, 12, 0)
        loss = model(torch.ones(3)).sum()
        prof.reset()
        loss.backward()
        run(model)
    assert times(prof)[""] == (9, 0, 12, 0)
    prof.reset()
    stopwatch.advance(5)
    assert prof.rows == ()
    assert prof.wall_ms == 0


# -- what comes out ----------------------------------------------------------------------------------------


def test_metrics_have_one_key_per_site_and_number(stopwatch: Stopwatch) -> None:
    """The whole model has bare keys, which no submodule can have, one named "model" included."""
    model = nn.Sequential()
    model.add_module("model", Work(1, 2))
    prof = profiled(model, leaf())
    numbers = {"calls", "forward_ms", "forward_own_ms", "backward_ms", "backward_own_ms", "output_bytes"}
    metrics = prof.to_metrics()
    assert metrics.keys() == numbers | {f"model/{key}" for key in numbers}
    assert metrics["forward_ms"] == pytest.approx(1, abs=1e-3)
    assert metrics["forward_own_ms"] == pytest.approx(0, abs=1e-3)
    assert metrics["model/backward_own_ms"] == pytest.approx(2, abs=1e-3)
    assert metrics["model/output_bytes"] == 12.0
    assert all(type(value) is float for value in metrics.values())


def test_it_prints_as_a_table(stopwatch: Stopwatch) -> None:
    """The slowest first, in columns, with what they add up to."""
    block = nn.Sequential(Work(1000, 2000), nn.Sequential(Work(3, 40)))
    model = nn.Sequential(Work(1, 2), block)
    prof = profiled(model, torch.ones(300, 500, requires_grad=True), steps=2)
    table = """
name         type        calls  forward ms       own  backward ms       own  output MiB
───────────  ──────────  ─────  ──────────  ────────  ───────────  ────────  ──────────
(the model)  Sequential      2    2,008.00      0.00     4,084.00      0.00        1.14
1            Sequential      2    2,006.00      0.00     4,080.00      0.00        1.14
1.0          Work            2    2,000.00  2,000.00     4,000.00  4,000.00        1.14
1.1          Sequential      2        6.00      0.00        80.00      0.00        1.14
1.1.0        Work            2        6.00      6.00        80.00     80.00        1.14
0            Work            2        2.00      2.00         4.00      4.00        1.14
own times add up to 2,008.00 ms forward and 4,084.00 ms backward, of 6,092.00 ms (stopwatch)"""
    assert str(prof) == table.lstrip()
    assert repr(prof) == f"{prof}\nhooks: off"


# -- nothing is disturbed ----------------------------------------------------------------------------------


def test_nothing_is_left_on_the_model() -> None:
    """After the block no hook is on the model, no mode on the stack, no other base on the class."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), Work(1, 2))
    plain = Spend.__mro__
    with hl.profile(model, functions=["torch.nn.functional.*", "aten.*mm*", Spend]) as prof:
        model(torch.ones(4, 6)).sum().backward()
        assert Spend.__mro__ != plain
    hl.assert_no_hooks(model, foreign=True)
    assert _get_current_function_mode_stack() == []
    assert Spend.__mro__ == plain
    assert "_call_impl" not in vars(model)
    calls_before = prof.total.calls
    model(torch.ones(4, 6)).sum().backward()
    assert prof.total.calls == calls_before == 1


def test_an_error_while_attaching_leaves_nothing_attached() -> None:
    """A glob that matches no function, a target that matches no module, a module that cannot be hooked."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(hl.errors.NoMatchError, match=r"torch\.nn\.functional\.reluu"):
        hl.profile(model, functions="torch.nn.functional.reluu")
    with pytest.raises(hl.errors.NoMatchError, match="layers"):
        hl.profile(model, "layers.#")
    hl.assert_no_hooks(model, foreign=True)
