"""Arguments in the wrong order: the error says the right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl


def hook(*args: object) -> None:
    """Does nothing."""


def make_model() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize(
    ("target", "written"),
    [
        ("0", "'0'"),
        (["0", "1"], "['0', '1']"),
        (nn.Linear, "Linear"),
        ((nn.Linear, nn.ReLU), "[Linear, ReLU]"),
        (re.compile("0"), "re.compile('0')"),
    ],
)
@pytest.mark.parametrize("given", [hook, lambda module, args, output: None], ids=["function", "lambda"])
def test_a_hook_before_its_target(target: Any, written: str, given: Callable[..., None]) -> None:
    """attach(model, hook, "0") is told as attach(model, "0", hook), and nothing is attached."""
    model = make_model()
    with pytest.raises(hl.errors.HookSignatureError) as error:
        hl.attach(model, given, target)
    assert str(error.value) == f"The arguments are swapped: write attach(model, {written}, hook)."
    hl.assert_no_hooks(model)


MODEL_FIRST = "The arguments are swapped: the model comes first."


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hl.attach("0", make_model(), hook), MODEL_FIRST),
        (lambda: hl.attach(hook, make_model()), MODEL_FIRST),
        (lambda: hl.watch("0", make_model()), MODEL_FIRST),
        (lambda: hl.capture("0", make_model()), MODEL_FIRST),
        (lambda: hl.patch({"0": hl.edits.ablate()}, make_model()), MODEL_FIRST),
        (lambda: hl.attach_function(hook, "aten.mm"), "write attach_function('aten.mm', hook)."),
        (lambda: hl.attach_tensor(hook, torch.ones(1)), "write attach_tensor(tensor, hook)."),
        (
            lambda: hl.attach_optimizer(hook, torch.optim.SGD([nn.Parameter(torch.ones(1))])),
            "write attach_optimizer(optimizer, hook).",
        ),
    ],
)
def test_every_verb_says_that_its_arguments_are_swapped(call: Callable[[], Any], said: str) -> None:
    """What should come first is named, or the call is written out."""
    with pytest.raises(hl.HooklineError, match="The arguments are swapped") as error:
        call()
    assert str(error.value).endswith(said)
