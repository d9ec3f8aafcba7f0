"""The models of random training programs, each with what makes a batch for it; `programs.py` draws from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "Made", "Swish"]


@dataclass(frozen=True)
class Made:
    """How to make a model, and a batch of its inputs."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]] = lambda: (torch.randn(6, 8),)


class Twice(nn.Module):
    """Calls one layer twice, and writes its own input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).relu_()
        return self.drop(self.layer(x))


class Tied(nn.Module):
    """An embedding whose weight is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


class Recurrent(nn.Module):
    """A recurrent layer, which returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.unsqueeze(1))[0][:, -1])


class Recomputed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Branches(nn.Module):
    """Experts of which the input chooses, so that some get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen = int(scores.mean(0).argmax())
        return self.experts[chosen](x) * scores[:, chosen : chosen + 1]


class Swish(torch.autograd.Function):
    """A function of the program's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        return grad * (gate + x * gate * (1 - gate))


class Own(nn.Module):
    """Uses its input four times, in place too, behind a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.drop = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + torch.tanh(self.mix(x)) * torch.softmax(x @ self.mix.weight, dim=-1)
        x = torch.cat(Swish.apply(self.drop(x)).split(2, dim=-1), -1) * 2
        x += x.mean() * 0.1
        return x


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 4))


def _pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


MODELS: dict[str, Made] = {
    "norms": Made(_norms),
    "pictures": Made(_pictures, lambda: (torch.randn(4, 1, 8, 8),)),
    "attention": Made(_attention, lambda: (torch.randn(2, 5, 8),)),
    "twice": Made(Twice),
    "tied": Made(Tied, lambda: (torch.randint(11, (3, 4)),)),
    "recurrent": Made(Recurrent),
    "recomputed": Made(Recomputed),
    "branches": Made(Branches),
    "own function": Made(Own),
    "weight norm": Made(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh())),
}
