"""Compiled code that checks nothing, as vLLM's: a hook that was attached too late says why it never fired."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Model(nn.Module):
    """Two layers, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_hook_that_came_after_guardless_code_is_told_so(kind: str) -> None:
    """The warning names such code among the causes."""
    model = Model()
    run = torch.compile(model, backend="eager", options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe})
    run(torch.ones(1, 2))
    handle = hl.attach(model, "used", lambda *args: None, on=kind)
    run(torch.ones(1, 2)).sum().backward()
    assert not handle.report().fired
    with pytest.warns(hl.errors.HookNeverFired, match=r"compiled without guards .*torch.compiler.reset"):
        handle.remove()


def test_a_model_that_vllm_has_compiled_is_the_cause() -> None:
    """The warning names it, and how hooks come into vLLM."""

    class TorchCompileWithNoGuardsWrapper:
        """Of the name that vLLM's has."""

    class Served(TorchCompileWithNoGuardsWrapper, Model):
        """What vLLM makes of a model."""

    model = Served()
    handle = hl.attach(model, "unused", lambda *args: None)
    model(torch.ones(1, 2))
    with pytest.warns(hl.errors.HookNeverFired, match=r"Served runs code that vLLM has compiled.*engines.vllm"):
        handle.remove()
