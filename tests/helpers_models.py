"""Tiny random Hugging Face models with a batch each, shared by tests of several folders; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["MODELS", "batch_for", "loss_of", "make", "twin_of"]

_TINY_BERT = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "num_labels": 3,
}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def _bert_classifier() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_TINY_BERT))


def _bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**_TINY_BERT))


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=31,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=31, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=4, pad_token_id=0
    )
    return transformers.MambaForCausalLM(config)


MODELS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "bert_classifier": _bert_classifier,
    "vit": _vit,
    "t5": _t5,
    "mamba": _mamba,
}


def make(name: str) -> nn.Module:
    """The model of that name, the same weights each time, in evaluation mode."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


def twin_of(name: str, model: nn.Module) -> nn.Module:
    """Another model with the weights of this one and nothing else in common."""
    twin = make(name)
    twin.load_state_dict(model.state_dict())
    return twin


def batch_for(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments for one call that returns a loss (BertModel: its hidden states)."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 31, (2, 6), generator=random)
    labels = torch.randint(0, 3, (2,), generator=random)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=random), "labels": labels}
    if name == "bert":
        return {"input_ids": ids}
    if name == "bert_classifier":
        return {"input_ids": ids, "labels": labels}
    if name == "t5":
        return {"input_ids": ids, "labels": torch.randint(2, 31, (2, 5), generator=random)}
    return {"input_ids": ids, "labels": ids}


def loss_of(output: Any) -> Tensor:
    """The loss of an output, or something to differentiate where it has none."""
    if output.get("loss") is not None:
        return output["loss"]
    return output["last_hidden_state"].square().mean() + output["pooler_output"].square().mean()
