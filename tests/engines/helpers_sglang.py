"""A decoder with the calls of SGLang's models: flat batches, layers that give pairs, a batch as an argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PairLayer(nn.Module):
    """A layer that gives (delta, residual), as those of SGLang do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, positions: Any, hidden: Any, forward_batch: Any, residual: Any) -> tuple[Any, Any]:
        residual = hidden if residual is None else hidden + residual
        return self.mlp(residual), residual


class FlatDecoder(nn.Module):
    """Embeds tokens, runs layers, gives logits for every token; names as in SGLang's models."""

    def __init__(self, vocabulary: int = 32, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, width)
        self.model.layers = nn.ModuleList(PairLayer(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        hidden, residual = self.model.embed_tokens(input_ids), None
        for layer in self.model.layers:
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        return nn.functional.linear(hidden + residual, self.lm_head.weight)  # never called as a module, as in SGLang


def seeded_decoder() -> FlatDecoder:
    """Return a decoder whose weights are the same each time; random streams of the test are left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FlatDecoder().eval()
