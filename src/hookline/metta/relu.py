"""How often the units behind a ReLU are on.

Fed with activations by ``attach_relu_activation_hooks``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.metta.counting import CountingTracker
from hookline.metta.tracked_components import UnitOptions

__all__ = ["ReLUActivationState"]


class ReLUActivationState(CountingTracker[UnitOptions]):
    """By unit, the share of samples in which the activation is above zero: a dead unit has 0.

    Recipe::

        state = hookline.metta.ReLUActivationState()
        state.update("actor_mlp", torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 3.0]]))
        state.to_metrics()  # {"activations/relu/actor_mlp/0": 1.0, ".../1": 0.0, ".../2": 0.5}

    Args:
        unit_dim: The dimension whose entries are the units. Unless given, it is the last of (B, F) and (B, T, F), and
            the channels of (N, C, H, W); everything else is samples. One dimension alone is one sample.
    """

    def __init__(self, *, unit_dim: int | None = None) -> None:
        super().__init__(UnitOptions(unit_dim))

    def register_component(self, component: str, *, unit_dim: int | None = None, extractor: Any = None) -> None:
        """Make a component known, and what is special about it; other options than it has are an error."""
        self._register(component, unit_dim=unit_dim, extractor=extractor)

    def to_metrics(self) -> dict[str, float]:
        """``activations/relu/{component}/{unit}`` for every unit that was seen since the last reset."""
        return {
            f"activations/relu/{component}/{unit}": active / total
            for component, hits, totals in self._results()
            for unit, (active, total) in enumerate(zip(hits, totals, strict=True))
        }

    def _marks(self, tensor: Tensor, options: UnitOptions) -> Tensor:
        return tensor > 0
