"""What ``profile`` says, against costs that are known.

Most tests use a `Stopwatch` in the place of the machine's time: it stands still but for what `Work` spends on purpose,
so every time in the report has one right value. Those at the end use the real clock.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookline as hl


class Stopwatch:
    """A clock for `Work` to advance; by itself it ticks a nanosecond per mark, so that no two are the same."""

    name = "stopwatch"

    def __init__(self) -> None:
        self._now = threading.local()

    def advance(self, ms: float) -> None:
        self._now.ns = getattr(self._now, "ns", 0) + round(1e6 * ms)

    def mark(self) -> int:
        self.advance(1e-6)
        return self._now.ns

    def settle(self) -> None:
        pass

    def since(self, began: int) -> Callable[[int], float]:
        return lambda mark: (mark - began) * 1e-9

    def allocated(self) -> int | None:
        return None


STOPWATCH = Stopwatch()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are tiny, and several threads on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    monkeypatch.setattr("hookline.observe.profile.profile.clock_for", lambda model: STOPWATCH)
    return STOPWATCH


class Spend(torch.autograd.Function):
    """Costs so many milliseconds each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backward_ms = backward_ms
        STOPWATCH.advance(forward_ms)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.saved_tensors  # as most do, so that checkpointing has something to repeat for
        STOPWATCH.advance(ctx.backward_ms)
        return grad + 0, None, None


class Work(nn.Module):
    """Costs so many milliseconds each way."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.costs = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        return Spend.apply(x, *self.costs)


class Learned(Work):
    """Has no input that takes a gradient, as an embedding has none."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__(forward_ms, backward_ms)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return Spend.apply(self.weight, *self.costs)


class Calls(nn.Module):
    """Calls its children as ``how(self, x)`` says."""

    def __init__(self, how: Callable[[Any, Tensor], Any], **children: nn.Module) -> None:
        super().__init__()
        self.how = how
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def times(prof: hl.Profile) -> dict[str, tuple[float, float, float, float]]:
    """Forward, own of it, backward, own of it, in milliseconds to the microsecond, by name."""
    return {
        row.name: tuple(
            round(ms, 3) for ms in (row.forward_ms, row.forward_own_ms, row.backward_ms, row.backward_own_ms)
        )
        for row in prof.rows
    }


def own(prof: hl.Profile) -> dict[str, tuple[float, float]]:
    """Own forward and backward, by name."""
    return {name: (forward, backward) for name, (_, forward, _, backward) in times(prof).items()}


def calls(prof: hl.Profile) -> dict[str, int]:
    return {row.name: row.calls for row in prof.rows}


def run(model: nn.Module, x: Tensor | None = None) -> None:
    model(torch.ones(3) if x is None else x).sum().backward()


# -- whose time it is --------------------------------------------------------------------------------------


def test_nested_modules_have_totals_and_own_times(stopwatch: Stopwatch) -> None:
    """A parent's total holds its children's, its own time holds none of it."""

    def both(self: Any, x: Tensor) -> Tensor:
        return Spend.apply(self.b(Spend.apply(self.a(x), 1, 2)), 3, 4)

    model = nn.Sequential(nn.Linear(3, 3), Calls(both, a=Work(10, 20), b=Work(30, 40)), Work(5, 6))
    with hl.profile(model) as prof:
        run(model)
    assert times(prof) == {
        "": (49, 0, 72, 0),
        "0": (0, 0, 0, 0),
        "1": (44, 4, 66, 6),
        "1.a": (10, 10, 20, 20),
        "1.b": (30, 30, 40, 40),
        "2": (5, 5, 6, 6),
    }
    assert prof.total == prof.rows[0]


def test_branches_that_share_an_input_have_their_own_backward_times(stopwatch: Stopwatch) -> None:
    """A branch is done when its gradient has left, not when the hook fires, which waits for the other branches."""

    def attend(self: Any, x: Tensor) -> Tensor:
        q = self.q(Spend.apply(x, 100, 1000))
        k = self.k(x)
        return Spend.apply(x, 200, 2000) + q * k + self.v(x)

    branches = Calls(attend, q=Work(1, 10), k=Work(2, 20), v=Work(3, 40))
    model = nn.Sequential(nn.Linear(3, 3), branches, Work(4, 80))
    fired: dict[str, int] = {}

    def note(module: Any, grad_input: Any, grad_output: Any, *, site: hl.Site) -> None:
        fired[site.name] = stopwatch.mark()

    with hl.profile(model) as prof, hl.attach(model, "*", note, on="backward", observe=True):
        run(model)
    assert own(prof) == {
        "": (0, 0),
        "0": (0, 0),
        "1": (300, 3000),
        "1.q": (1, 10),
        "1.k": (2, 20),
        "1.v": (3, 40),
        "2": (4, 80),
    }
    # What makes this a test: v was done two seconds before its hook fired, together with k's.
    assert fired["1.v"] == pytest.approx(fired["1.k"], abs=1e4)


