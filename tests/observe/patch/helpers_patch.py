"""Small models whose parts can be edited by hand, for the tests of patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A linear map and a nonlinearity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mlp(x))


class Stack(nn.Module):
    """Layers one after the other, each of which can be given an edit written by hand."""

    def __init__(self, depth: int = 3, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, edit: Callable[[Tensor], Tensor] | None = None, at: int = 1) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if edit is not None and index == at:
                x = edit(x)
        return self.head(x)


class Twice(nn.Module):
    """Calls one layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)))


def made(kind: Callable[..., nn.Module] = Stack, *args: Any) -> tuple[Any, Tensor]:
    """A model with the same weights each time, and an input, (2, 3, 4)."""
    torch.manual_seed(0)
    return kind(*args), torch.randn(2, 3, 4)


def gradients(model: nn.Module, output: Tensor) -> list[Tensor | None]:
    """The gradients of all parameters."""
    parameters = list(model.parameters())
    return list(torch.autograd.grad(output.square().sum(), parameters, allow_unused=True))


def by_hand(model: Stack, x: Tensor, edit: Callable[[Tensor], Tensor], at: int = 1) -> tuple[Tensor, list[Any]]:
    """Output and gradients of the model with the edit written into it."""
    output = model(x, edit, at)
    return output, gradients(model, output)
