"""What a firing costs the host: calls of Python functions, counted, on a CPU that stands for a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers_host_calls import counting, unaffected
from torch import Tensor, nn

import hookline as hl
from hookline.observe.watch.pending_tensors import Note, PendingTensors
from hookline.observe.watch.watch import Watch


class _Step:
    """A training step of a model with so many blocks, of which every module is watched."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(blocks) for layer in (nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self) -> None:
        self.model(torch.ones(2, 3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _defer(watch: Watch) -> list[int]:
    """Let all tensors of the CPU wait, as those of a GPU do; return how many are reduced together."""
    batches: list[int] = []

    def reduce(notes: list[Note]) -> None:
        batches.append(len(notes))

    pending = watch._engine._pending[torch.device("cpu")] = PendingTensors(reduce, limit=1 << 40)  # type: ignore[arg-type]
    for place in watch._engine.places.values():
        pending._stays[place] = True
        place.deferred = pending
    return batches


@pytest.fixture(autouse=True)
def same_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with unaffected(monkeypatch):
        yield


def _calls(call: Callable[[], Any]) -> Counter[str]:
    """How often functions of the package are called."""
    with counting() as found:
        call()
    return found


def _calls_of_a_step(blocks: int, *, inputs_too: bool = False) -> Counter[str]:
    step = _Step(blocks)
    with ExitStack() as stack:
        watch = stack.enter_context(hl.watch(step.model, "*", on=("forward", "backward"), optimizer=step.optimizer))
        if inputs_too:
            stack.enter_context(hl.attach(step.model, "*", _nothing, on="backward", observe=True))
        batches = _defer(watch)
        step()
        batches.clear()
        found = _calls(step)
        assert batches == [3 * blocks + 1, 3 * blocks + 1]  # all of the forward together, and of the backward
    return found


def _nothing(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    """Be there, so that gradients of inputs are watched."""


def test_a_module_that_is_watched_both_ways_takes_so_many_calls() -> None:
    """What three modules more add to a step, by function: no other one runs at each firing, and none twice."""
    more = _calls_of_a_step(5) - _calls_of_a_step(4)
    slots = {"LastForwardSlot.__call__", "LastForwardSlot._leave_gradients", "ModuleHooks.keep_places"}
    hooks = {"ModuleStatsHook.forward", "ModuleStatsHook.backward"}
    rules = {"CountingRules.take_output", "CountingRules.counts_backward"}
    gradient = {"tap_output", "is_own_output", "only_hook", "Tap.__call__", "OutputCall.take_output"}
    assert {name: count / 3 for name, count in more.items()} == {
        **dict.fromkeys(slots | hooks | rules | gradient, 1),
        "PendingTensors.note": 2,
        "Streams.<lambda>": 2,  # a function of C on a GPU
        "behind": 1 / 3,  # the output of a Linear is a view
    }
    # Negative control: a hook on the gradients of inputs needs what the short way leaves out.
    longer = _calls_of_a_step(5, inputs_too=True) - _calls_of_a_step(4, inputs_too=True)
    assert sum(longer.values()) > 1.5 * sum(more.values())


def _zoo() -> dict[str, nn.Module]:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    class Changes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.mul_(2), x + 1

    class Row(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2].reshape(-1, 2)

    start = nn.Linear(4, 4)
    return {
        "identity": nn.Sequential(start, nn.Identity(), nn.Linear(4, 2)),
        "in place": nn.Sequential(start, nn.ReLU(inplace=True), nn.Linear(4, 2)),
        "pair": nn.Sequential(start, Pair(), First()),
        "changes its input": nn.Sequential(start, Changes(), First()),
        "part": nn.Sequential(start, Row(), nn.Tanh()),
        "nested": nn.Sequential(nn.Sequential(start, nn.Tanh()), nn.Sequential(nn.Sigmoid())),
    }


def test_the_short_way_shows_what_the_long_one_does() -> None:
    """The same gradients in the same order, whatever modules do with their inputs; and the same weights after it."""
    for name, model in _zoo().items():
        seen: dict[str, list[tuple[str, Any]]] = {}
        for way in ("short", "long"):
            model.zero_grad()
            found = seen[way] = []

            def note(module: nn.Module, grads: Any, found: list[Any] = found, model: nn.Module = model) -> None:
                label = next(label for label, each in model.named_modules() if each is module)
                found.append((label, [None if each is None else each.clone() for each in grads]))

            with hl.HandleSet([hl.attach(model, "*", note, on="backward_pre", observe=True)]) as handles:
                if way == "long":
                    handles.add(hl.attach(model, "*", _nothing, on="backward", observe=True))
                model(torch.linspace(-1, 1, 12).reshape(3, 1, 4)).square().sum().backward()
            found.append(("weights", [each.grad for each in model.parameters()]))
        assert [label for label, _ in seen["short"]] == [label for label, _ in seen["long"]], name
        for (label, one), (_, other) in zip(seen["short"], seen["long"], strict=True):
            for a, b in zip(one, other, strict=True):
                assert (a is None) == (b is None), (name, label)
                assert a is None or torch.equal(a, b), (name, label)


def test_torchs_own_backward_hooks_come_as_before() -> None:
    """With a full backward hook of torch's on the module, observers still see its gradient, once."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), []
    handle = model[0].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    with hl.attach(model, "#", lambda module, grads: seen.append(grads[0].shape), on="backward_pre", observe=True):
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    handle.remove()
    assert seen == [(3, 2), (3, 4)]


def test_a_hook_that_comes_in_the_middle_of_a_call_waits_for_the_next() -> None:
    """And one that has gone by the time of the backward pass does not fire."""
    model = nn.Linear(4, 2)
    seen: list[str] = []
    handles: list[Any] = []

    def late(module: nn.Module, args: Any) -> None:
        if not handles:
            handles.append(
                hl.attach(model, None, lambda module, grads: seen.append("late"), on="backward_pre", observe=True)
            )

    first = hl.attach(model, None, lambda module, grads: seen.append("first"), on="backward_pre", observe=True)
    with hl.attach(model, None, late, on="forward_pre", observe=True):
        model(torch.ones(1, 4)).sum().backward()
        assert seen == ["first"]
        loss = model(torch.ones(1, 4)).sum()
        first.remove()
        loss.backward()
    assert seen == ["first", "late"]
    handles[0].remove()
