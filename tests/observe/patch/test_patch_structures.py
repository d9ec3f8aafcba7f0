"""The tensor that is edited, and what is around it: outputs and inputs of any make, eager and compiled."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers_modules import Returns
from helpers_patch import made
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

import hookline as hl
from hookline.observe.patching import rebuilt
from hookline.tree import main_tensor

Pair = namedtuple("Pair", "note hidden")


@dataclass
class Record:
    """A dataclass."""

    count: int
    hidden: Tensor


@dataclass(frozen=True)
class Frozen:
    """One that cannot be changed."""

    hidden: Tensor
    count: int = 1


class Named(tuple[Any, ...]):
    """A tuple of somebody's own."""


class Listed(list[Any]):
    """A list of somebody's own."""


STRUCTURES = {
    "a tensor": lambda h: h,
    "a tuple": lambda h: (h, None, 3),
    "a list": lambda h: [h, 3],
    "a dict": lambda h: {"count": 3, "hidden": h},
    "an OrderedDict": lambda h: OrderedDict(count=3, hidden=h),
    "a named tuple": lambda h: Pair("note", h),
    "a dataclass": lambda h: Record(3, h),
    "a ModelOutput": lambda h: CausalLMOutputWithPast(loss=h.sum(), logits=h),
    "a nested one": lambda h: {"a": [(torch.ones(3).long(), h), 2], "b": None},
}
EAGER = {
    "a frozen dataclass": lambda h: Frozen(h),
    "a mapping of its own": lambda h: UserDict(hidden=h, count=3),
    "a tuple of its own": lambda h: Named((h, 2)),
    "a list of its own": lambda h: Listed([h, 2]),
    "what torch.max returns": lambda h: torch.max(h, -1),
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """The compiler starts anew."""
    torch._dynamo.reset()


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict | UserDict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, Record | Frozen):
        return _flat(list(vars(value).values()))
    return [value]


def _alike(one: Any, other: Any) -> bool:
    same = [
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(_flat(one), _flat(other), strict=True)
    ]
    return type(one) is type(other) and all(same)


@pytest.mark.parametrize("name", [*STRUCTURES, *EAGER])
def test_the_main_tensor_is_edited_and_the_structure_kept(name):
    """What comes out is of the same type, with everything else in it as it was."""
    model, x = made(Returns, {**STRUCTURES, **EAGER}[name], 4, 4)
    plain = model(x)
    with hl.patch(model, {"": hl.edits.scale(2.0)}):
        found = model(x)
    assert not _alike(found, plain)
    main = main_tensor(plain)
    assert _alike(found, rebuilt(plain, main, main * 2, ""))


def test_who_keeps_the_structure_is_not_surprised():
    """Containers on the way to the tensor are copied; those beside it are handed on as they are."""
    kept: dict[str, Any] = {"aside": [1, 2]}

    def wrap(h: Tensor) -> dict[str, Any]:
        kept["inner"] = {"hidden": h}
        return kept

    model, x = made(Returns, wrap, 4, 4)
    with hl.patch(model, {"": hl.edits.ablate()}):
        found = model(x)
    assert kept["inner"]["hidden"].any()
    assert not found["inner"]["hidden"].any()
    assert found["aside"] is kept["aside"]


# -- inputs --------------------------------------------------------------------------------------------------------


class Takes(nn.Module):
    """A block that takes its input like one of transformers."""

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, extra: Any = None) -> Tensor:
        found = hidden_states * 2
        return found if mask is None else found + mask


class Calls(nn.Module):
    """Calls it the way it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block = Takes()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(2, 3, 4) * 100
        if self.how == "by position":
            return self.block(x, mask)
        if self.how == "by keyword":
            return self.block(hidden_states=x, mask=mask)
        if self.how == "mask first":
            return self.block(mask=mask, hidden_states=x)
        return self.block(x, mask=mask, extra={"n": 1})


HOWS = ("by position", "by keyword", "mask first", "both")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_inputs_are_edited_however_they_are_given(how, compiled):
    """By position or by keyword, ``hidden_states`` before a mask; the others are untouched."""
    model, x = made(Calls, how)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with hl.patch(model, {"block": hl.edits.ablate(1.0)}, on="forward_pre"):
        assert torch.equal(run(x), torch.full((2, 3, 4), 102.0))
    assert torch.equal(run(x), x * 2 + 100)


def test_an_edit_of_the_input_is_one_of_the_output_before_it():
    """Values and gradients: patching what goes into a layer is patching what came out of the one before."""
    model, x = made()
    results = []
    for target, on in (("layers.1", "forward"), ("layers.2", "forward_pre")):
        model.zero_grad()
        with hl.patch(model, {target: hl.edits.scale(3.0, index=(..., 0))}, on=on):
            output = model(x)
            output.sum().backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))
