"""``backward_pre`` beside torch's own backward hooks on one module: who comes first, and who sees whose edit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

Log = list[tuple[str, Any]]
FACTORS = {"pre a": 0.5, "pre b": 3.0}


def numbers(grads: tuple[Tensor | None, ...]) -> list[Any]:
    """Gradients as numbers that can be compared."""
    return [None if grad is None else grad.tolist() for grad in grads]


def edit(log: Log, name: str) -> Callable[..., Any]:
    """A ``backward_pre`` hook that notes what it sees and multiplies it."""

    def hook(module: nn.Module, grad_output: Any) -> Any:
        log.append((name, numbers(grad_output)))
        return tuple(None if grad is None else grad * FACTORS[name] for grad in grad_output)

    return hook


def watch(log: Log, name: str) -> Callable[..., None]:
    """A hook of any backward kind that notes the gradients of the outputs that it is shown."""

    def hook(module: nn.Module, *grads: Any) -> None:
        log.append((name, numbers(grads[-1])))

    return hook


class Out(NamedTuple):
    """What `Named` gives out."""

    first: Tensor
    second: Tensor


class Named(nn.Module):
    """A named tuple out, a keyword argument in."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Out:
        return Out(x * scale, x + scale)


def inputs(requires_grad: bool = True) -> Tensor:
    """The same numbers each time."""
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(requires_grad)


def total(output: Any) -> Tensor:
    """A loss with another gradient for every entry of every output."""
    found = [output] if isinstance(output, Tensor) else [one for one in output if isinstance(one, Tensor)]
    weighted = [(one * torch.arange(1.0, one.numel() + 1).view_as(one)).sum() for one in found]
    return torch.stack(weighted).sum()


@pytest.mark.parametrize(
    "order", [("pre a", "full a", "pre b", "full b"), ("full b", "pre b", "full a", "pre a")], ids="-".join
)
def test_pre_hooks_run_first_whichever_came_first(order: tuple[str, ...]) -> None:
    """All backward_pre hooks run before all full_backward hooks, which see the edited gradient, as in torch."""
    logs: dict[str, Log] = {"ours": [], "torch": []}
    torch.manual_seed(0)
    ours = nn.Linear(3, 2)
    theirs = copy.deepcopy(ours)
    for name in order:
        if name in FACTORS:
            hl.attach(ours, edit(logs["ours"], name), on="backward_pre")
            theirs.register_full_backward_pre_hook(edit(logs["torch"], name))
        else:
            hl.attach(ours, watch(logs["ours"], name), on="full_backward")
            theirs.register_full_backward_hook(watch(logs["torch"], name))
    for module in (ours, theirs):
        total(module(inputs())).backward()
    assert logs["ours"] == logs["torch"]
    assert [name[:3] for name, _ in logs["ours"]] == ["pre", "pre", "ful", "ful"]
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_our_edits_come_before_the_hooks_of_others_and_our_observers_after() -> None:
    """Beside torch's own pre-hooks and full hooks of others: raw, edit, theirs, observer, then the full hooks."""
    module, log = nn.Sigmoid(), Log()
    module.register_full_backward_pre_hook(edit(log, "pre b"))
    module.register_full_backward_hook(watch(log, "their full"))
    hl.attach(module, watch(log, "backward"), on="backward")
    hl.attach(module, watch(log, "observer"), on="backward_pre", observe=True)
    hl.attach(module, watch(log, "full"), on="full_backward")
    hl.attach(module, edit(log, "pre a"), on="backward_pre")
    hl.attach(module, watch(log, "raw"), on="backward_pre", prepend=True)
    module(torch.zeros(1, requires_grad=True)).sum().backward()
    shown = [(name, grads[0][0]) for name, grads in log]
    assert shown[:4] == [("raw", 1.0), ("pre a", 1.0), ("pre b", 0.5), ("observer", 1.5)]
    assert sorted(shown[4:6]) == [("full", 1.5), ("their full", 1.5)]
    assert shown[6:] == [("backward", 1.5)]


def test_a_parent_and_its_last_child_keep_torchs_order() -> None:
    """Outermost backward_pre first, innermost full_backward first, where parent and child give out one tensor."""
    logs: dict[str, Log] = {"ours": [], "torch": []}
    for owner, log in logs.items():
        model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sigmoid()))
        for place, module in (("parent", model[1]), ("child", model[1][0])):
            if owner == "ours":
                hl.attach(module, watch(log, f"{place} full"), on="full_backward")
                hl.attach(module, watch(log, f"{place} pre"), on="backward_pre")
            else:
                module.register_full_backward_hook(watch(log, f"{place} full"))
                module.register_full_backward_pre_hook(watch(log, f"{place} pre"))
        total(model(inputs())).backward()
    assert [name for name, _ in logs["ours"]] == ["parent pre", "child pre", "child full", "parent full"]
    assert logs["ours"] == logs["torch"]


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
def test_an_output_that_torch_does_not_see_still_fires() -> None:
    """Where torch's own hook stays silent (a dict comes out), backward_pre fires as ever."""

    class Dict(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": x * 2}

    module, log = Dict(), Log()
    module.register_full_backward_hook(watch(log, "full"))
    hl.attach(module, edit(log, "pre a"), on="backward_pre")
    module(torch.ones(1, requires_grad=True))["y"].sum().backward()
    assert log == [("pre a", [[1.0]])]
