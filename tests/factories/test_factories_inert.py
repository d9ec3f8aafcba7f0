"""A run with any observing factory is the run without it, bit for bit; one that edits is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_training import Step, differences, plain_step, train
from torch import Tensor, nn

import hookline as hl
from hookline import factories

OBSERVERS: dict[str, dict[str, Any]] = {
    "activation_stats": {"stats": ["mean", "std", "absmax", "zero_fraction", "nan", "dead_fraction"]},
    "export": {"max_bytes": 1 << 30},
    "nan_alarm": {},
}


def made(name: str, folder: Path) -> Any:
    config = dict(OBSERVERS.get(name, {"vector": [1e-6] * 3}))
    if name == "export":
        config["folder"] = str(folder)
    return getattr(factories, name)(config)


def by_hookline(hook: Any, target: str = "*") -> Step:
    def step(model: nn.Sequential, x: Tensor, target_ids: Tensor) -> None:
        with hl.attach(model, target, hook):
            F.cross_entropy(model(x), target_ids).backward()

    return step


def by_torch(hook: Any) -> Step:
    def step(model: nn.Sequential, x: Tensor, target: Tensor) -> None:
        handles = [module.register_forward_hook(hook) for module in model.modules()]
        plain_step(model, x, target)
        for handle in handles:
            handle.remove()

    return step


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """What the run leaves behind without hooks."""
    return train(plain_step)


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("attached", [by_hookline, by_torch])
def test_training_with_an_observer_ends_bit_for_bit_the_same(
    name: str, attached: Callable[[Any], Step], plain: dict[str, Tensor], tmp_path: Path
) -> None:
    """Twenty steps through dropout, BatchNorm and an in-place ReLU, with AdamW; on every module."""
    hook = made(name, tmp_path)
    assert differences(plain, train(attached(hook))) == []
    metrics = hook.to_metrics()
    assert metrics, "it saw nothing, and so proves nothing"
    hook.close()


def test_training_with_an_edit_does_not(plain: dict[str, Tensor], tmp_path: Path) -> None:
    """The control: a steering of a millionth is seen by the comparison."""
    assert differences(plain, train(by_hookline(made("steer", tmp_path), "4"))) != []


@pytest.mark.parametrize("name", OBSERVERS)
def test_observers_return_nothing_and_keep_no_output(name: str, tmp_path: Path) -> None:
    """None from every call, also for what they cannot read; the output is free when its owner lets go."""
    hook = made(name, tmp_path)
    outputs: list[Any] = [None, 3, {}, torch.empty(0), torch.ones(2, dtype=torch.int32), (torch.ones(2, 2), None)]
    for output in outputs:
        assert hook(nn.Identity(), (), output) is None
    module, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    module.register_forward_hook(hook)
    out = module(x)
    out.sum().backward()
    assert torch.allclose(x.grad, module.weight.sum(0).expand(3, 4))
    kept = weakref.ref(out)
    del out
    hook.close()
    assert kept() is None


def test_activation_checkpointing_is_counted_once(tmp_path: Path) -> None:
    """What the backward pass repeats was counted the first time, by all of them; the control sees it twice."""
    from torch.utils.checkpoint import checkpoint

    hooks = {name: made(name, tmp_path) for name in OBSERVERS}
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), []
    for hook in (*hooks.values(), lambda *_: calls.append(1)):
        model[0].register_forward_hook(hook)
    checkpoint(model, torch.randn(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(calls) == 2
    for hook in hooks.values():
        hook.close()
    assert hooks["activation_stats"].read()["Linear.0"]["fires"] == 1
    assert [cells["fires"] for cells in hooks["nan_alarm"].read().values()] == [1]
    assert hooks["export"].to_metrics()["written_tensors"] == 1


# -- the row table of an engine ------------------------------------------------------------------------------
