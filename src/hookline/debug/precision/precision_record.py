"""Define one line of a precision check, and the moment of a run that it carries.

`PrecisionChecker` makes a `PrecisionRecord` for each tensor, writes its text to the log and keeps it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

__all__ = ["PrecisionContext", "PrecisionRecord", "PrecisionState"]


@dataclass(slots=True)
class PrecisionState:
    """Where a run stands: micro-batch, layer, the layer's name, iteration."""

    gas: int = 0
    """The micro-batch of a gradient accumulation."""
    layer: int | None = None
    """The layer; None: the first number in the name of the module."""
    layer_name: str = ""
    iteration: int | None = None

    def text(self, layer: int | None) -> str:
        """Return the beginning of a line; ``layer`` is the one that the module's name tells."""
        number = self.layer if self.layer is not None else layer
        parts = [] if self.iteration is None else [f"[I-{self.iteration}]"]
        parts += [f"[GAS-{self.gas}]", f"[L-{0 if number is None else number}]"]
        return " ".join([*parts, self.layer_name] if self.layer_name else parts)


class PrecisionContext:
    """The state of each thread; one that has set nothing (autograd's, on CUDA) is where the last one that has is."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._last = PrecisionState()

    @property
    def state(self) -> PrecisionState:
        """The state that counts in this thread."""
        state: PrecisionState = getattr(self._of_thread, "state", self._last)
        return state

    def change(self, **values: Any) -> None:
        """Set some fields for this thread."""
        state = getattr(self._of_thread, "state", None)
        if state is None:
            state = self._of_thread.state = PrecisionState()
        for name, value in values.items():
            setattr(state, name, value)
        self._last = state


@dataclass(frozen=True, slots=True)
class PrecisionRecord:
    """One tensor, as it was checked."""

    name: str
    """The module, or ``module@function``."""
    stage: str
    """``forward`` (outputs), ``backward`` (gradients), ``forward_input`` and ``backward_input`` (of functions)."""
    index: int
    """Which call of this name and stage since the counters were reset, from 0."""
    tensor: int
    """Its place among what the call gave, from 0."""
    dtype: str
    shape: tuple[int, ...]
    numbers: str
    """``min=… max=… mean=… […]``, or ``md5=…``."""
    nan: int
    inf: int
    is_error: bool
    context: str
    """``[GAS-0] [L-3]``, before it the iteration if one is set, behind it the layer's name."""

    @property
    def stem(self) -> str:
        """The name of its file, without the ending: ``layers.0.mlp_0_forward``; of further tensors with ``_t1``, …"""
        return f"{quote(self.name, safe='@')}_{self.index}_{self.stage}" + (f"_t{self.tensor}" if self.tensor else "")

    def __str__(self) -> str:
        shape = f"({','.join(map(str, self.shape))})"
        bad = f" [NaN:{self.nan} Inf:{self.inf}]" if self.nan or self.inf else ""
        return (
            f"{self.context} {self.name}_{self.index}_{self.stage} tensor[{self.tensor}]: dtype={self.dtype} "
            f"shape={shape} {self.numbers}{bad}{' <- ERROR' if self.is_error else ''}"
        )