def test_residual_blocks_have_their_own_backward_times(stopwatch: Stopwatch) -> None:
    """Residual streams around norms and blocks, with reshaped, in-place and returned inputs between them."""

    def block(self: Any, x: Tensor) -> Tensor:
        x = x + self.a(self.norm(x))
        return F.relu(x + self.b(x.view(3, 1)).view(3), inplace=True)

    blocks = [Calls(block, norm=nn.LayerNorm(3), a=Work(1, 2), b=Work(3, 4), same=nn.Identity()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(3, 3), *blocks, nn.Dropout(0.0), nn.Identity())
    with hl.profile(model) as prof:
        run(model)
    for name, (forward, backward) in own(prof).items():
        expected = {"a": (1, 2), "b": (3, 4)}.get(name.rpartition(".")[2], (0, 0))
        assert (forward, backward) == expected, name


def test_a_reused_module_counts_each_call(stopwatch: Stopwatch) -> None:
    """Two calls in one forward are two calls, and both backwards are there."""
    model = Calls(lambda self, x: self.one(self.other(self.one(x))), one=Work(1, 2), other=Work(10, 20))
    with hl.profile(model) as prof:
        run(model, leaf())
    assert calls(prof) == {"": 1, "one": 2, "other": 1}
    assert own(prof) == {"": (0, 0), "one": (2, 4), "other": (10, 20)}


def test_a_module_without_a_gradient_to_send_ends_with_its_turn(stopwatch: Stopwatch) -> None:
    """Nothing leaves an embedding for its input, but the backward of what was before it is not its own."""
    blocks = [Calls(lambda self, x: self.b(x + self.a()), a=Learned(1, 2), b=Work(3, 4)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(3, 3), *blocks)
    with hl.profile(model) as prof:
        run(model)
    for index in (1, 2, 3):
        assert times(prof)[f"{index}"] == (4, 0, 6, 0)
        assert times(prof)[f"{index}.a"] == (1, 1, 2, 2)
        assert times(prof)[f"{index}.b"] == (3, 3, 4, 4)
    assert times(prof)[""] == (12, 0, 18, 0)


def test_a_module_that_makes_its_weight_first_has_that_in_its_total(stopwatch: Stopwatch) -> None:
    """The last gradient for an input leaves before what the weight was made of has its turn."""
    hyper = Calls(lambda self, x: Spend.apply(x * self.make(), 1, 2), make=Learned(10, 20))
    model = nn.Sequential(nn.Linear(3, 3), hyper)
    with hl.profile(model) as prof:
        run(model)
    assert times(prof) == {"": (11, 0, 22, 0), "0": (0, 0, 0, 0), "1": (11, 1, 22, 2), "1.make": (10, 10, 20, 20)}


def test_a_module_that_sends_its_gradient_early_is_at_it_until_all_within_it_is_over(stopwatch: Stopwatch) -> None:
    """The same, with a child that has an end of its own, and work between the two."""
    hyper = Calls(lambda self, x: x * Spend.apply(self.make(self.weight), 1, 2), make=Work(10, 20))
    hyper.weight = nn.Parameter(torch.ones(3))
    model = nn.Sequential(nn.Linear(3, 3), hyper)
    with hl.profile(model) as prof:
        run(model)
    assert times(prof) == {"": (11, 0, 22, 0), "0": (0, 0, 0, 0), "1": (11, 1, 22, 2), "1.make": (10, 10, 20, 20)}


@pytest.mark.parametrize("used", ["both", "first", "second"])
def test_a_module_with_two_outputs_has_its_time_whichever_is_used(stopwatch: Stopwatch, used: str) -> None:
    """Its pre-hook waits for gradients that may never come; the time is its own all the same."""

    def two(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return Spend.apply(x, 1, 2), Spend.apply(x, 4, 8)

    def use(self: Any, x: Tensor) -> Tensor:
        first, second = self.two(self.before(x))
        return self.after({"both": first + second, "first": first, "second": second}[used])

    model = Calls(use, before=Work(16, 32), two=Calls(two), after=Work(64, 128))
    with hl.profile(model) as prof:
        run(model, leaf())
    backward = {"both": 10, "first": 2, "second": 8}[used]
    assert own(prof) == {"": (0, 0), "before": (16, 32), "two": (5, backward), "after": (64, 128)}
    with hl.profile(model.two) as prof:
        run(model, leaf())
    assert times(prof) == {"": (5, 5, backward, backward)}


def test_a_module_with_two_outputs_begins_with_the_first_thing_in_it(stopwatch: Stopwatch) -> None:
    """Its pre-hook fires when most of it is over; what it does between its children is its own all the same."""

    def two(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.a(x)
        early = a + 1
        b = Spend.apply(self.b(Spend.apply(a * 2, 100, 1000)), 200, 2000)
        return early, self.c(b)

    inner = Calls(two, a=Work(1, 2), b=Work(3, 4), c=Work(5, 6))
    model = Calls(lambda self, x: sum(self.two(self.before(x))), before=Work(7, 8), two=inner)
    with hl.profile(model) as prof:
        run(model, leaf())
    assert times(prof)["two"] == (309, 300, 3012, 3000)
    assert times(prof)[""] == (316, 0, 3020, 0)


def test_a_model_that_returns_a_dict_of_inner_values_is_measured_whole(stopwatch: Stopwatch) -> None:
    """A loss on early and late outputs: the model's backward began with the first of them."""

    def deep(self: Any, x: Tensor) -> dict[str, Any]:
        early = self.a(x)
        late = self.c(self.b(early))
        return {"early": early * 2, "late": [late], "loss": (early + late).sum(), "text": "none"}

    model = Calls(deep, a=Work(1, 2), b=Work(3, 4), c=Work(5, 6))
    with hl.profile(model) as prof:
        output = model(leaf())
        (output["loss"] + output["early"].sum()).backward()
    assert times(prof)[""] == (9, 0, 12, 0)
    assert prof.total.output_bytes == 4 * (3 + 3 + 1)


def test_functions_are_measured_within_their_modules(stopwatch: Stopwatch) -> None:
    """Of a function, one row for all modules; what it takes is not the module's own."""

    def mixed(self: Any, x: Tensor) -> Tensor:
        STOPWATCH.advance(100)
        return self.a(Spend.apply(x, 1, 2))

    model = nn.Sequential(Calls(mixed, a=Work(3, 4)), Work(5, 6))
    with hl.profile(model, functions=Spend) as prof:
        run(model, leaf())
    name = f"{__name__}.Spend"
    rows = {row.name: row for row in prof.rows}
    assert (rows[name].kind, rows[name].calls, rows["0"].kind) == ("function", 3, "Calls")
    assert own(prof) == {"": (0, 0), "0": (100, 0), "0.a": (0, 0), "1": (0, 0), name: (9, 12)}
    assert times(prof)["0"] == (104, 100, 6, 0)


def test_functions_of_torch_and_operators_are_counted_by_call() -> None:
    """Globs over torch.nn.functional, an operator, both inside each other and each with its output's size."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    with hl.profile(model, functions=["torch.nn.functional.*", "aten.mm"]) as prof:
        for _ in range(2):
            run(model, torch.ones(5, 4))
    rows = {row.name: row for row in prof.rows}
    assert rows["torch.nn.functional.linear"].calls == rows["aten.mm.default"].calls == 4
    assert rows["torch.nn.functional.relu"].calls == 2
    assert rows["aten.mm.default"].output_bytes == rows["torch.nn.functional.linear"].output_bytes == 2 * 4 * (40 + 10)
    assert rows["torch.nn.functional.linear"].forward_ms > rows["aten.mm.default"].forward_ms > 0
    assert rows["0"].forward_own_ms < rows["0"].forward_ms
    assert all(row.backward_ms > 0 for row in prof.rows)


# -- several passes ----------------------------------------------------------------------------------------


def test_steps_add_up(stopwatch: Stopwatch) -> None:
    """Three steps are three times one step; what is done between them belongs to nobody."""
    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2), Work(3, 4))
    with hl.profile(model) as prof:
        for _ in range(3):
            run(model)
            stopwatch.advance(1000)
    assert times(prof) == {"": (12, 0, 18, 0), "0": (0, 0, 0, 0), "1": (3, 3, 6, 6), "2": (9, 9, 12, 12)}
    assert calls(prof) == {"": 3, "0": 3, "1": 3, "2": 3}
    assert prof.wall_ms == pytest.approx(3030, abs=0.01)


def test_two_forwards_and_one_backward_share_it(stopwatch: Stopwatch) -> None:
    """As in a GAN's discriminator: neither call has the other's backward, though both hooks fire at the end."""
    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2))
    with hl.profile(model) as prof:
        (model(torch.ones(3)).sum() + model(torch.ones(3)).sum()).backward()
    assert times(prof) == {"": (2, 0, 4, 0), "0": (0, 0, 0, 0), "1": (2, 2, 4, 4)}


def test_micro_batches_and_their_backwards_may_be_interleaved(stopwatch: Stopwatch) -> None:
    """Forward, forward, backward of the first, backward of the second."""
    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2))
    with hl.profile(model) as prof:
        first, second = model(torch.ones(3)).sum(), model(torch.ones(3)).sum()
        first.backward()
        stopwatch.advance(50)
        second.backward()
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


def test_without_gradients_there_is_no_backward(stopwatch: Stopwatch) -> None:
    """Under no_grad and inference_mode, and with gradients but without a backward, only forwards are there."""
    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2)).eval()
    with hl.profile(model) as prof:
        with torch.no_grad():
            model(torch.ones(3))
        with torch.inference_mode():
            model(torch.ones(3))
        model(torch.ones(3))
    assert times(prof) == {"": (3, 0, 0, 0), "0": (0, 0, 0, 0), "1": (3, 3, 0, 0)}


def test_calls_without_gradients_before_one_with_them_are_told_apart(stopwatch: Stopwatch) -> None:
    """A shared part runs without gradients under one module and with them under another, whose backward it is."""
    shared = Work(1, 2)

    def both(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            start = self.trial(x)
        return self.final(x + start)

    model = Calls(both, trial=nn.Sequential(shared), final=nn.Sequential(shared))
    with hl.profile(model) as prof:
        run(model, leaf())
    assert times(prof) == {"": (2, 0, 2, 0), "trial": (1, 0, 0, 0), "trial.0": (2, 2, 2, 2), "final": (1, 0, 2, 0)}


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
    with hl.profile(model) as prof:
        for _ in range(2):
            run(model)
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


# -- errors on the way -------------------------------------------------------------------------------------


def test_a_forward_that_raises_spoils_nothing_after_it(stopwatch: Stopwatch) -> None:
    """What the failed call took until then counts for the model, and the steps after it are as ever."""

    def risky(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.fails:
            STOPWATCH.advance(7)
            raise RuntimeError("on purpose")
        return x

    model = nn.Sequential(nn.Linear(3, 3), Calls(risky, a=Work(1, 2)), Work(3, 4))
    with hl.profile(model, functions=Spend) as prof:
        for model[1].fails in (False, True, True, False):
            try:
                run(model)
            except RuntimeError:
                assert prof._recorder._here.stack == []
                stopwatch.advance(1000)
    assert times(prof)[""] == (4 + 8 + 8 + 4, 14, 12, 0)
    assert times(prof)["1"] == (2, 0, 4, 0)
    assert times(prof)["2"] == (6, 0, 8, 0)
    assert calls(prof) == {"": 4, "0": 4, "1": 2, "1.a": 4, "2": 2, f"{__name__}.Spend": 6}
    assert sum(row.forward_own_ms for row in prof.rows) == pytest.approx(prof.total.forward_ms, rel=1e-6)


def test_an_error_that_the_model_catches_leaves_the_sum_right(stopwatch: Stopwatch) -> None:
    """What a cut-short child had called is the model's, not lost: own times still add up to the whole."""

    def fail(self: Any, x: Tensor) -> Tensor:
        self.inner(x)
        raise RuntimeError("on purpose")

    def fallback(self: Any, x: Tensor) -> Tensor:
        try:
            return self.first(x)
        except RuntimeError:
            return self.second(x)

    model = Calls(fallback, first=Calls(fail, inner=Work(1, 2)), second=Work(3, 4))
    with hl.profile(model) as prof:
        run(model, leaf())
        run(model, leaf())
    assert times(prof) == {"": (8, 0, 8, 0), "first.inner": (2, 2, 0, 0), "second": (6, 6, 8, 8)}


def test_a_backward_that_raises_spoils_nothing_after_it(stopwatch: Stopwatch) -> None:
    """Of a pass that is cut short counts what has told its end; what is done before the next one does not."""

    def stop(grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2), Work(3, 4))
    with hl.profile(model) as prof:
        handle = model[0].register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
        with pytest.raises(RuntimeError, match="on purpose"):
            run(model)
        handle.remove()
        stopwatch.advance(1000)
        run(model)
    assert own(prof) == {"": (0, 0), "0": (0, 0), "1": (2, 2), "2": (6, 8)}


def test_a_part_called_by_itself_is_measured_by_itself(stopwatch: Stopwatch) -> None:
    """Before, after and, raising, between forwards of the model: its time is its own and not the model's."""
    model = nn.Sequential(nn.Linear(3, 3), Calls(lambda self, x: self.a(x), a=Work(1, 2)))
    with hl.profile(model) as prof:
        run(model[1], leaf())
        with pytest.raises(TypeError):
            model[1].a(1, 2)
        run(model)
        assert prof._recorder._here.stack == []
        run(model[1], leaf())
    assert times(prof) == {"": (1, 0, 2, 0), "0": (0, 0, 0, 0), "1": (3, 0, 6, 0), "1.a": (3, 3, 6, 6)}


def test_a_model_that_calls_itself_is_measured_at_each_depth(stopwatch: Stopwatch) -> None:
    """Of a recursive model each call counts, and own times are those of one call each."""

    def recurse(self: Any, x: Tensor) -> Tensor:
        self.depth += 1
        x = self.a(x)
        return self.b(self(x) if self.depth % 3 else x)

    model = Calls(recurse, a=Work(1, 2), b=Work(3, 4))
    model.depth = 0
    with hl.profile(model) as prof:
        run(model, leaf())
    assert calls(prof) == {"": 3, "a": 3, "b": 3}
    assert own(prof) == {"": (0, 0), "a": (3, 6), "b": (9, 12)}
    assert times(prof)[""] == (12, 0, 18, 0)  # a call within a call is part of it, and not time twice over
    assert prof.total.forward_ms == pytest.approx(12, abs=1e-3)


# -- any model ---------------------------------------------------------------------------------------------


def ends_unnoticed(module: nn.Module) -> bool:
    """Whether the last thing in its backward pass sends no gradient to an input."""
    if isinstance(module, Tree):
        return module.shape == "residual" and ends_unnoticed(module.order[0])
    return isinstance(module, Learned)


class Tree(nn.Module):
    """Children called one after the other, side by side, or along a residual stream, some of them twice.

    It costs something itself, before those children that tell when they end.
    """

    def __init__(self, chance: random.Random, depth: int) -> None:
        super().__init__()
        self.shape = chance.choice(["chain", "branches", "residual", "pair"])
        kinds = [Work, Work, Learned] if depth == 0 else [Work, Learned, Tree, Tree]
        for index in range(chance.randint(1, 4)):
            kind = chance.choice(kinds)
            costs = chance.randint(1, 9), chance.randint(1, 9)
            self.add_module(f"c{index}", Tree(chance, depth - 1) if kind is Tree else kind(*costs))
        self.order = [*self.children(), *chance.sample([*self.children()], k=chance.randint(0, 1))]
        self.own = [(0, 0), *((chance.randint(1, 9), chance.randint(1, 9)) for _ in self.order[1:])]
        for index, child in enumerate(self.order):
            if ends_unnoticed(child):
                self.own[index] = (0, 0)
        self.costs = tuple(map(sum, zip(*self.own, strict=True)))

    def one(self, child: nn.Module, x: Tensor, costs: tuple[int, int] = (0, 0)) -> Tensor:
        if any(costs):
            x = Spend.apply(x, *costs)
        out = child() if isinstance(child, Learned) else child(x)
        return out if isinstance(out, Tensor) else out[0] + out[1]

    def forward(self, x: Tensor) -> Any:
        children = zip(self.order, self.own, strict=True)
        if self.shape == "branches":
            return sum((self.one(child, x, own) for child, own in children), x.view(3))
        for child, own in children:
            x = x + self.one(child, x, own) if self.shape == "residual" else x * 0.5 + self.one(child, x, own)
        return (x.sin(), {"more": x.cos()}["more"]) if self.shape == "pair" else x


@pytest.mark.parametrize("seed", range(40))
def test_in_any_tree_of_modules_every_one_has_the_time_it_costs(stopwatch: Stopwatch, seed: int, tmp_path: Any) -> None:
    """Forty random models, two steps each: own times are the costs, wherever in the graph they are."""
    tree = Tree(random.Random(seed), depth=3)
    model = Calls(lambda self, x: tree.one(tree, self.stem(x)), stem=nn.Linear(3, 3), tree=tree)
    with hl.profile(model) as prof:
        for _ in range(2):
            run(model)
    rows = {row.name: row for row in prof.rows}
    for name, module in model.named_modules():
        forward, backward = getattr(module, "costs", (0, 0))
        assert own(prof)[name] == (forward * rows[name].calls, backward * rows[name].calls), f"{name} of {model}"
    for way in ("forward", "backward"):
        total = sum(getattr(row, f"{way}_own_ms") for row in prof.rows)
        assert total == pytest.approx(getattr(prof.total, f"{way}_ms"), rel=1e-6)
    check_nesting([event for event in trace_of(prof, tmp_path) if event["ph"] == "X"])


# -- options -----------------------------------------------------------------------------------------------


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), Work(1, 2), Work(3, 4), nn.Sequential(Work(5, 6)))


def test_the_model_is_measured_whatever_the_target(stopwatch: Stopwatch) -> None:
    """What is not chosen counts as own time of what is around it."""
    model = tower()
    with hl.profile(model, "3.0") as prof:
        run(model)
    assert times(prof) == {"": (9, 4, 12, 6), "3.0": (5, 5, 6, 6)}
    with hl.profile(model, exclude=["1", nn.Linear]) as prof:
        run(model)
    assert own(prof) == {"": (1, 2), "2": (3, 4), "3": (0, 0), "3.0": (5, 6)}


def test_the_backward_can_be_left_out(stopwatch: Stopwatch) -> None:
    """With backward=False there is none in the report, a repeated forward included."""
    model = tower()
    with hl.profile(model, backward=False, functions=Spend) as prof:
        checkpoint(model, torch.ones(3), use_reentrant=False).sum().backward()
    assert times(prof)[""] == (9, 0, 0, 0)
    assert all(row.backward_ms == 0 for row in prof.rows)


def test_calls_beyond_the_limit_are_left_out_and_counted(stopwatch: Stopwatch) -> None:
    """What was kept is right: the time of calls that were left out is own time of the call around them."""
    model = tower()
    with hl.profile(model, max_spans=3) as prof:
        run(model)
        run(model)
    assert prof.dropped == 6 + 3
    assert times(prof) == {"": (9, 8, 12, 10), "0": (0, 0, 0, 0), "1": (1, 1, 2, 2)}
    assert "9 more calls were left out; raise max_spans=." in repr(prof)
    with pytest.raises(hl.errors.OptionError, match="max_spans= must be at least 1, got 0"):
        hl.profile(model, max_spans=0)
    with pytest.raises(hl.errors.OptionError, match="max_spans= must be a whole number, got '3'"):
        hl.profile(model, max_spans="3")


def test_reset_begins_anew(stopwatch: Stopwatch) -> None:
    """Between steps, between forward and backward, and when the hooks are off."""
    model = tower()
    with hl.profile(model, max_spans=7) as prof:
        for _ in range(3):
            run(model)
        prof.reset()
        assert (prof.dropped, prof.rows, prof.total.calls) == (0, (), 0)
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


def test_what_was_measured_stays_when_the_hooks_go(stopwatch: Stopwatch) -> None:
    """After remove() nothing is added, the wall stands still, and removing again does nothing."""
    model = tower()
    prof = hl.profile(model)
    run(model)
    prof.remove()
    before = prof.rows, prof.wall_ms
    stopwatch.advance(5)
    run(model)
    prof.remove()
    assert (prof.rows, prof.wall_ms) == before


def test_profiles_at_once_do_not_disturb_each_other(stopwatch: Stopwatch) -> None:
    """Two on the model and one on a part of it, coming and going: each says what it would say alone."""
    model = nn.Sequential(nn.Linear(3, 3), tower())
    with hl.profile(model, functions=Spend) as outer, hl.profile(model[1], functions=Spend) as part:
        run(model)
        with hl.profile(model) as inner:
            run(model)
        run(model)
    assert times(outer)[""] == (27, 0, 36, 0)
    assert times(inner)[""] == (9, 0, 12, 0)
    assert times(part)[""] == (27, 0, 36, 0)
    assert own(inner)["1.3.0"] == (5, 6)
    assert own(outer)[f"{__name__}.Spend"] == own(part)[f"{__name__}.Spend"] == (27, 36)


def test_models_without_parameters_or_tensors_can_be_measured(stopwatch: Stopwatch) -> None:
    """No parameter, no gradient, an output that is no tensor, a sparse one: sizes are still right."""
    outputs = [None, "text", torch.eye(4).to_sparse(), (torch.ones(2, dtype=torch.float64), torch.ones(3).half())]
    found = []
    for output in outputs:
        model = Calls(lambda self, x, output=output: output)
        with hl.profile(model) as prof:
            model(torch.ones(3))
        found.append((prof.total.calls, prof.total.output_bytes))
    assert found == [(1, 0), (1, 0), (1, 4 * 4 + 2 * 4 * 8), (1, 16 + 6)]


def test_a_model_that_keeps_its_profile_can_be_copied() -> None:
    """The copy has no hooks, so the profile that it keeps has measured nothing, and never will."""
    model = tower()
    model.profile = hl.profile(model)
    run(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.profile))):
        prof = twin.profile if isinstance(twin, nn.Module) else twin
        assert prof.rows == ()
        assert "Nothing was measured" in repr(prof)
        prof.remove()
    assert model.profile.total.calls == 1
    model.profile.remove()


