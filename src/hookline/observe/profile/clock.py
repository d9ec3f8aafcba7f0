"""Taking the time on a CPU or a GPU, without making either wait.

Hands marks to ``profile`` and, when the run is over, the moments they stand for. On a GPU a mark is an event in the
stream, so what is measured is when the device came by, not when Python did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for"]


class Clock(Protocol):
    """Marks moments now, tells times later."""

    name: str
    """What it measures, for the report."""

    def mark(self) -> Any:
        """This moment."""

    def settle(self) -> None:
        """Wait until all marks that were made have been passed."""

    def since(self, began: Any) -> Callable[[Any], float]:
        """Tells the seconds from one mark to any other, after `settle`."""

    def allocated(self) -> int | None:
        """Bytes in use on the device now; None if it cannot tell."""


class CpuClock:
    """The time of the machine."""

    name = "CPU"
    mark = staticmethod(time.perf_counter_ns)  # straight to C: it is asked four times per call of a module

    def settle(self) -> None:
        """Nothing is under way."""

    def since(self, began: int) -> Callable[[int], float]:
        """Tells the seconds from one mark to any other."""
        return lambda mark: (mark - began) * 1e-9

    def allocated(self) -> int | None:
        """The process's allocator keeps no count."""
        return None


class CudaClock:
    """The time of a GPU's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = torch.cuda.get_device_name(device)

    def mark(self) -> torch.cuda.Event:
        """The moment the device gets here."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def since(self, began: torch.cuda.Event) -> Callable[[torch.cuda.Event], float]:
        """Tells the seconds from one mark to any other."""
        base, offset = began, 0.0

        def seconds(mark: torch.cuda.Event) -> float:
            nonlocal base, offset
            milliseconds: float = base.elapsed_time(mark)
            moment = offset + milliseconds * 1e-3
            if abs(milliseconds) > 1000:  # torch says it in 32 bits: count on from here, or minutes eat up microseconds
                base, offset = mark, moment
            return moment

        return seconds

    def allocated(self) -> int | None:
        """What the caching allocator has given out."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)  # memory_allocated() makes a flat copy of it first
        bytes_now: int = stats["allocated_bytes"]["all"]["current"] if stats else 0
        return bytes_now


def clock_for(model: nn.Module) -> Clock:
    """The clock of the device that the model is on."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cuda":
            return CudaClock(tensor.device)
    return CpuClock()
