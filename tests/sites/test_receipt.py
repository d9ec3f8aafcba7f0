"""Receipts: what was matched, attached, fired and when, and why a hook stayed silent."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers_sites import ignore
from torch import nn

import hookline as hl


class Bypasses(nn.Module):
    """One child per way not to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(2, 2)
        self.direct = nn.Linear(2, 2)
        self.borrowed = nn.Linear(2, 2)
        self.idle = nn.Linear(2, 2)
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.called(x)
        x = self.direct.forward(x)
        x = F.linear(x, self.borrowed.weight, self.borrowed.bias)
        x = self.experts[0].forward(x)
        return self.attention(x, x, x, need_weights=False)[0]


X = torch.ones(1, 3, 2)


def silent_warning(model: nn.Module, target: object, run=lambda model: model(X), **options: object) -> str:
    """The one warning that attaching, running and removing gives."""
    handle = hl.attach(model, target, ignore, **options)
    run(model)
    with pytest.warns(hl.errors.HookNeverFired) as record:
        handle.remove()
    assert len(record) == 1
    return str(record[0].message)


def assert_quiet(handle: hl.HookHandle) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.remove()


# -- the numbers ---------------------------------------------------------------------------------------------


def test_a_receipt_counts_firings_and_the_last_step():
    """Steps are forwards of the model since the first hook came on, counted from 0."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    handle = hl.attach(model, "#", ignore, name="mine")
    for _ in range(3):
        model(X)
    receipt = handle.report()
    assert (receipt.fired, receipt.last_step) == (6, 2)
    assert [(site.name, site.fired, site.last_step) for site in receipt.sites] == [("0", 3, 2), ("1", 3, 2)]
    assert receipt.silent == ()
    assert str(receipt) == "mine (forward): matched 2 sites, fired 6 times, last at step 2"
    handle.remove()
    assert handle.report().attached == 0
    assert handle.report().fired == 6


# -- the warning ---------------------------------------------------------------------------------------------


def test_a_model_that_replays_a_cuda_graph_is_the_cause():
    """Its forward is torch's own, which calls no module."""
    model = Bypasses()
    model.forward = lambda x: x
    model.forward.__module__ = torch.cuda.make_graphed_callables.__module__
    assert "Bypasses replays a CUDA graph, which calls no module; hook Bypasses" in silent_warning(model, "idle")


def test_a_module_that_is_never_called_is_named():
    """The plain case: it is there, and nobody calls it."""
    model = Bypasses()
    message = silent_warning(model, "idle")
    assert message.startswith("forward hook 'ignore' never fired, although the model ran. 'idle': nothing called it")
    for name in ("direct", "borrowed"):  # a remedy that fits both is in the cause
        assert "nothing called it" in silent_warning(Bypasses(), name)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward", "full_backward"])
def test_a_container_alone_is_recognized(kind):
    """A ModuleList is never called, whatever the kind of hook."""
    assert "'experts': a container is never called; hook its children" in silent_warning(Bypasses(), "experts", on=kind)


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
def test_a_missing_backward_pass_is_recognized(kind):
    """The module ran, but nobody differentiated."""
    message = silent_warning(Bypasses(), "called", on=kind)
    assert "it ran, but no backward pass came through its outputs" in message


def test_the_warning_points_at_the_line_that_removed():
    """Whoever reads it finds their own code, not ours, in both forms."""
    model = Bypasses()
    handle = hl.attach(model, "idle", ignore)
    model(X)
    with pytest.warns(hl.errors.HookNeverFired) as by_call:
        handle.remove()
    with pytest.warns(hl.errors.HookNeverFired) as by_block, hl.attach(model, "idle", ignore):
        model(X)
    assert by_call[0].filename == __file__
    assert by_block[0].filename == __file__


def test_there_is_no_warning_when_the_model_did_not_run():
    """Nothing could have fired."""
    assert_quiet(hl.attach(Bypasses(), "idle", ignore))


def test_there_is_no_warning_from_a_hook_that_is_removed_in_the_middle_of_a_forward():
    """While the model runs, a module may still have its turn."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    late = hl.attach(model, "1", ignore)
    with hl.attach(model, "0", lambda *args: late.remove()), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
