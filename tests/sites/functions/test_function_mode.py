"""The stack of function modes: hooks go on and come off under, over and between the modes of others."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from helpers_functions import Around, modes, noting
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hookline as hl


class Counting(TorchFunctionMode):
    """Somebody else's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


# -- on and off --------------------------------------------------------------------------------------------


def test_a_mode_is_on_exactly_while_a_bare_hook_is() -> None:
    """One for all functions, one for all operators; classes, and hooks with within=, need none outside of a forward."""
    model = Around(torch.exp)
    assert modes() == []
    with hl.attach_function(torch.exp, lambda fn, i, o: None):
        assert len(modes()) == 1
        with hl.attach_function("*.relu", lambda fn, i, o: None):
            assert len(modes()) == 1
        assert len(modes()) == 1
    assert modes() == []
    with hl.attach_function(torch.exp, lambda fn, i, o: None, within=model):
        assert modes() == []
    with hl.attach_function("aten.exp.default", lambda fn, i, o: None):
        assert len(modes()) == 1
        with hl.attach_function(["aten.mm", torch.exp], lambda fn, i, o: None):
            assert len(modes()) == 2
    assert modes() == []


def test_with_within_the_mode_is_on_during_the_forward_alone() -> None:
    """Before the first line of it and not after the last, for nested and repeated calls too."""
    depths: list[int] = []
    inner = Around(lambda x: (depths.append(len(modes())), torch.exp(x))[1])
    model = nn.Sequential(inner, inner)
    with hl.attach_function(torch.exp, lambda fn, i, o: None, within=model):
        model(torch.ones(2))
        assert modes() == []
        inner(torch.ones(2))
    assert depths == [1, 1, 0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_the_stack_clean(error: type[BaseException]) -> None:
    """In the model itself or below it, and the next forward is hooked as ever."""
    failing, events = [True], []

    def run(x: Tensor) -> Tensor:
        if failing:
            raise error("mine")
        return torch.exp(x)

    model = nn.Sequential(nn.Identity(), Around(run))
    with hl.attach_function(torch.exp, noting(events, "exp"), within=model):
        for _ in range(3):
            with pytest.raises(error, match="mine"):
                model(torch.ones(1))
            assert modes() == []
        failing.clear()
        model(torch.ones(1))
    assert events == ["exp"]


# -- among the modes of others -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations("ABh")), ids="".join)
@pytest.mark.parametrize("leave", list(itertools.permutations("ABh")), ids="".join)
def test_foreign_modes_entered_and_left_around_a_hook_in_any_order(order: Any, leave: Any) -> None:
    """Two modes (left last in, first out, as ``with`` does) and a hook that goes on and comes off anywhere between."""
    events: list[str] = []
    foreign = {"A": Counting(), "B": Counting()}
    if [name for name in leave if name != "h"] != [name for name in reversed(order) if name != "h"]:
        leave = [name if name == "h" else ("B" if name == "A" else "A") for name in leave]
    handle = None
    for name in order:
        if name == "h":
            handle = hl.attach_function(torch.exp, noting(events, "exp"))
        else:
            foreign[name].__enter__()
    assert handle is not None
    torch.exp(torch.ones(1))
    assert events == ["exp"]
    assert [mode.seen["exp"] for mode in foreign.values()] == [1, 1]
    left: set[str] = set()
    for step, name in enumerate(leave):
        if name == "h":
            handle.remove()
        else:
            foreign[name].__exit__(None, None, None)
        left.add(name)
        torch.exp(torch.ones(1))
        still = [mode.seen["exp"] - 2 - step == 0 for mode in foreign.values()]
        assert still == [other not in left for other in foreign]
        assert events == ["exp"] * (2 + step if "h" not in left else len(events))
    assert modes() == []
