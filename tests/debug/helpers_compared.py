"""Models with planted bugs, and what was captured of a run of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hookline as hl

IDS = torch.randint(1, 61, (2, 10), generator=torch.Generator().manual_seed(1))


@functools.cache
def _gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=12, n_embd=32, n_head=4, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


@functools.cache
def _llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    """A GPT-2 of 12 layers with random weights, the same each time."""
    return copy.deepcopy(_gpt2())


def llama() -> Any:
    """A Llama of 4 layers with random weights, the same each time."""
    return copy.deepcopy(_llama())


def captured(model: nn.Module, run: Callable[[Any], Any] | None = None, **options: Any) -> hl.observe.Cache:
    """What flowed through all modules in one forward, inputs included."""
    # The attention of GPT-2 in eval mode does not call its dropout.
    with hl.capture(model, "*", exclude="*.attn_dropout", inputs=True, clone=True, **options) as cache, torch.no_grad():
        model(IDS) if run is None else run(model)
    return cache
