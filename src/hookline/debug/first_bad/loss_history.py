"""Tell whether a loss is a spike or a new best, by the losses before it.

`FlightRecorder` and `on_trigger` ask it once for each loss that has arrived.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from hookline.errors import OptionError

__all__ = ["LossHistory"]

_KEPT: Final = 32
_LEAST: Final = 8
"""Losses that are known before one can be a spike."""


class LossHistory:
    """The last losses; ``spike`` is how many times their median makes a spike."""

    def __init__(self, spike: float) -> None:
        if not spike > 1:
            raise OptionError(f"spike= is how many times the usual loss makes a spike, 3 for instance; got {spike!r}.")
        self._spike = spike
        self._losses: deque[float] = deque(maxlen=_KEPT)
        self._best = math.inf

    def add(self, loss: float | None) -> tuple[bool, bool]:
        """Add a loss; return whether it is a spike, and whether it is the smallest so far (the first is not)."""
        if loss is None or not math.isfinite(loss):
            return False, False
        usual = statistics.median(self._losses) if len(self._losses) >= _LEAST else math.inf
        is_spike = usual > 0 and loss > self._spike * usual
        is_best = loss < self._best < math.inf
        self._best = min(self._best, loss)
        if not is_spike:
            self._losses.append(loss)
        return is_spike, is_best

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {"losses": list(self._losses), "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._losses = deque(state["losses"], maxlen=_KEPT)
        self._best = state["best"]
