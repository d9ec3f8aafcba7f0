"""The cache of a capture: how it prints, and what it holds."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
from helpers_capture import X, stack

import hookline as hl


def test_the_cache_prints_as_a_table_and_counts_bytes():
    """Name, shape, type, calls, size; a tensor captured in two places counts once."""
    model = stack()
    with hl.capture(model, "*") as cache:
        assert str(cache) == "Cache of 4 modules, none captured yet"
        assert repr(cache) == f"{cache}\nhooks: on, .remove() takes it off"
        model(X)
    assert repr(cache) == f"{cache}\nhooks: off"
    assert str(cache).splitlines() == [
        "name         output  dtype    calls  size",
        "───────────  ──────  ───────  ─────  ────",
        "a            (2, 4)  float32      1  32 B",
        "b            (2, 4)  float32      1  32 B",
        "c            (2, 2)  float32      1  16 B",
        "(the model)  (2, 2)  float32      1  16 B",
        "4 modules, 4 calls, 80 B",
    ]
    assert cache.bytes == 80
    assert repr(cache["a"]) == "<Captured 'a', 1 call>"
    assert repr(cache["a"].calls[0]) == "<CapturedCall 'a', step 0, call 0>"


def test_neither_cache_nor_hooks_keep_the_model_alive():
    """A capture that is on ends with its model."""
    model = stack()
    cache = hl.capture(model, "*", detach=True, inputs=True, grads=True)
    model(X)
    gone = weakref.ref(model.a)
    del model
    gc.collect()
    assert gone() is None
    assert cache["a"].output.shape == (2, 4)
    cache.remove(quiet=True)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_cache_is_not_copied(way):
    """Neither as a value of something else; a copy would end the capture."""
    model = stack()
    with hl.capture(model, "a") as cache:
        with pytest.raises(hl.errors.CaptureError, match=r"torch\.save"):
            way(cache)
        model(X)
    assert cache.names == ("a",)
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(hl.errors.CaptureError, match=r"torch\.save"):
            copies(cache["a"])
