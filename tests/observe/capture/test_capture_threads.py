"""A capture is for the thread, or asyncio task, that opened it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers_waiting import PATIENCE
from torch import nn

import hookline as hl
from hookline.sites import hook_at_site as context

OPTIONS: dict[str, dict[str, Any]] = {"outputs": {}, "all": {"inputs": True, "grads": True}, "clones": {"clone": True}}


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Have Python switch threads as often as it can; and every scope is closed at the end."""
    interval, before = sys.getswitchinterval(), set(context._LIVE)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    assert not context._LIVE - before


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.Tanh())


def run(model: nn.Module, value: float) -> None:
    model(torch.full((1, 2), value, requires_grad=True) * 1).sum().backward()


def check(cache: hl.observe.Cache, value: float, *, grads: bool) -> bool:
    """Whether the one call that was captured is that with this value."""
    outputs = [call.output[0, 0].item() for call in cache["0"].calls]
    return outputs == [value] and (not grads or cache["0"].grad is not None)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_threads_on_one_model_never_see_each_others_tensors(options):
    """Attached and removed around each call, 40 times in each of three threads: every capture has its own values."""
    model, wrong = stack(), []
    barrier = threading.Barrier(3, timeout=PATIENCE)

    def work(index: int) -> None:
        barrier.wait()
        for step in range(40):
            value = float(3 * step + index)
            with hl.capture(model, "#", **options) as cache:
                run(model, value)
            if not check(cache, value, grads="grads" in options):
                wrong.append((index, value, [call.output for call in cache["0"].calls]))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert wrong == []
    hl.assert_no_hooks(model, foreign=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_tasks_on_one_model_never_see_each_others_tensors(options):
    model, wrong = stack(), []

    async def work(index: int) -> None:
        for step in range(10):
            value = float(2 * step + index)
            with hl.capture(model, "#", **options) as cache:
                await asyncio.sleep(0)
                run(model, value)
                await asyncio.sleep(0)
            if not check(cache, value, grads="grads" in options):
                wrong.append((index, value))

    async def both() -> None:
        await asyncio.gather(work(0), work(1))

    asyncio.run(both())
    assert wrong == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_capture_of_the_process_has_every_call(options):
    """Each call with its own inputs and gradients, whoever made it."""
    model = stack()
    with hl.capture(model, "#", scope="process", **options) as cache, ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda value: run(model, float(value)), range(30)))
    calls = cache["0"].calls
    assert sorted(call.output[0, 0].item() for call in calls) == [float(value) for value in range(30)]
    assert len({call.step for call in calls}) == 30
    if "grads" in options:
        for call in cache["1"].calls:
            slope = 1 - torch.tanh(call.output) ** 2
            torch.testing.assert_close(call.grad, slope)
            assert torch.equal(model[1](call.inputs[0]), call.output)
