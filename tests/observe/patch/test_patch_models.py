"""Edits of Hugging Face models: blocks that return what they like, generation, compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers_models import MODELS, build
from torch import Tensor

import hookline as hl

LAST = (slice(None), -1)
_BERT = functools.partial(build, "bert_language", num_hidden_layers=3)
BLOCKS = {
    "gpt2": (MODELS["gpt2"], "transformer.h.#", "transformer.h.1"),
    "llama": (MODELS["llama"], "model.layers.#", "model.layers.1"),
    "bert": (_BERT, "bert.encoder.layer.#", "bert.encoder.layer.1"),
}


def _made(name: str) -> tuple[Any, Tensor, str]:
    torch.manual_seed(0)
    make, _, block = BLOCKS[name]
    return make().eval(), torch.randint(2, 31, (2, 6)), block


@pytest.mark.parametrize("on", ["forward", "forward_pre"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_patched_with_another_run(name, on):
    """With a block's whole activation from the clean run, the logits are the clean ones."""
    model, clean, block = _made(name)
    corrupted = clean.flip(1)
    with torch.no_grad():
        with hl.capture(model, BLOCKS[name][1], inputs=True) as cache:
            expected = model(clean).logits
        with hl.patch(model, {block: hl.edits.swap(cache)}, on=on):
            assert torch.equal(model(corrupted).logits, expected)
        assert not torch.equal(model(corrupted).logits, expected)


def test_the_logits_of_a_model_output_are_edited():
    """The loss beside them is not: it is one number."""
    model, ids, _ = _made("gpt2")
    plain = model(ids, labels=ids)
    with hl.patch(model, {"": hl.edits.scale(2.0)}):
        found = model(ids, labels=ids)
    assert type(found) is type(plain)
    assert torch.equal(found.logits, plain.logits * 2)
    assert torch.equal(found.loss, plain.loss)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_generated_token_is_steered(name):
    """The last position is all there is in a cached step; the tokens are those of steering without a cache."""
    model, ids, block = _made(name)
    vector = torch.randn(16) * 5
    with hl.patch(model, {block: hl.edits.steer(vector, index=LAST)}) as patched:
        found = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert patched.report()[0].fired == 5
    plain = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert not torch.equal(found, plain)
    # By hand: what the cache holds of a steered position stays steered, so steer all from the prompt's last on.
    expected, start = ids, ids.shape[1] - 1
    with torch.no_grad():
        for _ in range(5):
            with hl.patch(model, {block: hl.edits.steer(vector, index=(slice(None), slice(start, None)))}):
                logits = model(expected, use_cache=False).logits[:, -1]
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, expected)
