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


class Pair(nn.Module):
    """Two outputs of one input, and something that is no tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        return x * 2, None, x.square()


class Out(NamedTuple):
    """What `Named` gives out."""

    first: Tensor
    second: Tensor


class Named(nn.Module):
    """A named tuple out, a keyword argument in."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Out:
        return Out(x * scale, x + scale)


class Masked(nn.Module):
    """A list of tensors without gradients before the tensor that has one."""

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        return [x.detach(), x.detach()], x * 3


def inputs(requires_grad: bool = True) -> Tensor:
    """The same numbers each time."""
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(requires_grad)


def total(output: Any) -> Tensor:
    """A loss with another gradient for every entry of every output."""
    found = [output] if isinstance(output, Tensor) else [one for one in output if isinstance(one, Tensor)]
    weighted = [(one * torch.arange(1.0, one.numel() + 1).view_as(one)).sum() for one in found]
    return torch.stack(weighted).sum()


MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "tensor": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), {}),
    "leaf module": (nn.Sigmoid, {}),
    "tuple": (Pair, {}),
    "named tuple, keyword": (Named, {"scale": torch.tensor(2.0)}),
    "input handed on": (nn.Identity, {}),
}


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


@pytest.mark.parametrize("foreign", [False, True], ids=["ours", "foreign"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["module", "everywhere"])
@pytest.mark.parametrize(("what", "requires_grad"), [*((what, True) for what in MODULES), ("tensor", False)])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_any_module_and_any_owner_of_the_full_hook(
    what: str, everywhere: bool, foreign: bool, requires_grad: bool
) -> None:
    """Tuples, keywords, no input gradient, process-wide hooks: what is seen and sent on is what torch alone gives."""
    make, keywords = MODULES[what]
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    logs: dict[str, Log] = {"ours": [], "torch": []}
    grads: list[Any] = []

    def only(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, grad_output: hook(module, grad_output) if module is ours else None

    if foreign:
        ours.register_full_backward_hook(watch(logs["ours"], "full"))
    else:
        hl.attach(ours, watch(logs["ours"], "full"), on="full_backward")
    pre = edit(logs["ours"], "pre a")
    handle = (
        hl.attach_everywhere(only(pre), on="backward_pre") if everywhere else hl.attach(ours, pre, on="backward_pre")
    )
    with handle:
        x = inputs(requires_grad)
        total(ours(x, **keywords)).backward()
    grads.append([x.grad, *[p.grad for p in ours.parameters()]])
    theirs.register_full_backward_pre_hook(edit(logs["torch"], "pre a"))
    theirs.register_full_backward_hook(watch(logs["torch"], "full"))
    x = inputs(requires_grad)
    total(theirs(x, **keywords)).backward()
    grads.append([x.grad, *[p.grad for p in theirs.parameters()]])
    assert logs["ours"] == logs["torch"]
    assert [name for name, _ in logs["ours"]] == ["pre a", "full"]
    assert all(a is b or torch.equal(a, b) for a, b in zip(*grads, strict=True))


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


def test_places_are_ours_where_the_output_has_more_than_torch_sees() -> None:
    """grad_output keeps one place per tensor of the output, also of tensors in a list, which torch counts as one."""
    module, shown = Masked(), []
    hl.attach(module, lambda m, gi, go: None, on="full_backward")

    def pre(module: nn.Module, grad_output: Any, *, site: hl.Site) -> Any:
        shown.append((site.outputs, [grad is not None for grad in grad_output]))
        return (None, None, grad_output[2] * 2)

    hl.attach(module, pre, on="backward_pre")
    x = torch.ones(2, requires_grad=True)
    module(x)[1].sum().backward()
    assert shown == [(("0.0", "0.1", "1"), [False, False, True])]
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


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


def test_a_forward_hook_behind_ours_that_exchanges_the_output() -> None:
    """A foreign hook that comes during the forward itself, and gives out another structure, does no harm."""

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.register_forward_hook(lambda module, args, output: (output * 2, output * 3))
            return x * 7

    module, log = Late(), Log()
    hl.attach(module, watch(log, "full"), on="full_backward")
    hl.attach(module, edit(log, "pre a"), on="backward_pre")
    x = torch.ones(1, requires_grad=True)
    first, second = module(x)
    (first + second).sum().backward()
    assert sorted(log) == [("full", [[1.0], [1.0]]), ("pre a", [[5.0]])]
    assert x.grad is not None
    assert x.grad.item() == 17.5


def trained(hooked: str) -> list[Tensor]:
    """The end of 20 steps with dropout, BatchNorm and AdamW, with hooks or without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if hooked != "no":
        for module in model:
            module.register_full_backward_hook(lambda m, gi, go: None)
    if hooked == "watched":
        hl.attach(model, "*", lambda m, go: None, on="backward_pre")
    if hooked == "edited":
        hl.attach(model, "4", lambda m, go: (go[0] * 0.5,), on="backward_pre")
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(16, 4, requires_grad=True)).square().mean().backward()
        optimizer.step()
    return [*model.state_dict().values(), torch.get_rng_state()]


def test_watching_beside_torchs_hooks_changes_no_bit() -> None:
    """A run with torch's full hooks ends with the same bits with and without our backward_pre; an edit shows."""
    plain = trained("full")
    assert all(map(torch.equal, plain, trained("watched")))
    assert not all(map(torch.equal, plain, trained("edited")))
