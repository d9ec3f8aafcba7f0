"""The cache of a capture: how it prints, what it holds, and its copies."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers_capture import X, stack
from torch import nn

import hookline as hl
from hookline.errors import CaptureError


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


class _Pair(nn.Module):
    """Returns whole numbers first, then two matrices of real ones."""

    def forward(self, x):
        return {"places": x.long(), "main": x * 2, "weights": x.softmax(-1)}


def test_the_main_tensor_of_an_output_is_what_a_patch_edits():
    """Of a tuple or dict the first of real numbers; the table says which is shown, a notebook draws the others too."""
    model = nn.Sequential(nn.Linear(3, 4), _Pair())
    edited = []
    with hl.patch(model, {"1": lambda main: edited.append(main) or main}), hl.capture(model, "*") as cache:
        model(X)
    assert cache["1"].tensor is cache["1"].output["main"]
    assert torch.equal(cache["1"].tensor, edited[0])
    assert cache["0"].tensor is cache["0"].output
    assert cache["1"].calls[0].tensor is cache["1"].tensor
    row, *_, foot = [line for line in str(cache).splitlines() if line.startswith(("1 ", "+1"))]
    assert "(2, 4) +2  float32" in row
    assert foot == "+1: .output has one more tensor; the one whose shape is shown is .tensor"
    drawn = cache["1"]._repr_html_()
    assert "output[main]" in drawn
    assert "output[weights]" in drawn
    assert "output[" not in cache["0"]._repr_html_()


def test_an_output_without_a_tensor_and_a_number_for_a_name_say_what_to_write():
    """Errors in the place of None and of a list of names near '0'."""
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0") as cache:
        model("text")
        assert str(cache).endswith("1 module, 1 call, 0 B")
    with pytest.raises(CaptureError, match="'0' is a str with no tensor in it"):
        _ = cache["0"].tensor
    with pytest.raises(hl.errors.NoMatchError, match=r"cache\[cache.names\[0\]\]"):
        _ = cache[0]


def test_clear_forgets_and_goes_on():
    """The hooks stay on, and order starts anew."""
    model = stack()
    with hl.capture(model, ["a", "b"]) as cache:
        model(X)
        first = cache["a"].output
        cache.clear()
        assert len(cache) == 0
        assert cache.bytes == 0
        model(X)
    assert cache["a"].output is not first
    assert cache["a"].calls[0].step == 1


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["copy", "deep", "pickle"],
)
def test_a_copied_or_pickled_cache_holds_what_was_captured(copied):
    """Values, gradients, inputs and order; it captures no more."""
    model = stack()
    with hl.capture(model, ("*",), inputs=True, grads=True) as cache:
        model(X).sum().backward()
        twin = copied({"the": cache})["the"] if copied is copy.deepcopy else copied(cache)
        model(X)
    assert twin.names == cache.names
    for name in twin:
        (call,), first = twin[name].calls, cache[name].calls[0]
        assert (call.step, call.call) == (first.step, first.call)
        for one, other in ((call.output, first.output), (call.inputs[0], first.inputs[0]), (call.grad, first.grad)):
            assert torch.equal(one, other)
            assert one is not other
            assert (one.data_ptr() == other.data_ptr()) == (copied is copy.copy)
    with pytest.raises(CaptureError, match="closed"):
        twin.__enter__()


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
