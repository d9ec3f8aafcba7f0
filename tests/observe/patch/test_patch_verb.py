"""``patch`` itself: where it sits, how it comes off, what it says when it cannot."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers_patch import gradients, made
from torch import nn

import hookline as hl
from hookline.errors import HooklineWarning

V = torch.tensor([1.0, -2.0, 0.5, 3.0])


@pytest.mark.parametrize("on", ["forward", "forward_pre"])
def test_after_the_block_everything_is_as_before(on):
    """Outputs and gradients are equal to the bit, and no hook is left."""
    model, x = made()
    output = model(x)
    grads = gradients(model, output)
    with hl.patch(model, {"layers.#": hl.edits.steer(V), "head": hl.edits.scale(2.0)}, on=on):
        assert not torch.equal(model(x), output)
    hl.assert_no_hooks(model)
    assert torch.equal(model(x), output)
    assert all(map(torch.equal, gradients(model, model(x)), grads))


def test_a_function_can_ask_where_it_is():
    """A keyword-only ``site`` is handed over."""
    model, x = made()
    seen = []

    def note(activation, *, site):
        seen.append((site.name, site.kind.value, site.call, type(site.module).__name__))
        return activation

    with hl.patch(model, {"layers.#": note}):
        model(x)
    assert seen == [(f"layers.{index}", "forward", 0, "Layer") for index in range(3)]


def test_in_a_scope_of_its_own_a_patch_is_for_this_thread():
    """Another thread runs the model as it is."""
    model, x = made()
    plain, found = model(x), []
    with hl.patch(model, {"layers.#": hl.edits.ablate()}, scope="context"):
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
        assert not torch.equal(model(x), plain)
    assert torch.equal(found[0], plain)
    hl.assert_no_hooks(model)


# -- bad input -----------------------------------------------------------------------------------------------------


BAD = {
    "no mapping": (lambda: ["layers.0"], hl.errors.OptionError, r"takes a mapping, .*got a list"),
    "no edits": (dict, hl.errors.TargetError, "no edits: write what to do where"),
    "no such module": (
        lambda: {"layer.0": hl.edits.ablate()},
        hl.errors.NoMatchError,
        "No module matches 'layer.0'.*'layers.0'",
    ),
    "not callable": (lambda: {"head": 3}, hl.errors.HookSignatureError, "edit for 'head' is an int: give an edit"),
    "a tensor": (lambda: {"head": V}, hl.errors.HookSignatureError, r"is a Tensor: give.*replace\(tensor\)"),
    "not made": (lambda: {"head": hl.edits.ablate}, hl.errors.HookSignatureError, "is ablate without its brackets"),
    "a class": (lambda: {"head": nn.Tanh}, hl.errors.HookSignatureError, "edit for 'head' is the class Tanh: give"),
    "a whole hook": (
        lambda: {"head": lambda module, args, output: output},
        hl.errors.HookSignatureError,
        r"edit for 'head': it is called as edit\(activation\).*goes to hookline.attach",
    ),
    "not in the cache": (
        lambda: {"layers.1": hl.edits.swap({"layers.0": V, "layers.2": V})},
        hl.errors.NoMatchError,
        r"swap\(\) is to edit 'layers.1', which is not in the cache of 2 names; nearest: 'layers\.[02]'",
    ),
    "an empty cache": (
        lambda: {"head": hl.edits.mean_ablate({})},
        hl.errors.NoMatchError,
        "cache of 0 names; it is empty",
    ),
    "no tensor in the cache": (
        lambda: {"head": hl.edits.swap({"head": None})},
        hl.errors.OptionError,
        "no tensor.*output of 'head'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_said_before_anything_is_attached(case):
    """Each error names the target and what to write; of the edits beside it none stays on."""
    edits, error, message = BAD[case]
    model, _ = made()
    edits = edits()
    if isinstance(edits, dict) and edits:
        edits = {"layers.0": hl.edits.ablate(), **edits}
    with pytest.raises(error, match=message):
        hl.patch(model, edits)
    hl.assert_no_hooks(model)


MISFITS = {
    "a vector of another length": (hl.edits.steer(torch.ones(5)), r"steer\(\) was given a vector of shape \(5,\)"),
    "a vector of one": (hl.edits.steer(torch.ones(1)), r"vector of shape \(1,\)"),
    "a k that would make the batch larger": (
        hl.edits.steer(torch.ones(4), torch.ones(5, 1, 1, 1)),
        r"steer\(\) was given a factor of shape \(5, 1, 1, 1\)",
    ),
    "a tensor that is too large": (
        hl.edits.replace(torch.ones(5, 2, 3, 4)),
        r"replace\(\) .* tensor of shape \(5, 2, 3, 4\)",
    ),
    "a factor": (hl.edits.scale(torch.ones(3)), r"scale\(\) was given a factor of shape \(3,\)"),
    "another run": (
        hl.edits.swap({"layers.1": torch.ones(2, 7, 4)}),
        r"swap\(\) has a tensor of shape \(2, 7, 4\) from the",
    ),
    "another length": (hl.edits.swap({"layers.1": torch.ones(2, 1, 4)}), r"tensor of shape \(2, 1, 4\) from the"),
    "another length, in part": (
        hl.edits.swap({"layers.1": torch.ones(2, 1, 4)}, index=(slice(None), slice(1, None))),
        r"tensor of shape \(2, 1, 4\) from the",
    ),
    "None": (lambda h: None, "<lambda> returned NoneType"),
    "a tuple": (lambda h: (h,), "<lambda> returned a tuple"),
    "another shape": (lambda h: h[0], r"returned a tensor of shape \(3, 4\)"),
    "a number outside": (hl.edits.ablate(index=(0, 3)), r"index=\(0, 3\) does not fit \(index 3 is out of bounds"),
    "places outside": (hl.edits.ablate(index=[0, 9]), r"index=\[0, 9\] does not fit \(index 9 is out of bounds"),
    "too many dimensions": (hl.edits.ablate(index=(0, 0, 0, 0)), r"index=\(0, 0, 0, 0\) does not fit \(too many"),
    "a step back": (hl.edits.ablate(index=(0, slice(None, None, -1))), r"index=\(0, ::-1\) does not fit \(step must"),
    "a mask of another shape": (hl.edits.ablate(index=torch.ones(2, 2) > 0), r"mask of shape \(2, 2\)"),
    "a complex factor": (hl.edits.scale(1j), r"scale\(\) was given complex numbers"),
    "complex numbers": (hl.edits.replace(torch.ones(4) * 1j), r"replace\(\) was given complex numbers"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_said_in_the_call(case):
    """With the site, the shape or dtype that is there, the one that was given and a remedy."""
    edit, message = MISFITS[case]
    model, x = made()
    with (
        hl.patch(model, {"layers.1": edit}),
        pytest.raises(
            hl.errors.HookReturnError, match=rf"{message}.* but the output of 'layers.1' (has shape \(2, 3, 4\)|is )"
        ),
    ):
        model(x)
    hl.assert_no_hooks(model)


def test_an_index_that_selects_nothing_in_any_call_is_told() -> None:
    """An open slice may be empty in some calls, as in the one-token forwards of ``generate``, but not in all."""
    model = nn.Sequential(nn.Linear(2, 2))
    behind = hl.edits.scale(2.0, index=(slice(None), slice(5, None)))
    patched = hl.patch(model, {"0": behind})
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    with pytest.warns(HooklineWarning, match=r"selected nothing in 2 calls.*site\.step"):
        patched.remove()
    patched.remove()
    with hl.patch(model, {"0": hl.edits.scale(2.0, index=(slice(2, None),))}):
        model(torch.ones(1, 2))
        model(torch.ones(3, 2))
