"""Hooks that come and go while hooks fire: one rule for every kind and every place (docs/behaviour.md, *Order*)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl

Attach = Callable[..., hl.HookHandle]
Site = tuple[Attach, Callable[[], object]]
"""How a hook is put on a place, ``attach(hook, on=…, …)``, and what makes the hooks there fire once."""


class Double(torch.autograd.Function):
    """A function class to hook."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def exercise(layer: nn.Module) -> None:
    """One forward, backward, save, load and registration of each sort."""
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    layer.load_state_dict(layer.state_dict())
    layer.child = nn.Identity()
    layer.number = nn.Parameter(torch.ones(1))
    layer.register_buffer("kept", torch.ones(1))
    del layer.child, layer.number, layer.kept


def on(model: nn.Sequential) -> Site:
    """The one layer of a model."""
    return lambda hook, **options: hl.attach(model, "0", hook, **options), lambda: exercise(model[0])


def on_module() -> Site:
    """A module of a model."""
    return on(nn.Sequential(nn.Linear(2, 2)))


def among_foreign_hooks() -> Site:
    """A module on which others have hooks before ours and behind them."""
    model = nn.Sequential(nn.Linear(2, 2))
    for register in (model[0].register_forward_pre_hook, model[0].register_forward_hook):
        register(lambda *args: None)
        register(lambda *args: None, with_kwargs=True)
    return on(model)


def with_kwargs() -> Site:
    """A module whose hooks get the keyword arguments too."""
    attach, run = among_foreign_hooks()
    return lambda hook, **options: attach(hook, with_kwargs=True, **options), run


def always_called() -> Site:
    """A module whose hooks run however the call ends."""
    attach, run = on_module()
    return lambda hook, **options: attach(hook, always_call=True, **options), run


def of_one_context() -> Site:
    """A module whose hooks are for this thread alone."""
    attach, run = on_module()
    return lambda hook, **options: attach(hook, scope="context", **options), run


def on_parameter() -> Site:
    """A parameter of a model."""
    model = nn.Sequential(nn.Linear(2, 2))
    return lambda hook, **options: hl.attach(model, "0.weight", hook, **options), lambda: exercise(model[0])


def within_a_model() -> Site:
    """Every module of a model that is one module."""
    layer = nn.Linear(2, 2, bias=False)
    return lambda hook, **options: hl.attach_everywhere(hook, within=layer, **options), lambda: exercise(layer)


def everywhere() -> Site:
    """Every module of the process, of which one is called."""
    layer = nn.Linear(2, 2)
    return hl.attach_everywhere, lambda: exercise(layer)


def on_function(target: Any, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Site]:
    """A function, an operator or a class."""

    def site() -> Site:
        return (
            lambda hook, **options: hl.attach_function(target, hook, **options),
            lambda: run(torch.ones(2, requires_grad=True)).sum().backward(),
        )

    return site


