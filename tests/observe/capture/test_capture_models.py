"""Captures of Hugging Face models: generation token by token, ModelOutputs, keyword arguments, autocast."""

from __future__ import annotations

import pytest
import torch
from helpers_models import make
from torch import nn

import hookline as hl
from hookline.errors import CaptureError


@pytest.fixture
def gpt2() -> nn.Module:
    return make("gpt2")


TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def test_block_outputs_are_the_hidden_states_that_the_model_reports(gpt2):
    """All but the last, which the model reports behind its norm."""
    with torch.no_grad(), hl.capture(gpt2, "transformer.h.#") as cache:
        states = gpt2(TOKENS, output_hidden_states=True).hidden_states
    assert cache.names == tuple(f"transformer.h.{index}" for index in range(3))
    for index in range(2):
        assert torch.equal(cache[f"transformer.h.{index}"].output, states[index + 1])
    assert torch.equal(gpt2.transformer.ln_f(cache["transformer.h.2"].output), states[3])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_has_one_step_per_token(gpt2, mode):
    """With the key-value cache the first step has the whole prompt, each later one its token."""
    with mode(), hl.capture(gpt2, "transformer.h.1") as cache:
        tokens = gpt2.generate(TOKENS, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    calls = cache["transformer.h.1"].calls
    assert [(call.step, call.call) for call in calls] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [call.output.shape[1] for call in calls] == [5, 1, 1, 1]
    with torch.no_grad(), hl.capture(gpt2, "transformer.h.1") as whole:
        gpt2(tokens[:, :-1])
    pieced = torch.cat([call.output for call in calls], dim=1)
    torch.testing.assert_close(pieced, whole["transformer.h.1"].output)
    with pytest.raises(CaptureError, match="called 4 times in 4 forwards of the model"):
        cache["transformer.h.1"].output


@pytest.mark.parametrize("clone", [False, True])
def test_model_outputs_keep_their_class_and_their_gradients(gpt2, clone):
    """Attributes and keys agree; what is no tensor is None in the gradient."""
    with hl.capture(gpt2, ["", "transformer", "lm_head"], grads=True, inputs=True, clone=clone) as cache:
        given = gpt2(TOKENS, labels=TOKENS)
        given.loss.backward()
    kept = cache[""].output
    assert type(kept) is type(given)
    assert torch.equal(kept.logits, given["logits"])
    assert (kept.logits.data_ptr() == given.logits.data_ptr()) is not clone
    assert kept["logits"] is kept.logits
    assert torch.equal(cache[""].kwargs["labels"], TOKENS)
    grad = cache["transformer"].grad.last_hidden_state
    torch.testing.assert_close(grad, cache["lm_head"].grad @ gpt2.lm_head.weight)
    assert cache[""].grad.loss.item() == 1.0
    assert cache[""].grad.logits is None  # they are used inside; from outside came nothing
    assert cache["transformer"].grad.past_key_values is None
