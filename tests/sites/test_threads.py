"""Several threads on one hooked model: counts add up, steps and calls are each thread's own."""

from __future__ import annotations

import collections
import threading

import pytest
import torch
from helpers_threads import in_threads
from torch import nn

import hookline as hl

THREADS = 4
STEPS = 25


pytestmark = pytest.mark.usefixtures("frequent_switches")


def make_model() -> nn.Module:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.Tanh(), layer)  # the layer is called twice per forward


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
@pytest.mark.parametrize("edits", [False, True])
def test_gradient_counts_of_all_threads_add_up(kind, edits):
    """Each thread's backward fires the hooks of its own forwards, watched or edited."""
    model = make_model()

    def watch(module: nn.Module, *grads: object) -> None:
        """Sees and gives nothing."""

    def edit(module: nn.Module, *grads: object) -> object:
        return grads[0]

    def work(index: int) -> None:
        for _ in range(STEPS):
            x = torch.full((1, 2), float(index), requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)

    with hl.attach(model, "*", edit if edits else watch, on=kind) as handle:
        in_threads(work, THREADS)
        assert handle.report().fired == 4 * THREADS * STEPS


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
def test_steps_and_calls_are_right_in_every_thread(kind):
    """Within one forward of one thread the layer's calls are 0 and 1, and every step belongs to one thread."""
    model = make_model()
    seen: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)

    def hook(*args: object, site: hl.Site) -> None:
        seen[threading.get_ident()].append((site.step, site.call))

    def work(index: int) -> None:
        for _ in range(STEPS):
            x = torch.ones(1, 2, requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)

    with hl.attach(model, nn.Linear, hook, on=kind):
        in_threads(work, THREADS)
    calls = [1, 0] if kind.startswith("backward") else [0, 1]
    steps = []
    for moments in seen.values():
        for first, second in zip(moments[::2], moments[1::2], strict=True):
            assert first[0] == second[0]
            assert [first[1], second[1]] == calls
            steps.append(first[0])
    assert len(seen) == THREADS
    assert sorted(steps) == list(range(THREADS * STEPS))


def test_gradients_of_threads_are_not_mixed():
    """The gradient a backward hook gets is that of its own thread's loss."""
    model = nn.Sequential(nn.Identity())
    mixed = []

    def hook(module: nn.Module, grad_input: tuple[torch.Tensor], grad_output: tuple[torch.Tensor]) -> None:
        if grad_output[0][0].item() != mine.scale or grad_input[0][0].item() != mine.scale:
            mixed.append((grad_output[0][0].item(), mine.scale))

    mine = threading.local()

    def work(index: int) -> None:
        for step in range(STEPS):
            mine.scale = float(index * STEPS + step + 1)
            x = torch.ones(2, requires_grad=True) * 2
            (model(x) * mine.scale).sum().backward()

    with hl.attach(model, "*", hook, on="backward"):
        in_threads(work, THREADS)
    assert mixed == []
