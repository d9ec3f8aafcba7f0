"""What a tracker is: it takes tensors in, component by component, and gives numbers out.

Fed by the hooks that ``hookline.metta.builders`` makes, asked and emptied at the end of each epoch by `StatsReporter`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Tracker"]


@runtime_checkable
class Tracker(Protocol):
    """Keeps count of something for named components; ``isinstance`` asks for the three methods.

    Recipe::

        class LargestOutput:
            def __init__(self):
                self.largest = {}

            def update(self, component, tensor):
                self.largest[component] = tensor.detach().max()

            def to_metrics(self):
                return {f"largest/{name}": value.item() for name, value in self.largest.items()}

            def reset(self):
                self.largest.clear()
    """

    def update(self, component: str, tensor: Any, /) -> None:
        """Take in what one pass showed of a component."""

    def to_metrics(self) -> dict[str, float]:
        """Everything since the last reset, as numbers by name."""

    def reset(self) -> None:
        """Start anew; the components stay known, so that hooks that are on go on counting."""
