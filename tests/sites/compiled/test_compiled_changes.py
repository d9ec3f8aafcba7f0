"""Hooks that come, go and change each other in compiled code; neighbours; values that differ from call to call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_compiled import Blocks, breaks, compiled, graphs
from torch import Tensor, nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def test_an_edit_that_comes_back_finds_its_graph() -> None:
    """Twelve times on and off: two graphs, as for observers."""
    model, x = Blocks(2), torch.randn(3, 4)
    run = compiled(model)
    plain = run(x)
    for _ in range(12):
        with hl.attach(model, "layers.1", _double):
            assert torch.allclose(run(x), plain * 2)
        assert torch.equal(run(x), plain)
    assert (graphs(), breaks()) == (2, 0)


def test_what_an_edit_is_changed_to_counts_at_once() -> None:
    """Guards look at the hook itself: torch 2.11 skips those of observers, which never change."""

    class Steer:
        strength = 1.0

        def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * self.strength

    model, x, steer = Blocks(2), torch.randn(3, 4), Steer()
    seen: list[Any] = []
    hl.attach(model, "*", lambda module, args, output: seen.append(output), observe=True)
    hl.attach(model, "layers.1", steer)
    run = compiled(model)
    for steer.strength in (1.0, 3.0, 0.0, 1.0):
        for _ in range(2):
            assert torch.allclose(run(x), model(x))


@pytest.mark.parametrize("compile_it", [False, True])
def test_a_hook_that_takes_itself_off_keeps_no_other_from_running(compile_it: bool) -> None:
    """The call under way goes on with the hooks it began with; the next one has the others in their places."""
    model, x, log = Blocks(1), torch.randn(3, 4), []
    run = compiled(model) if compile_it else model
    run(x)

    def raw(module, args, output):
        log.append("raw")
        first.remove()

    def plain(module, args, output):
        log.append("plain")

    first = hl.attach(model, "layers.0", raw, prepend=True)
    others = [hl.attach(model, "layers.0", hook) for hook in (_double, plain, _double)]
    run(x), run(x)
    assert log == ["raw", "plain", "plain"]
    assert [handle.report().fired for handle in (first, *others)] == [1, 2, 2, 2]


def test_hooks_of_other_kinds_that_go_in_a_call_leave_the_slot_that_runs() -> None:
    """Both edits of the call count, although one goes, and with it a hook on the parameter of the same module."""
    model, x = Blocks(1), torch.randn(3, 4)
    layer = model.layers[0].up
    on_weight = [hl.attach(layer, "weight", lambda parameter: parameter, on="param_grad") for _ in range(3)]
    edits = [hl.attach(layer, _double), hl.attach(layer, _double)]

    def take_off(module: nn.Module, args: Any) -> None:
        for handle in (edits[1], on_weight[2]):
            handle.remove(quiet=True)

    hl.attach(layer, take_off, on="forward_pre", observe=True)
    compiled(model)(x)
    assert [handle.report().fired for handle in edits] == [1, 1]


def test_observers_come_after_hooks_that_others_register_later() -> None:
    """As in eager code: they see what downstream sees."""
    model, x, seen = Blocks(1), torch.randn(3, 4), []
    run = compiled(model)
    with hl.attach(
        model, "layers.0", lambda module, args, output: seen.append(output.abs().sum().item()), observe=True
    ):
        run(x)
        foreign = model.layers[0].register_forward_hook(lambda module, args, output: output * 0)
        run(x), run(x)
        foreign.remove()
        run(x)
    assert seen[1:3] == [0.0, 0.0]
    assert seen[0] == seen[3] != 0.0


class Scaled(nn.Module):
    """A linear layer, scaled by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float, times: int) -> Tensor:
        return self.linear(x) * scale * times


class Around(nn.Module):
    """Hands its numbers to the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: Tensor, scale: float, times: int) -> Tensor:
        return self.inner(x, scale, times)


def test_numbers_that_change_need_no_graph_each() -> None:
    """Neither whole ones nor others; the hook has the number of its call."""
    model, x, seen = Around(), torch.randn(3, 4), []
    run = compiled(model)
    given = [(0.5 + i / 7, 2 + i) for i in range(7)]
    for scale, times in given:
        run(x, scale, times)
    bare = graphs()
    with hl.attach(model, "inner", lambda module, args, output: seen.append(args[1:]), observe=True):
        for scale, times in given:
            run(x, scale, times)
    assert seen == given
    assert graphs() - bare <= bare


def test_a_hook_in_runs_is_noticed_after_one_on_saving() -> None:
    """Which by itself needs no other graph: the model does not get a ``forward`` of its own for it."""
    model, x = Blocks(1), torch.randn(3, 4)
    run = compiled(nn.Sequential(model))
    run(x)
    with hl.attach(model, lambda *args: None, on="state_dict_pre"):
        run(x)
        assert graphs() == 1
        with hl.attach(model, "layers.0", lambda *args: None, observe=True) as handle:
            run(x)
            run(x)
            assert (handle.report().fired, handle.report().last_step) == (2, 1)


def test_an_edited_gradient_is_not_silently_cut_off_from_its_second_derivative() -> None:
    """Where a backward can be differentiated (backend "eager"), a hook that edits refuses instead."""
    model, x = Blocks(1), torch.randn(3, 4, requires_grad=True)
    run = torch.compile(model, backend="eager", fullgraph=True)
    with hl.attach(model, "layers.0.up", lambda module, grads: (grads[0] * 2,), on="backward_pre"):
        torch.autograd.grad(run(x).pow(2).sum(), x)
        with pytest.raises(hl.errors.UnhookableError, match="second derivatives"):
            torch.autograd.grad(run(x).pow(2).sum(), x, create_graph=True)
