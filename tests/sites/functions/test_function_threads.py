"""Function hooks in threads, under fakes, exports and autocast, and what they keep alive."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from helpers_functions import KINDS, Around
from helpers_threads import in_threads

import hookline as hl

# -- threads -----------------------------------------------------------------------------------------------


def test_within_a_model_hooks_count_in_every_thread() -> None:
    """Two threads on one model, and two on a model each: every call is seen once, with the number of its own thread."""
    model, other = Around(lambda x: torch.exp(torch.exp(x))), Around(lambda x: torch.exp(x))
    seen: list[Any] = []

    def note(fn: Any, inputs: Any, outputs: Any) -> None:
        seen.append((threading.get_ident(), fn.call))

    with hl.attach_function(torch.exp, note, within=model):
        in_threads(lambda number: [(other if number == 2 else model)(torch.ones(1)) for _ in range(50)], 3)
    assert len(seen) == 200
    by_thread: dict[int, list[int]] = {}
    for thread, call in seen:
        by_thread.setdefault(thread, []).append(call)
    assert list(by_thread.values()) == [[0, 1] * 50] * 2


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.product(kind=KINDS, editing={"watched": False, "edited": True})
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
