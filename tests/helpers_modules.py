"""Small modules that several folders of tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["Returns"]


class Returns(nn.Module):
    """Returns whatever its function makes of the input, or of what a linear layer of these sizes makes of it."""

    def __init__(self, make: Callable[[Any], Any], *sizes: int) -> None:
        super().__init__()
        self.make = make
        self.layer = nn.Linear(*sizes) if sizes else None

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.make(x if self.layer is None else self.layer(x))
