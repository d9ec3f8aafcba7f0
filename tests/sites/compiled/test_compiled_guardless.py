"""Compiled code that checks nothing, as vLLM's: a hook that was attached too late says why it never fired."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

FILTERS: dict[str, Callable[[Any], list[bool]]] = {
    "all": torch.compiler.skip_all_guards_unsafe,
    "one by one": lambda guards: [False for _ in guards],
    "all but those on tensors": lambda guards: [guard.guard_type == "TENSOR_MATCH" for guard in guards],
}


class Model(nn.Module):
    """Two layers, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def compiled(keep: Callable[[Any], list[bool]]) -> tuple[Model, Callable[[Tensor], Tensor]]:
    """A model whose compiled code has run once."""
    model = Model()
    run = torch.compile(model, backend="eager", options={"guard_filter_fn": keep})
    run(torch.ones(1, 2))
    return model, run


def look(*args: Any) -> None:
    """Observe nothing."""


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("keep", FILTERS)
def test_a_hook_that_came_after_guardless_code_is_told_so(keep: str, kind: str) -> None:
    """The warning names the code that checks nothing, and what to do."""
    model, run = compiled(FILTERS[keep])
    handle = hl.attach(model, "used", look, on=kind)
    run(torch.ones(1, 2)).sum().backward()
    assert not handle.report().fired
    with pytest.warns(
        hl.errors.HookNeverFired, match=r"Model runs compiled code .* without guards .* torch.compiler.reset"
    ):
        handle.remove()


def test_code_with_guards_is_not_blamed() -> None:
    """The control: a module that is never called, in code that notices hooks, has its own cause."""
    model = Model()
    run = torch.compile(model, backend="eager")
    run(torch.ones(1, 2))
    handle = hl.attach(model, "unused", look)
    run(torch.ones(1, 2))
    with pytest.warns(hl.errors.HookNeverFired, match="nothing called it"):
        handle.remove()