def on_optimizer() -> Site:
    """An optimizer."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def run() -> None:
        parameter.grad = torch.ones(1)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    return lambda hook, **options: hl.attach_optimizer(optimizer, hook, **options), run


def on_every_optimizer() -> Site:
    """Every optimizer of the process."""
    return hl.attach_everywhere, on_optimizer()[1]


def on_tensor(sort: str) -> Callable[[], Site]:
    """A computed tensor, a leaf, or several tensors together."""

    def site() -> Site:
        leaf = torch.ones(2, requires_grad=True)
        computed, other = leaf * 2, leaf * 3
        tensors: Any = {"computed": computed, "leaf": leaf, "several": [computed, other]}[sort]
        return (
            lambda hook, **options: hl.attach_tensor(tensors, hook, **options),
            lambda: (computed + other).sum().backward(retain_graph=True),
        )

    return site


def on_node() -> Site:
    """A node of the graph."""
    leaf = torch.ones(2, requires_grad=True)
    output = leaf * 2
    return (
        lambda hook, **options: hl.attach_node(output.grad_fn, hook, **options),
        lambda: output.sum().backward(retain_graph=True),
    )


FORWARD = ["forward_pre", "forward"]
GRADIENT = ["backward_pre", "backward"]
CALL = [*FORWARD, *GRADIENT]
REGISTER = ["register_module", "register_parameter", "register_buffer"]
STATE = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
STEP = ["step_pre", "step_post"]
RELU = on_function(torch.nn.functional.relu, torch.nn.functional.relu)
OPERATOR = on_function("aten.relu", torch.relu)
CLASS = on_function(Double, Double.apply)
SITES: list[tuple[Callable[[], Site], list[str]]] = [
    (on_module, [*CALL, "full_backward", *STATE, *REGISTER]),
    (among_foreign_hooks, [*CALL, "full_backward"]),
    (with_kwargs, FORWARD),
    (always_called, ["forward"]),
    (of_one_context, CALL),
    (on_parameter, ["param_grad"]),
    (within_a_model, [*CALL, "full_backward", *STATE, *REGISTER, "param_grad"]),
    (everywhere, [*CALL, "full_backward", *REGISTER]),
    (RELU, CALL),
    (OPERATOR, CALL),
    (CLASS, CALL),
    (on_optimizer, [*STEP, *STATE]),
    (on_every_optimizer, STEP),
    (on_tensor("computed"), ["grad"]),
    (on_tensor("leaf"), ["grad", "param_grad"]),
    (on_tensor("several"), ["grad"]),
    (on_node, ["pre", "post"]),
]
NAMES = {RELU: "function", OPERATOR: "operator", CLASS: "class"}
EDITS = {*CALL, "full_backward", *REGISTER, "step_pre", "grad", "pre", "post"}
"""The kinds that take ``observe=``."""


def name_of(make: Callable[[], Site]) -> str:
    """A place as a test is called after it."""
    return NAMES.get(make, make.__qualname__.split(".")[0])


def styles(make: Callable[[], Site], kind: str) -> list[bool]:
    """Whether hooks can be observers there, or hooks alone."""
    return [False, True] if kind in EDITS and make is not always_called else [False]


CASES = [
    pytest.param(make, kind, observes, id=f"{name_of(make)}-{kind}-{'observer' if observes else 'hook'}")
    for make, kinds in SITES
    for kind in kinds
    for observes in styles(make, kind)
]


def log_of(first: Attach, later: Attach, run: Callable[[], object], options: dict[str, Any]) -> str:
    """Who fires while A takes B off and puts C on: in that run, and in the next."""
    log: list[str] = []
    handles: dict[str, hl.HookHandle] = {}

    def a(*args: object, **kwargs: object) -> None:
        log.append("A")
        if "C" not in handles:
            handles["B"].remove(quiet=True)
            handles["C"] = later(lambda *args, **kwargs: log.append("C"))

    handles["A"] = first(a)
    handles["B"] = later(lambda *args, **kwargs: log.append("B"), **options)
    run()
    log.append(" ")
    run()
    for handle in handles.values():
        handle.remove(quiet=True)
    return "".join(log)


@pytest.mark.parametrize(("make", "kind", "observes"), CASES)
def test_a_firing_runs_the_hooks_that_were_on_when_it_began(
    make: Callable[[], Site], kind: str, observes: bool
) -> None:
    """Of one kind at one place: the removed one still runs, the added one not yet; at the next firing both count."""
    attach, run = make()

    def put(hook: Any, **options: Any) -> hl.HookHandle:
        return attach(hook, on=kind, **options)

    assert log_of(put, put, run, {"observe": True} if observes else {}) == "AB AC"


LATER = [
    *((make, "forward_pre", "forward", "AC AC") for make in (on_module, among_foreign_hooks, RELU, OPERATOR, CLASS)),
    (with_kwargs, "forward_pre", "forward", "AC AC"),
    (on_module, "state_dict_pre", "state_dict_post", "AC AC"),
    (on_module, "load_state_dict_pre", "load_state_dict_post", "AC AC"),
    (on_optimizer, "step_pre", "step_post", "AC AC"),
    (on_optimizer, "state_dict_pre", "state_dict_post", "AC AC"),
    (on_optimizer, "load_state_dict_pre", "load_state_dict_post", "AC AC"),
    *(
        (make, first, later, "A AC")
        for make in (on_module, among_foreign_hooks, RELU, OPERATOR, CLASS)
        for first in CALL[:3]
        for later in GRADIENT
        if first != later
    ),
    *((on_module, first, "full_backward", "A AC") for first in (*FORWARD, "backward_pre")),
    (on_module, "full_backward", "backward", "A AC"),
]


@pytest.mark.parametrize("company", [False, True], ids=["alone", "in-company"])
@pytest.mark.parametrize("observes", [False, True], ids=["hook", "observer"])
@pytest.mark.parametrize(("make", "first", "later", "expected"), LATER)
def test_a_change_counts_from_the_next_firing_of_the_same_call(
    make: Callable[[], Site], first: str, later: str, expected: str, observes: bool, company: bool
) -> None:
    """A later kind of the call leaves the removed one out and runs the added one; gradient hooks wait for a forward.

    Whatever else is on the place changes nothing in that.
    """
    attach, run = make()
    others = [attach(lambda *args, **kwargs: None, on=kind) for kind in (first, later)] if company else []
    options = {"observe": True} if observes and first in EDITS else {}
    log = log_of(
        lambda hook: attach(hook, on=first, **options),
        lambda hook, **options: attach(hook, on=later, **options),
        run,
        {},
    )
    for handle in others:
        handle.remove(quiet=True)
    assert log == expected


def test_the_rule_stands_in_one_place() -> None:
    """Pages that speak of it repeat the sentence of docs/behaviour.md or link to it."""
    docs = Path(__file__).parents[2] / "docs"
    order = (docs / "behaviour.md").read_text().partition("\n## Order\n")[2].partition("\n## ")[0]
    assert "fire as they were when the first of them began" in " ".join(order.split())
    assert "behaviour.md#order" in (docs / "sources.md").read_text()
