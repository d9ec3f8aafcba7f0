"""Nasty acts inside a guarded block, one by one, and then at random in child processes."""

from __future__ import annotations

import pytest
import torch
import vandals
from torch import nn

import hookline as hl
from hookline.guard.guard import TorchSwitches, rollback
from hookline.sites import _torch


@pytest.mark.parametrize("alive", [False, True], ids=["no graph", "a graph of before"])
@pytest.mark.parametrize("name", sorted(vandals.ACTS))
def test_a_run_goes_on_after_an_act_as_if_it_had_not_been(name: str, alive: bool, monkeypatch: pytest.MonkeyPatch):
    """To the bit; the short ways, by versions and checks of torch, miss nothing that the long ways see."""
    expected = vandals.run_act(name, alive)
    assert expected[0] == []
    monkeypatch.setattr(_torch, "dict_version", None)
    monkeypatch.setattr(_torch, "layout_check", lambda tensors: None)
    assert vandals.run_act(name, alive) == expected


def test_a_computed_tensor_that_was_written_with_a_graph_is_named():
    """Its numbers come back and its graph cannot: a gradient through it would be another."""
    model = nn.Linear(2, 2)
    model.hidden = model(torch.ones(1, 2))
    with pytest.raises(hl.errors.GuardError, match=r"model\.hidden"), rollback(model):
        model.hidden.mul_(model.weight.sum())


def test_memory_that_was_shrunk_and_shown_to_numpy_is_replaced_and_named():
    """torch does not resize it any more; numbers come back all the same, views of it included."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.arange(6.0))
    model.register_buffer("rest", model.scale[3:])

    def act() -> None:
        model.scale.untyped_storage().resize_(4)
        model.scale[:1].numpy()

    with pytest.raises(hl.errors.GuardError, match=r"model\.scale \(its memory was shrunk"), rollback(model):
        act()
    assert (model.scale.tolist(), model.rest.tolist()) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 4.0, 5.0])
    model.scale[3] = 7
    assert model.rest[0] == 7


# -- at random --------------------------------------------------------------------------------------------------------

TRACELESS = {"stop", "grow", "resize", "array", "last", "reshape and back", "order of hooks", "swap refused"}
"""Acts that change nothing of this run, or nothing that shows."""


@pytest.mark.parametrize("name", sorted(vandals.ACTS.keys() - TRACELESS))
def test_the_fuzzer_sees_what_a_missing_guard_lets_through(name: str) -> None:
    """The control: an act alone, with nothing put back, leaves a trace in the portrait."""
    run = vandals.VandalizedRun("tied", "adam", False)
    before, switches, rng = vandals.portrait(run), TorchSwitches(), vandals.random.Random(1)
    try:
        for _ in range(3):
            vandals.ACTS[name](run, rng)
        if name == "shrink":
            tensors = [*run.model.parameters(), *run.model.buffers(), *(p.grad for p in run.model.parameters())]
            tensors += [v for state in run.optimizer.state.values() for v in state.values()]
            assert any(tensor.untyped_storage().nbytes() < tensor.nbytes for tensor in tensors)
        else:
            seen = vandals.switches() if name == "switches" else vandals.portrait(run)
            assert [key for key in seen if key not in before or seen[key] != before[key]] != []
    finally:
        switches.restore()
        hl.HandleSet(kept for kept in run.keep if isinstance(kept, hl.HookHandle)).remove(quiet=True)
