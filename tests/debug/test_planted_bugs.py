"""Planted bugs are found in the right module, with nothing else blamed; rounding is called rounding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers_compared import IDS, captured, gpt2, llama
from torch import Tensor, nn

import hookline as hl
from hookline.debug.compare.compare import compare
from hookline.debug.compare.result import Comparison


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
    """Of every module's output."""

    def backward(model: Any) -> None:
        with torch.enable_grad():
            model(IDS).logits.float().square().mean().backward()

    runs = [captured(model, backward, grads=True) for model in (gpt2(), gpt2().bfloat16())]
    found = compare(*runs)
    assert sum(value.kind == "output_grad" for value in found.values) > 100
    assert found.ok


def test_a_transposed_weight_is_found() -> None:
    """In fp32, and beside the rounding of bfloat16."""
    model = gpt2()
    weight = model.transformer.h[3].attn.c_proj.weight
    weight.data = weight.data.t().contiguous()
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


def test_a_nan_of_one_operator_is_found_in_its_module() -> None:
    """With the place of the first."""
    model = gpt2()
    model.transformer.h[7].mlp.act = NaNActivation()
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
