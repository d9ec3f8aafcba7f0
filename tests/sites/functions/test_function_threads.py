"""Function hooks in threads, under fakes, exports and autocast, and what they keep alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import KINDS, Around, exp_hook, modes
from helpers_waiting import PATIENCE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hookline as hl

# -- threads -----------------------------------------------------------------------------------------------


def in_threads(*runs: Callable[[], Any]) -> None:
    """Run each in a thread of its own, all at once; the first error is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(runs))

    def guarded(run: Callable[[], Any]) -> None:
        try:
            barrier.wait(PATIENCE)
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]


def test_within_a_model_hooks_count_in_every_thread() -> None:
    """Two threads on one model, and two on a model each: every call is seen once, with the number of its own thread."""
    model, other = Around(lambda x: torch.exp(torch.exp(x))), Around(lambda x: torch.exp(x))
    seen: list[Any] = []

    def note(fn: Any, inputs: Any, outputs: Any) -> None:
        seen.append((threading.get_ident(), fn.call))

    with hl.attach_function(torch.exp, note, within=model):
        in_threads(*[lambda: [model(torch.ones(1)) for _ in range(50)]] * 2, lambda: other(torch.ones(1)))
    assert len(seen) == 200
    by_thread: dict[int, list[int]] = {}
    for thread, call in seen:
        by_thread.setdefault(thread, []).append(call)
    assert list(by_thread.values()) == [[0, 1] * 50] * 2


def test_removed_from_another_thread() -> None:
    """It fires no more. No thread can reach into the stack of another: its mode stays, empty, until the next hook."""
    before, events = modes(), []
    handle = exp_hook(events)
    torch.exp(torch.ones(1))
    in_threads(handle.remove)
    assert handle.removed
    torch.exp(torch.ones(1))
    assert events == ["exp"]
    with exp_hook(events):
        torch.exp(torch.ones(1))
    assert events == ["exp"] * 2
    assert modes() == before


def test_threads_that_attach_and_remove_while_others_run() -> None:
    """No call is lost or counted twice for a hook that is on throughout, and nothing raises."""
    model, counts = Around(lambda x: torch.exp(torch.sin(x))), Counter()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            with hl.attach_function([torch.exp, torch.cos], lambda fn, i, o: None, within=model):
                pass

    def work() -> None:
        try:
            for _ in range(200):
                model(torch.ones(1))
        finally:
            stop.set()

    with hl.attach_function(torch.exp, lambda fn, i, o: counts.update(["exp"]), within=model):
        in_threads(work, churn)
    assert counts == {"exp": 200}


# -- fakes, export, autocast -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Something is being compiled")
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward"])
def test_fake_tensors_pass_function_hooks(kind: str) -> None:
    """Shapes come out as without hooks; hooks on functions see the fakes, those on operators keep out."""
    linear = nn.Linear(3, 2)
    events: list[Any] = []
    with (
        hl.attach_function(F.linear, lambda fn, *tensors: events.append(fn.name), on=kind),
        hl.attach_function("aten.tanh.default", lambda fn, *tensors: None),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        y = torch.tanh(linear(torch.empty(5, 3, requires_grad=True)))
        y.sum().backward()
    assert y.shape == (5, 2)
    assert events == ["torch.nn.functional.linear"]


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.product(
    kind=KINDS,
    editing={"watched": False, "edited": True},
)
def test_the_graph_is_freed_without_the_collector(kind: str, editing: bool) -> None:
    """A hook on a call makes no ring of references with its tensors, whether a backward pass comes or not."""

    def watch(fn: Any, *tensors: Any) -> None:
        pass

    def edit(fn: Any, *tensors: Any) -> Any:
        return tensors[0] if kind.startswith("backward") else tensors[-1]

    gc.collect()
    gc.disable()
    try:
        with hl.attach_function(torch.exp, edit if editing else watch, on=kind):
            for backward in (False, True):
                x = torch.ones(3, requires_grad=True)
                h = x * 1
                y = torch.exp(h)
                if backward:
                    y.sum().backward()
                references = [weakref.ref(tensor) for tensor in (x, h, y)]
                del x, h, y
                assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()
