"""How many Python functions of ours a capture, an attachment and a firing run: times vary, these numbers do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers_host_calls import counting, unaffected
from torch import nn

import hookline as hl
from hookline.errors import NoMatchError


def calls_of(act: Callable[[], Any]) -> Counter[str]:
    """Count what the third time of ``act`` calls: what the first ones remember, it finds."""
    act()
    act()
    with counting() as calls:
        act()
    return calls


@pytest.fixture(autouse=True)
def same_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with unaffected(monkeypatch):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def make_model(blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(blocks)])


def ignore(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing."""


def test_a_capture_of_one_module_by_name() -> None:
    """Enter, one forward, leave, read: no more calls than these, however large the model is."""
    counts = set()
    for blocks in (3, 40):
        model, x = make_model(blocks), torch.ones(1, 2)

        def capture(model: nn.Module = model, x: torch.Tensor = x) -> None:
            with hl.capture(model, "1.inner") as cache:
                model(x)
            assert cache["1.inner"].output.shape == (1, 2)

        calls = calls_of(capture)
        assert calls["walk"] == 0
        counts.add(calls.total())
    assert len(counts) == 1
    assert counts.pop() <= 160


def test_a_patch_of_one_module_by_name() -> None:
    """The same, with a function that is looked at once, and an object that is called."""

    class Double:
        def __call__(self, activation: torch.Tensor) -> torch.Tensor:
            return activation * 2

    for edit in (lambda activation: activation * 2, Double()):
        counts = set()
        for blocks in (3, 40):
            model, x = make_model(blocks), torch.ones(1, 2)

            def patch(model: nn.Module = model, x: torch.Tensor = x, edit: Any = edit) -> None:
                with hl.patch(model, {"1.inner": edit}):
                    model(x)

            calls = calls_of(patch)
            assert calls["walk"] == calls["_check_function"] == calls["_examine"] == 0
            counts.add(calls.total())
        assert len(counts) == 1
        assert counts.pop() <= 160


def test_a_tree_that_has_changed_is_seen() -> None:
    """Nothing is remembered about names: a module that was replaced, or is gone, is not captured under its old one."""
    model, x = make_model(), torch.ones(1, 2)
    for _ in range(2):
        model[1].inner = nn.Linear(2, 2)
        with hl.capture(model, "1.inner") as cache:
            model(x)
        torch.testing.assert_close(cache["1.inner"].output, model[1].inner(model[0](x)))
    del model[2]
    with pytest.raises(NoMatchError):
        hl.capture(model, "2.inner")


@pytest.mark.parametrize(("observe", "attaching", "removing"), [(False, 40, 24), (True, 40, 24)])
def test_each_module_that_is_hooked(observe: bool, attaching: int, removing: int) -> None:
    """What one module more adds to attaching (finding it included) and to removing; the same for each."""
    totals: dict[int, tuple[int, int]] = {}
    for blocks in (20, 120):
        model = make_model(blocks)
        for _ in range(2):
            with counting() as attached:
                handle = hl.attach(model, "*.inner", ignore, observe=observe)
            with counting() as removed:
                handle.remove()
        totals[blocks] = attached.total(), removed.total()
    # A block is two modules to walk over, and one to hook.
    assert totals[120][0] - totals[20][0] <= 100 * attaching
    assert totals[120][1] - totals[20][1] <= 100 * removing
    hl.assert_no_hooks(model, foreign=True)


@pytest.mark.parametrize(("target", "bound"), [("#.inner", 18), ("#", 29)])
def test_each_firing_of_a_gradient_observer(target: str, bound: int) -> None:
    """What one module more adds to a step: forward, backward and the firing; a leaf, and a block whose graph is
    walked.
    """
    totals = {}
    for blocks in (4, 14):
        model, x, fired = make_model(blocks), torch.ones(1, 2, requires_grad=True), []

        def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model(x * 1).sum().backward()

        def observe(module: nn.Module, grad_input: Any, grad_output: Any, fired: list[Any] = fired) -> None:
            fired.append(grad_input)

        with hl.attach(model, target, observe, on="backward", observe=True):
            totals[blocks] = calls_of(step).total()
        assert len(fired) == 3 * blocks
    assert totals[14] - totals[4] <= 10 * bound


def test_a_list_of_names_is_looked_up() -> None:
    """Twice as many names of a model twice as large: twice the calls, not four times."""
    totals = []
    for blocks in (100, 200):
        model = make_model(blocks)
        with counting() as calls:
            hl.attach(model, [f"{index}.inner" for index in range(blocks)], ignore).remove(quiet=True)
        totals.append(calls.total())
    assert totals[1] < 2.2 * totals[0]
