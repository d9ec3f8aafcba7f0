"""Planted bugs are found in the right module, with nothing else blamed; rounding is called rounding."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_compared import IDS, captured, gpt2, llama
from torch import Tensor, nn

import hookline as hl
from hookline.debug import bisect
from hookline.debug.compare.compare import compare
from hookline.debug.compare.result import Comparison
from hookline.debug.compare.trace import trace
from hookline.errors import CompareError, OptionError


@functools.cache
def _reference() -> hl.observe.Cache:
    return captured(gpt2())


def _found(model: nn.Module) -> Comparison:
    return compare(_reference(), captured(model))


def _only_blamed(found: Comparison, module: str) -> None:
    """One module is blamed, and all else that differs follows from it."""
    assert [blame.module for blame in found.blamed] == [module]
    assert not found.ok
    for value in found.values:
        if not value.is_same and value is not found.first:
            assert value.follows == module
            assert value.order > found.first.order  # type: ignore[union-attr]
        else:
            assert value.follows == ""


def test_two_runs_of_one_model_do_not_differ() -> None:
    """The control of all others."""
    found = _found(gpt2())
    assert found.ok
    assert found.blame is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_of_gpt2_is_rounding(dtype: torch.dtype) -> None:
    """On all modules, inputs and outputs, without any run to measure the noise."""
    found = _found(gpt2().to(dtype))
    assert {value.verdict for value in found.values} == {"within rounding"}
    assert found.ok
    assert sum(not value.errors.is_equal for value in found.values) > 200  # there is something to judge


def test_gradients_in_bfloat16_are_rounding_too() -> None:
    def backward(model: Any) -> None:
        with torch.enable_grad():
            model(IDS).logits.float().square().mean().backward()

    runs = [captured(model, backward, grads=True) for model in (gpt2(), gpt2().bfloat16())]
    found = compare(*runs)
    assert sum(value.kind == "output_grad" for value in found.values) > 100
    assert found.ok


def _transposed() -> Any:
    model = gpt2()
    weight = model.transformer.h[3].attn.c_proj.weight
    weight.data = weight.data.t().contiguous()
    return model


def test_a_transposed_weight_is_found() -> None:
    """In fp32, and beside the rounding of bfloat16."""
    model = _transposed()
    found = _found(model)
    _only_blamed(found, "transformer.h.3.attn.c_proj")
    assert found.first is not None
    assert found.first.verdict == "wrong"
    _only_blamed(_found(model.bfloat16()), "transformer.h.3.attn.c_proj")


def test_a_wrong_epsilon_of_one_norm_is_found() -> None:
    """It changes values by some percent, which no eye sees in a print."""
    model = gpt2()
    model.transformer.h[4].ln_2.eps = 1e-4
    found = _found(model)
    _only_blamed(found, "transformer.h.4.ln_2")
    assert found.first is not None
    assert found.first.errors.rel_l2 < 0.2


class WithoutResidual(nn.Module):
    """A block that forgets what came in."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        attended: Tensor = self.attn(self.ln_1(hidden_states), attention_mask=options.get("attention_mask"))[0]
        return attended + self.mlp(self.ln_2(attended))  # type: ignore[no-any-return]


def test_a_dropped_residual_is_found_in_the_block_not_in_what_it_calls() -> None:
    """The first value that differs is the input of ``ln_2``, which the block's own code makes."""
    model = gpt2()
    model.transformer.h[6] = WithoutResidual(model.transformer.h[6])
    found = _found(model)
    _only_blamed(found, "transformer.h.6")
    assert found.first is not None
    assert (found.first.site, found.first.kind) == ("transformer.h.6.ln_2", "input")


class NaNActivation(nn.Module):
    """An activation with an operator that makes one NaN."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(x, approximate="tanh").clone()
        y[0, 3, 5] = torch.log(torch.tensor(-1.0))
        return y


def _with_nan() -> Any:
    model = gpt2()
    model.transformer.h[7].mlp.act = NaNActivation()
    return model


def test_a_nan_of_one_operator_is_found_in_its_module() -> None:
    """With the place of the first."""
    model = _with_nan()
    found = _found(model)
    _only_blamed(found, "transformer.h.7.mlp.act")
    assert found.first is not None
    assert found.first.where == "[0, 3, 5]"
    assert (found.first.errors.bad_a, found.first.errors.bad_b) == (0, 1)


def test_an_overflow_of_float16_is_found() -> None:
    """Weights that float32 takes and float16 does not; all before it is rounding."""
    models = [gpt2(), gpt2().half()]
    for model in models:
        model.transformer.h[5].mlp.c_fc.weight.data *= 1e2
        model.transformer.h[5].mlp.c_proj.weight.data *= 1e6
    found = compare(*map(captured, models))
    assert found.first is not None
    assert found.first.errors.bad_b > 0
    assert found.first.errors.bad_a == 0
    _only_blamed(found, "transformer.h.5.mlp.c_proj")


def _decode(model: Any) -> None:
    """A prefill of seven tokens, then three tokens one by one."""
    past = model(IDS[:, :7], use_cache=True).past_key_values
    for place in range(7, 10):
        past = model(IDS[:, place : place + 1], past_key_values=past, use_cache=True).past_key_values


def test_a_wrong_rotary_offset_in_decode_is_found_in_its_module_and_step() -> None:
    """The prefill is right; the first token that is decoded is not."""
    model = llama()
    rotary = model.model.rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(x, position_ids + (position_ids.shape[-1] == 1))
    found = compare(captured(llama(), _decode), captured(model, _decode))
    _only_blamed(found, "model.rotary_emb")
    assert found.first is not None
    assert found.first.step == 1


def test_other_inputs_are_blamed_on_the_inputs() -> None:
    """No module is at fault if the runs were given other tokens."""
    found = compare(_reference(), captured(gpt2(), lambda model: model(IDS + 1 - 2 * (IDS == 60).long())))
    assert found.blamed[0].is_input
    assert "other inputs" in found.summary


def test_measured_noise_tells_a_small_bug_from_rounding_where_the_model_of_noise_cannot() -> None:
    """A float64 run is the noise floor: an error of ten times that is told, with how many times it is."""
    exact = captured(gpt2().double())
    model = gpt2()
    assert compare(_reference(), captured(model), noise=exact).ok
    norm = model.transformer.h[2].ln_1
    norm.weight.data *= 1 + 4e-6  # about ten times the rounding of float32
    unsure = _found(model)
    found = compare(_reference(), captured(model), noise=[exact])
    _only_blamed(found, "transformer.h.2.ln_1")
    assert found.first is not None
    assert found.first.verdict.startswith("worse than rounding by ")
    assert found.first.floor < next(value.floor for value in unsure.values if value.order == found.first.order)


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
