"""How many guards hooks bring to compiled code, and calls without a pre-hook that notes where they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.sites import _torch


def count_guards(model: nn.Module) -> int:
    """Compile a forward, and return how many lines its guards have."""
    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 4))
    texts = [text for code in _torch.compiled_code() for text in _torch.guards_of(code)]
    assert len(texts) == 1
    return texts[0].count("+- ")


def make_model(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))


@pytest.mark.parametrize(("on", "most"), [("forward", 30), (("forward", "backward"), 30)])
def test_the_guards_of_each_watched_module(on: Any, most: int) -> None:
    """What one module more brings, beyond what it brings without hooks: each guard is checked at each call."""
    counts: dict[bool, list[int]] = {False: [], True: []}
    for depth in (3, 7):
        model = make_model(depth)
        counts[False].append(count_guards(model))
        with hl.watch(model, nn.Linear, on=on):
            counts[True].append(count_guards(model))
    bare, watched = (counts[key][1] - counts[key][0] for key in (False, True))
    assert bare < watched <= bare + 4 * most


def returns_input(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Skip the module."""
    first: Tensor = args[0]
    return first


def gradients_of(model: nn.Module, run: Callable[[Tensor], Tensor], skipped: bool) -> list[Tensor]:
    """Return what observers of gradients saw in two steps, the second with one hook more."""
    seen: list[Tensor] = []

    def note(module: nn.Module, grads: tuple[Tensor | None, ...]) -> None:
        assert grads[0] is not None
        seen.append(grads[0].clone())

    others = [model[1].register_forward_hook(returns_input)] if skipped else []
    with hl.attach(model, ["0", "1"], note, on="backward_pre", observe=True):
        for _ in range(2):
            x = torch.ones(2, 4, requires_grad=True)
            (run(x) * torch.arange(4.0)).sum().backward()
        others.append(model[0].register_forward_pre_hook(lambda module, args: None))
        with hl.attach(model, "0", note, on="backward_pre", observe=True):
            (run(torch.ones(2, 4)) * torch.arange(4.0)).sum().backward()
    for handle in others:
        handle.remove()
    hl.assert_no_hooks(model, foreign=True)
    return seen


@pytest.mark.parametrize("skipped", [False, True])
def test_gradients_are_the_same_with_a_pre_hook_and_without(skipped: bool) -> None:
    """Eager calls, and compiled ones."""
    model = make_model(2)
    expected = gradients_of(model, model, skipped)
    compiled = gradients_of(model, torch.compile(model, backend="aot_eager"), skipped)
    assert len(expected) == len(compiled) == 7
    assert all(torch.equal(one, other) for one, other in zip(compiled, expected, strict=True))


def test_a_hook_that_a_pre_hook_attaches_begins_with_the_next_call() -> None:
    """Also where compiled code has left the pre-hook out that notes where calls begin."""
    torch.compile(torch.nn.Identity(), backend="eager")(torch.ones(1))
    model = make_model(1)
    seen: list[str] = []
    handles: list[Any] = []

    def attach_one(module: nn.Module, args: Any) -> None:
        if not handles:
            note = lambda module, grads: seen.append("late")  # noqa: E731
            handles.append(hl.attach(model, "0", note, on="backward_pre", observe=True))

    first = hl.attach(model, "0", lambda module, grads: seen.append("first"), on="backward_pre", observe=True)
    foreign = model[0].register_forward_pre_hook(attach_one)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert seen == ["first", "first", "late"]
    foreign.remove()
    for handle in (first, *handles):
        handle.remove()
