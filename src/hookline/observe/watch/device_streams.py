"""Name the streams of a device by number, and go from one to another.

`PendingTensors` and `Kernel` ask; CUDA has streams, other devices do as if they had one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from hookline.sites import _torch

__all__ = ["Streams", "streams_of"]


class Streams:
    """The streams of a device, by number; this class is for a device that has none."""

    now: Callable[[], int] = staticmethod(lambda: 0)
    """Return the current stream."""

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Return a block whose work is put on stream ``number``."""
        return nullcontext() if number == self.now() else self._on_other(number)

    def _on_other(self, number: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self, number: int) -> None:
        """Make the current stream wait for stream ``number``."""


class _CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.now = _torch.current_stream_of(torch.cuda.current_device() if device.index is None else device.index)

    def _on_other(self, number: int) -> AbstractContextManager[Any]:
        context: Any = torch.cuda.stream
        return cast(AbstractContextManager[Any], context(self._stream(number)))

    def join(self, number: int) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream(number))

    def _stream(self, number: int) -> torch.cuda.Stream:
        other: Any = torch.cuda.ExternalStream
        # Given 0, ExternalStream would be any stream.
        return (
            cast(torch.cuda.Stream, other(number, self._device)) if number else torch.cuda.default_stream(self._device)
        )


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return _CudaStreams(device) if device.type == "cuda" else Streams()
