"""Training in compiled code: a run that is watched ends with the same bits as the run that is not.

Under ``aot_eager`` every operator runs as in eager code, so the bits have to be the same. Under inductor an observed
tensor has to exist, which changes what is fused, and so the rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers_compiled import KINDS, breaks
from helpers_house import House, differences, house_step, reading_hook, train, train_without_hooks
from torch import nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")


def whole() -> nn.Module:
    """The model of the house tests, compiled."""
    model = House()
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def per_block() -> nn.Module:
    """The same, its blocks compiled one by one."""
    model = House()
    for block in (model.encoder, *model.decoder):
        block.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize("build", [whole, per_block])
def test_a_watched_compiled_run_ends_with_the_same_bits(build: Callable[[], nn.Module]) -> None:
    """All four kinds on every module at once, hooks that read each tensor: nothing is rounded otherwise."""

    def watch(model: nn.Module) -> hl.HandleSet:
        hook = reading_hook(observe=True)
        return hl.HandleSet([hl.attach(model, "*", hook, on=kind, observe=True) for kind in KINDS])

    plain = train_without_hooks(build, house_step)
    torch._dynamo.reset()
    assert differences(train(build, house_step, watch), plain) == []
    assert breaks() == 0


def test_the_comparison_can_fail() -> None:
    """A hook that draws one random number changes the dropout of the rest of the run."""

    def draw(model: nn.Module) -> hl.HandleSet:
        return hl.HandleSet([hl.attach(model, "head", lambda *args: torch.rand(()) and None, observe=True)])

    plain = train_without_hooks(whole, house_step)
    torch._dynamo.reset()
    assert {"random.torch", "loss"} <= set(differences(train(whole, house_step, draw), plain))
