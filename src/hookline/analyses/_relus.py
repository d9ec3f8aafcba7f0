"""What ``relu_activations`` and ``relu_gradient_flow`` share: which layers they are about, and sums over all units.

Both count by unit how often something happened, and a unit of which it never did is the news.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from hookline.analyses._tracked import Tracked

__all__ = ["OnReLUs"]


class OnReLUs(Tracked):
    """A tracker of units behind ReLUs."""

    looks_for = "nn.ReLU, nn.ReLU6 or nn.LeakyReLU"
    happens: ClassVar[str]
    """What is counted; ``"{happens}_fraction"`` is its mean over units."""
    never: ClassVar[str]
    """What a unit is called of which it never happened."""

    def __init__(self, targets: str | None = None, exclude: str | None = None, per_unit: bool = True) -> None:
        super().__init__(targets, exclude, per_unit)

    def is_wanted(self, module: nn.Module) -> bool:
        """ReLUs."""
        return isinstance(module, nn.ReLU | nn.ReLU6 | nn.LeakyReLU)

    def is_of_unit(self, name: str) -> bool:
        """All of them are."""
        return True

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Over all units."""
        values = list(metrics.values())
        never = sum(value == 0 for value in values)
        return {
            f"{self.happens}_fraction": sum(values) / len(values),
            f"{self.never}_units": never,
            f"{self.never}_fraction": never / len(values),
        }
