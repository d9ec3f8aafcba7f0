"""The guilty module is found by putting the tensors of a right run into the wrong model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_compared import IDS, gpt2
from torch import Tensor, nn

import hookline as hl
from hookline.debug import bisect
from hookline.debug.compare.trace import trace
from hookline.errors import CompareError, OptionError


def _transposed() -> nn.Module:
    model = gpt2()
    weight = model.transformer.h[3].attn.c_proj.weight
    weight.data = weight.data.t().contiguous()
    return model


class MakesNaN(nn.Module):
    """An activation that is NaN in one place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.arange(x.shape[-1]) == 5, torch.nan, x)


def _with_nan() -> nn.Module:
    model = gpt2()
    model.transformer.h[7].mlp.act = MakesNaN()
    return model


@pytest.mark.slow
def test_the_guilty_module_is_found_in_log_steps_from_a_trace_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    """Bits, hooks and random streams; seven runs for 151 sites."""
    right, wrong = gpt2(), _transposed()
    with trace(right, to=tmp_path / "right", kinds="output", tensors=True, exclude="*.attn_dropout"), torch.no_grad():
        right(IDS)
    before = {name: value.clone() for name, value in wrong.state_dict().items()}
    stream = torch.get_rng_state()
    found = bisect(wrong, tmp_path / "right", IDS)
    assert found.module == "transformer.h.3.attn.c_proj"
    assert len(found.trials) <= math.ceil(math.log2(found.num_sites))
    assert {trial.is_healed for trial in found.trials} == {True, False}
    assert "found among 151 sites" in str(found)
    assert all(torch.equal(before[name], value) for name, value in wrong.state_dict().items())
    assert torch.equal(stream, torch.get_rng_state())
    hl.assert_no_hooks(wrong)


def test_a_nan_is_followed_to_its_module_and_a_function_may_run_the_model() -> None:
    """An error that is infinite halves to nothing but a healed end."""
    found = bisect(_with_nan(), gpt2(), lambda model: model(input_ids=IDS))
    assert found.module == "transformer.h.7.mlp.act"
    assert found.error == math.inf


class WrongHead(nn.Module):
    """A model whose own code adds something behind all modules."""

    def __init__(self, add: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.add  # type: ignore[no-any-return]


class Block(nn.Module):
    """Scale between two projections, by its own code."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(self.first(x))) * self.scale  # type: ignore[no-any-return]


class ScaledNet(nn.Module):
    """Call one module twice, with another between."""

    def __init__(self, *, middle: float = 1.0, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.middle, self.layers = nn.Linear(4, 4), nn.Linear(4, 4), nn.ModuleList([Block(scale)])
        self.middle.weight.data *= middle

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.shared(self.middle(torch.tanh(self.shared(x)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("wrong", "guilty"), [({"scale": 1.5}, "layers.0"), ({"middle": 1.5}, "middle")])
def test_the_guilty_call_is_found_by_a_model_and_by_a_trace(
    tmp_path: Path, wrong: dict[str, float], guilty: str
) -> None:
    """A block whose own code is wrong, and a module between two calls of another."""
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    traced = ScaledNet()
    with trace(traced, to=tmp_path / "trace", kinds="output", tensors=True), torch.no_grad():
        traced(x)
    for right in (ScaledNet(), tmp_path / "trace"):
        assert bisect(ScaledNet(**wrong), right, x).module == guilty


@pytest.mark.parametrize(
    ("right", "inputs", "says"),
    [
        (lambda: WrongHead(1.0), torch.ones(2, 3), "does not differ"),
        (lambda: {"layers.0": torch.ones(2, 3)}, torch.ones(2, 3), "no tensors of the output of the model itself"),
        (lambda: {"": torch.ones(2, 3), "h": torch.ones(2)}, torch.ones(2, 3), "belongs to a module"),
        (lambda: WrongHead(0.0), 3, "inputs as a tensor"),
    ],
)
def test_what_cannot_be_bisected_says_why(right: Any, inputs: Any, says: str) -> None:
    """Nothing differs, nothing to put in, nothing to run."""
    with pytest.raises((CompareError, OptionError), match=says):
        bisect(WrongHead(1.0), right(), inputs)
