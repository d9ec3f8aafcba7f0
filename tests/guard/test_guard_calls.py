"""The short ways of the guard, by versions and checks of torch, miss nothing that the long ways see."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookline.guard.guard import Guard
from hookline.sites import _torch


def first_hook(module: nn.Module, args: Any, output: Any) -> None: ...
def second_hook(module: nn.Module, args: Any, output: Any) -> None: ...


def new_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of which each tensor and container can be told from others, one step behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model[0].register_forward_hook(first_hook)
    model[0].register_forward_hook(second_hook)
    model.settings = {"names": ["a", "b"]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def fire(guard: Guard, scope: str, act: Callable[[], object] = lambda: None) -> tuple[str, ...]:
    guard.save([scope])
    with guard.protecting("act", scope) as receipt:
        act()
    guard.release()
    return receipt.touched


def shrink(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def acts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], object]]:
    """Changes that versions, counters or addresses alone would not all tell."""
    weight, hooks = model[0].weight, model[0]._forward_hooks
    square = model[2].weight

    def view() -> None:
        square.data = square.data.view(3, 4)

    def graph() -> None:
        with torch.enable_grad():
            model[1].running_mean.mul_(weight.sum())

    return {
        "order of hooks": lambda: hooks.move_to_end(next(iter(hooks))),
        "item of a list": lambda: model.settings["names"].reverse(),
        "equal list": lambda: model.settings.update(names=["a", "b"]),
        "attribute": lambda: setattr(model[1], "extra", 1),
        "mode": model[2].eval,
        "learning rate": lambda: optimizer.param_groups[0].update(lr=0.5),
        "written": lambda: weight.data.fill_(7.0),
        "written with a counter": lambda: nn.init.zeros_(weight),
        "other memory": lambda: setattr(weight, "data", weight.data.clone()),
        "other shape in the same memory": view,
        "other strides": lambda: setattr(square, "data", square.data.t()),
        "flag": lambda: weight.requires_grad_(False),
        "a graph": graph,
        "shrunk": lambda: shrink(weight),
        "gradient": lambda: setattr(weight, "grad", torch.ones_like(weight)),
        "hook of a tensor": lambda: weight.register_hook(print),
        "state": lambda: optimizer.state[weight].update(exp_avg=torch.zeros(1)),
        "streams": lambda: (torch.rand(1), np.random.rand(), random.random()),
    }


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that an act can change, to compare before and after."""
    tensors = [*model.parameters(), *model.buffers(), optimizer.state[model[0].weight]["exp_avg"]]
    return [
        [(id(each), tuple(each.shape), each.stride(), each.requires_grad) for each in tensors],
        [each.detach().clone() for each in tensors],
        list(model[0]._forward_hooks),
        (id(model.settings["names"]), list(model.settings["names"]), hasattr(model[1], "extra"), model[2].training),
        optimizer.param_groups[0]["lr"],
        (model[0].weight.grad, dict(model[0].weight._backward_hooks or {})),
        (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()),
    ]


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", acts(*new_run()))
def test_every_change_is_seen_and_put_back_with_the_short_ways_and_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipts are the same, in the firing after an untouched one; and afterwards all is as it was."""
    told = []
    for is_short in (True, False):
        if not is_short:
            monkeypatch.setattr(_torch, "dict_version", None)
            monkeypatch.setattr(_torch, "layout_check", lambda tensors: None)
        model, optimizer = new_run()
        guard = Guard(model, optimizer)
        assert fire(guard, "trains") == ()
        before, address = picture(model, optimizer), model[0].weight.data_ptr()
        act = acts(model, optimizer)[name]
        told.append([fire(guard, "trains", act) for _ in range(2)])
        after = picture(model, optimizer)
        is_same = [is_equal(one, other) for one, other in zip(before, after, strict=True)]
        assert all(is_same), (is_short, is_same)
        assert model[0].weight.data_ptr() == address or name == "shrunk"  # its memory was given back
        assert fire(guard, "trains") == ()
    assert told[0] == told[1]
    assert told[0][0] or name in ("written", "hook of a tensor", "order of hooks")  # which have no name in a receipt
