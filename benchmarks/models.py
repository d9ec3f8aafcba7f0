"""The models that are measured, with no dependency beyond torch.

Takes a shape, hands modules to the rows. `GPT` has the modules of GPT-2 under GPT-2's own names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "SMALL", "TINY", "Shape", "tokens_for"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a GPT-2, and of what is fed to it."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.name}: {self.layers} layers, d {self.width}, seq {self.length}, batch {self.batch}"


TINY = Shape("tiny GPT-2", 12, 16, 2, 256, 1, 8)
"""So small that a forward is all Python and dispatch: what a hook costs shows."""

SMALL = Shape("GPT-2 small", 12, 768, 12, 50304, 8, 1024)
"""What people train, for the GPU."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D / H)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, d)))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 from tokens to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.length, shape.width)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(places))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def tokens_for(shape: Shape, device: torch.device) -> Tensor:
    """A batch of the shape."""
    return torch.randint(shape.vocabulary, (shape.batch, shape.length), device=device)
