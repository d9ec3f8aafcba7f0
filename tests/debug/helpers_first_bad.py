"""A small transformer of twelve layers in which one operator can be made to fail, and its training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 11
LAYERS = 12


class Gate(nn.Module):
    """Passes on what it is given, through the planted operator while there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.planted: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.planted is None else self.planted(x)


class Block(nn.Module):
    """Attention with a mask of minus infinity, a feed-forward part, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = nn.Linear(width, 2 * width), Gate(), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        hidden = torch.ones(y.shape[-2], y.shape[-2], device=y.device).triu(1).bool()
        scores = (y @ y.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        y = scores.softmax(-1) @ y
        return x + self.dropout(self.down(self.gate(F.gelu(self.up(y)))))


class Planted(nn.Module):
    """The model."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def log_of_negative(x: Tensor) -> Tensor:
    """NaN in the forward: the logarithm of negative numbers."""
    return (x - x.detach().amin() - 1e-3).log() + x


def root_of_zero(x: Tensor) -> Tensor:
    """Infinity in the backward alone: the slope of the root at zero."""
    return (x * 0).abs().sqrt() + x


def half_overflow(x: Tensor) -> Tensor:
    """More than a float16 can hold, from numbers that it can."""
    return (x.half().clamp(-8, 8).add(1) * 60000).float() * 0 + x


def bfloat_overflow(x: Tensor) -> Tensor:
    """More than a bfloat16 can hold."""
    return (x.bfloat16().add(2) * 3e38).float() * 0 + x


class Run:
    """The model with its optimizer; ``bad[ids]`` is what is planted in the gate of layer ``at`` for that batch."""

    def __init__(
        self, planted: Callable[[Tensor], Tensor] | None = None, *, at: int = 7, when: int = 2, device: str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        self.model = Planted().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.planted, self.at, self.when = planted, at, when
        tokens = [torch.randint(0, VOCABULARY, (2, 6)).to(device) for _ in range(4)]
        self.data = [{"tokens": each, "ids": [i, 100 + i]} for i, each in enumerate(tokens)]

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        self.model.layers[self.at].gate.planted = self.planted if batch["ids"][0] == self.when else None
        logits = model(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())

    def step(self, batch: dict[str, Any]) -> Tensor:
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def stepping(model: nn.Module, of_loss: Callable[[Tensor], Tensor] = lambda loss: loss) -> tuple[Any, Any]:
    """Return an optimizer, and a step of it with the mean of what the model gives as its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = of_loss(model(x).mean())
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, step