# -- what comes out ----------------------------------------------------------------------------------------


def test_sizes_of_outputs_are_exact() -> None:
    """Bytes of all tensors that were returned, over all calls."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 16))
    with hl.profile(model) as prof, torch.no_grad():
        for _ in range(3):
            model(torch.ones(5, 2, 4))
    sizes = {row.name: row.output_bytes for row in prof.rows}
    assert sizes["0"] == 3 * 4 * 5 * 2 * 8
    assert sizes["1"] == sizes[""] == 3 * 4 * (5 * 2 * 16 + 2 * 2 * 16)
    assert all(row.allocated_bytes is None for row in prof.rows)


def test_metrics_have_one_key_per_site_and_number(stopwatch: Stopwatch) -> None:
    """The whole model has bare keys, which no submodule can have, one named "model" included."""
    model = nn.Sequential()
    model.add_module("model", Work(1, 2))
    with hl.profile(model) as prof:
        run(model, leaf())
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
    with hl.profile(model) as prof:
        for _ in range(2):
            run(model, torch.ones(300, 500, requires_grad=True))
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
    assert repr(prof) == f"{prof}\noff"


def test_a_long_name_loses_its_middle_in_the_table(stopwatch: Stopwatch) -> None:
    """Sixty characters with both ends, in the table; the row and the metrics have all of it."""
    inner, model = nn.Sequential(), nn.Sequential()
    inner.add_module("b" * 50, Work(1, 2))
    model.add_module("a" * 50, inner)
    with hl.profile(model) as prof:
        run(model, leaf())
    *_, line, _ = str(prof).splitlines()
    assert line.split()[0] == "a" * 20 + "…" + "b" * 39
    assert f"{'a' * 50}.{'b' * 50}/calls" in prof.to_metrics()


def test_a_table_of_many_rows_says_where_the_rest_is(stopwatch: Stopwatch) -> None:
    """Sixty rows are shown, and what they add up to is that of all."""
    model = nn.Sequential(*(Work(1, 2) for _ in range(100)))
    with hl.profile(model) as prof:
        run(model, leaf())
    lines = str(prof).splitlines()
    assert len(lines) == 2 + 60 + 2
    assert lines[-2] == "… and 41 that took less; all of them are in .rows"
    assert lines[-1].startswith("own times add up to 100.00 ms forward and 200.00 ms backward")


def trace_of(prof: hl.Profile, folder: Any) -> list[dict[str, Any]]:
    path = prof.save_trace(folder / "trace.json")
    assert [file.name for file in folder.iterdir()] == ["trace.json"]
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On one line, an event lies within the one before it or begins when that is over: so viewers stack them."""
    for line in {event["tid"] for event in events}:
        around: list[float] = []
        for event in sorted((e for e in events if e["tid"] == line), key=lambda event: (event["ts"], -event["dur"])):
            while around and event["ts"] >= around[-1] - 1e-3:
                around.pop()
            assert not around or event["ts"] + event["dur"] <= around[-1] + 1e-3
            around.append(event["ts"] + event["dur"])


