"""What a captured value is worth: never wrong numbers, parts, types, devices, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers_modules import Returns
from torch import nn

import hookline as hl
from hookline.errors import CaptureError

X = torch.linspace(-1, 1, 24).reshape(2, 4, 3)


def with_relu() -> nn.Sequential:
    """A layer whose output is overwritten by the next."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))


def both() -> Returns:
    """Returns a tensor with dimensions, one without, and numbers of other kinds."""
    return Returns(lambda x: {"hidden": x * 2, "loss": x.sum(), "ids": x.argmax(-1), "none": None})


# -- changed in place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"detach": True}, {"inputs": True}])
def test_an_output_that_is_overwritten_is_an_error_when_read(options):
    """It names the site, the shape and the remedy; the other site is fine."""
    model = with_relu()
    with hl.capture(model, "#", **options) as cache:
        model(X)
    message = r"The output of '0', shape \(2, 4, 3\), was changed in place.*clone=True"
    with pytest.raises(CaptureError, match=message):
        cache["0"].output
    assert (cache["1"].output >= 0).all()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_clone_is_what_flowed(mode):
    """Whatever happens to the tensor afterwards; in inference mode also without asking."""
    model = with_relu()
    with mode():
        expected = model[0](X)
        with hl.capture(model, "0", clone=mode is not torch.inference_mode) as cache:
            model(X)
        assert torch.equal(cache["0"].output, expected)
        assert (cache["0"].output < 0).any()


def test_an_input_that_the_module_overwrites_is_noticed():
    """Inputs are taken before the forward, so a clone is what went in, and a reference is known to be changed."""
    model = with_relu()
    with hl.capture(model, "1", inputs=True) as cache:
        model(X)
    with pytest.raises(CaptureError, match=r"The input of '1', shape \(2, 4, 3\), was changed in place"):
        cache["1"].inputs
    with hl.capture(model, "1", inputs=True, clone=True) as cache:
        model(X)
    assert torch.equal(cache["1"].inputs[0], model[0](X))


# -- graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"clone": True}, {"index": 0}, {"index": torch.Tensor.double}])
def test_captures_can_be_differentiated(options):
    """By default the graph is kept, through copies, parts and casts too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with hl.capture(model, "0", **options) as cache:
        model(X)
    cache["0"].output.sum().backward()
    rows = 4 if options.get("index") == 0 else 8
    assert torch.equal(model[0].bias.grad, torch.full((3,), float(rows)))


# -- parts ---------------------------------------------------------------------------------------------------

INDICES: dict[str, Any] = {
    "int": 0,
    "negative": -1,
    "slice": slice(1, None),
    "last token": (slice(None), -1),
    "ellipsis": (..., 0),
    "list": [0, 0, 1],
    "tensor": torch.tensor([1, 0]),
    "a number of NumPy": np.int64(1),
    "range": range(1),
    "array": (slice(None), np.array([0, 2])),
    "mask of NumPy": np.array([True, False]),
    "new dimension": (0, None),
    "int32": (slice(None), torch.tensor([1], dtype=torch.int32)),
    "function": lambda tensor: tensor.amax(0),
    "function that gives a view": lambda tensor: tensor[..., :1],
    "function that gives all": lambda tensor: tensor,
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_part_is_kept_in_memory_of_its_own(index, mode):
    """The whole tensor is let go, and what is done to it later does not reach the part."""
    model = nn.Sequential(both(), nn.Identity())
    with mode(), hl.capture(model, "0", index=index) as cache:
        whole = model(X)["hidden"]
        brackets = [0] if isinstance(index, range) else index  # which torch takes for no index
        expected = (index(whole) if callable(index) else whole[brackets]).clone()
        whole.zero_()
    kept = cache["0"].output["hidden"]
    assert torch.equal(kept, expected)
    assert kept.untyped_storage().nbytes() == kept.numel() * 4
