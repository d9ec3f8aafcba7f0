"""A profile of several passes, of passes that raise, of any tree of modules, and on the real clock."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers_profile import (
    STOPWATCH,
    Calls,
    Learned,
    Spend,
    Stopwatch,
    Work,
    calls,
    own,
    profiled,
    run,
    times,
)
from torch import Tensor, nn

import hookline as hl

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
                stopwatch.advance(1000)
    assert times(prof)[""] == (4 + 8 + 8 + 4, 14, 12, 0)
    assert times(prof)["1"] == (2, 0, 4, 0)
    assert times(prof)["2"] == (6, 0, 8, 0)
    assert calls(prof) == {"": 4, "0": 4, "1": 2, "1.a": 4, "2": 2, f"{Spend.__module__}.Spend": 6}
    assert sum(row.forward_own_ms for row in prof.rows) == pytest.approx(prof.total.forward_ms, rel=1e-6)


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
            return sum((self.one(child, x, costs) for child, costs in children), x.view(3))
        for child, costs in children:
            x = x + self.one(child, x, costs) if self.shape == "residual" else x * 0.5 + self.one(child, x, costs)
        return (x.sin(), {"more": x.cos()}["more"]) if self.shape == "pair" else x


@pytest.mark.parametrize("seed", range(40))
def test_in_any_tree_of_modules_every_one_has_the_time_it_costs(stopwatch: Stopwatch, seed: int) -> None:
    """Forty random models, two steps each: own times are the costs, wherever in the graph they are."""
    tree = Tree(random.Random(seed), depth=3)
    model = Calls(lambda self, x: tree.one(tree, self.stem(x)), stem=nn.Linear(3, 3), tree=tree)
    prof = profiled(model, steps=2)
    rows = {row.name: row for row in prof.rows}
    for name, module in model.named_modules():
        forward, backward = getattr(module, "costs", (0, 0))
        assert own(prof)[name] == (forward * rows[name].calls, backward * rows[name].calls), f"{name} of {model}"
    for way in ("forward", "backward"):
        total = sum(getattr(row, f"{way}_own_ms") for row in prof.rows)
        assert total == pytest.approx(getattr(prof.total, f"{way}_ms"), rel=1e-6)


# -- on the real clock -------------------------------------------------------------------------------------