def test_a_trace_holds_every_call_as_viewers_want_it(tmp_path: Any) -> None:
    """Complete events with numbers for process and line, labels for the lines, children within their parents."""
    block = Calls(lambda self, x: self.a(x) + self.b(x), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), block)
    with hl.profile(model, functions="torch.nn.functional.linear") as prof:
        for _ in range(2):
            run(model)
    events = trace_of(prof, tmp_path)
    labels = [event for event in events if event["ph"] == "M"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(labels) + len(spans) == len(events)
    assert {(e["tid"], e["args"]["name"]) for e in labels if e["name"] == "thread_name"} == {
        (1, "forward"),
        (2, "backward"),
    }
    assert {event["cat"] for event in spans} == {"forward", "backward"}
    for event in spans:
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ts"] >= 0
        assert event["dur"] > 0
        assert event["ts"] + event["dur"] <= 1e3 * prof.wall_ms
    forwards = [event for event in spans if event["cat"] == "forward"]
    assert len(forwards) == 2 * (5 + 3)
    assert {e["args"]["module"] for e in forwards if e["args"]["type"] == "function"} == {"0", "1.a", "1.b"}
    assert {(e["args"]["step"], e["args"]["call"]) for e in forwards if e["name"] == "1.a"} == {(0, 0), (1, 0)}
    check_nesting(spans)
    moments = {(e["name"], e["args"]["step"]): (e["ts"], e["ts"] + e["dur"]) for e in forwards}
    for step in (0, 1):
        for child, parent in (("0", "(the model)"), ("1", "(the model)"), ("1.a", "1"), ("1.b", "1")):
            assert moments[parent, step][0] <= moments[child, step][0]
            assert moments[child, step][1] <= moments[parent, step][1]


def test_a_trace_of_several_threads_has_lines_for_each(stopwatch: Stopwatch, tmp_path: Any) -> None:
    """Forward and backward of each thread have a line; a repeated forward lies on that of the backward."""
    model = nn.Sequential(nn.Linear(3, 3), Work(1, 2), nn.Tanh())

    def train() -> None:
        checkpoint(model, torch.ones(3), use_reentrant=False).sum().backward()

    with hl.profile(model) as prof:
        train()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    events = trace_of(prof, tmp_path)
    names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert names.keys() == {f"{way}, thread {number}" for way in ("forward", "backward") for number in (1, 2)}
    assert len(set(names.values())) == 4
    spans = [event for event in events if event["ph"] == "X"]
    check_nesting(spans)
    repeated = [event for event in spans if event["cat"] == "recompute" and event["name"] == "1"]
    assert {event["tid"] for event in repeated} == {names["backward, thread 1"], names["backward, thread 2"]}
    assert [round(event["dur"]) for event in repeated] == [1000, 1000]


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing folder is named; a failure on the way leaves the old file, and nothing beside it."""
    model = nn.Linear(3, 3)
    with hl.profile(model) as prof:
        run(model)
    with pytest.raises(
        FileNotFoundError, match=r"Cannot write the trace '.*trace\.json': there is no folder '.*missing'"
    ):
        prof.save_trace(tmp_path / "missing" / "trace.json")
    with pytest.raises(IsADirectoryError, match="that is a folder; add a file name"):
        prof.save_trace(tmp_path)
    path = prof.save_trace(str(tmp_path / "trace.json"))
    before = path.read_text(encoding="utf-8")

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    prof.reset()
    with pytest.raises(OSError, match="disk full"):
        prof.save_trace(path)
    assert path.read_text(encoding="utf-8") == before
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


# -- nothing is disturbed ----------------------------------------------------------------------------------


class House(nn.Module):
    """Dropout, BatchNorm, an in-place activation, a residual, branches on one input, attention with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.norm(self.stem(x))))
        x = x + torch.sigmoid(self.q(x)) * self.k(x) + self.v(x)
        return self.head(x + self.attention(x, x, x)[0])


def train(around: Callable[[nn.Module], Any] | None) -> dict[str, Tensor]:
    """Twenty steps of AdamW from the same seed; weights, gradients, optimizer state and random stream."""
    torch.manual_seed(0)
    model = House().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    handle = None if around is None else around(model)
    for _ in range(20):
        optimizer.zero_grad()
        x, target = torch.randn(12, 6, generator=data), torch.randint(3, (12,), generator=data)
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    if handle is not None:
        handle.remove()
    left = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    for index, parameter in enumerate(model.parameters()):
        left[f"grad {index}"] = parameter.grad
        left |= {f"{key} {index}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
    return left | {"random": torch.get_rng_state()}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("functions", [None, ["torch.nn.functional.*", "torch.sigmoid", "aten.*mm*"]])
def test_a_measured_run_ends_with_the_same_bits(functions: Any) -> None:
    """Twenty steps with modules, functions and operators measured: weights, state and random stream are the same."""
    profiles = []

    def measure(model: nn.Module) -> hl.Profile:
        profiles.append(hl.profile(model, functions=functions))
        return profiles[0]

    assert differences(train(measure), train(None)) == []
    assert profiles[0].total.calls == 20
    assert profiles[0].total.backward_ms > 0


def test_a_hook_that_draws_a_number_is_noticed() -> None:
    """Negative control: one random number drawn in each forward, and the comparison fails."""
    drawn = train(lambda model: hl.attach(model, lambda module, args, output: torch.rand(1) and None))
    assert {"random", "weight head.weight"} <= set(differences(drawn, train(None)))


def test_nothing_is_left_on_the_model() -> None:
    """After the block no hook is on the model, no mode on the stack, no other base on the class."""
    model = House()
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


def test_an_error_in_the_block_takes_the_hooks_off() -> None:
    """What leaves the block leaves no hook, a KeyboardInterrupt in a forward included."""

    def interrupted(self: Any, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(3, 3), Calls(interrupted))
    with pytest.raises(KeyboardInterrupt), hl.profile(model, functions="torch.nn.functional.*") as prof:
        model(torch.ones(3))
    hl.assert_no_hooks(model, foreign=True)
    assert _get_current_function_mode_stack() == []
    assert calls(prof) == {"": 1, "0": 1, "torch.nn.functional.linear": 1}


def test_an_error_while_attaching_leaves_nothing_attached() -> None:
    """A glob that matches no function, a target that matches no module, a module that cannot be hooked."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(hl.errors.NoMatchError, match=r"torch\.nn\.functional\.reluu"):
        hl.profile(model, functions="torch.nn.functional.reluu")
    with pytest.raises(hl.errors.NoMatchError, match="layers"):
        hl.profile(model, "layers.#")
    hl.assert_no_hooks(model, foreign=True)


def test_a_module_that_refuses_hooks_leaves_the_others_without() -> None:
    """The last module of the model cannot be hooked: the first ones are as they were."""

    class Scripted(torch.jit.ScriptModule):
        pass

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Scripted())
    with pytest.raises(hl.errors.UnhookableError):
        hl.profile(model, functions="torch.nn.functional.*")
    for module in list(model)[:2]:
        hl.assert_no_hooks(module, foreign=True)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert "_call_impl" not in vars(model)


# -- on the real clock -------------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """Sleeps so many milliseconds each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(1e-3 * forward_ms)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(1e-3 * ctx.backward_ms)
        return grad + 0, None, None


def test_on_the_real_clock_sleep_takes_as_long_as_it_does() -> None:
    """Sleeping each way, in branches on one input: each has no less than its sleep, and the sum is the model's."""
    parts = {"a": (5, 40), "b": (10, 30), "c": (40, 5)}

    def branches(self: Any, x: Tensor) -> Tensor:
        return sum(getattr(self, name)(x) for name in parts)

    def sleeper(costs: tuple[int, int]) -> nn.Module:
        return Calls(lambda self, x: Sleep.apply(x, *costs))

    model = nn.Sequential(nn.Linear(3, 3), Calls(branches, **{name: sleeper(costs) for name, costs in parts.items()}))
    with hl.profile(model) as prof:
        run(model)
    rows = {row.name: row for row in prof.rows}
    for name, (forward, backward) in parts.items():
        assert forward <= rows[f"1.{name}"].forward_own_ms
        assert backward <= rows[f"1.{name}"].backward_own_ms
    # Since they add up, too much for one would be too little for another, or less than nothing for a parent.
    assert sum(row.backward_own_ms for row in prof.rows) == pytest.approx(prof.total.backward_ms, rel=1e-6)
    assert min(row.backward_own_ms for row in prof.rows) >= 0
    assert 55 + 75 <= prof.total.forward_ms + prof.total.backward_ms <= prof.wall_ms


def test_on_the_real_clock_sums_are_those_of_the_step() -> None:
    """A transformer with functions: own times are not negative, add up to the model, which is most of the wall."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(16, 64, 128)
    model(x).sum().backward()
    with hl.profile(model, functions=["torch.nn.functional.*", "aten.*mm*"]) as prof:
        for _ in range(3):
            model(x).sum().backward()
    total = prof.total
    rows = prof.rows
    assert sum(row.forward_own_ms for row in rows) == pytest.approx(total.forward_ms, rel=1e-6)
    assert sum(row.backward_own_ms for row in rows) == pytest.approx(total.backward_ms, rel=1e-6)
    assert min(row.forward_own_ms for row in rows) >= 0
    assert min(row.backward_own_ms for row in rows) >= 0
    assert 0.7 * prof.wall_ms <= total.forward_ms + total.backward_ms <= prof.wall_ms
