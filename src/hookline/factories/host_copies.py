"""The way of exported tensors from a GPU to the memory of the host.

Takes items in the writing thread, and hands them back with their tensors on the host. The copies are made on a stream
of their own, after the events that the forward has left; this thread waits for them, asleep, and no other does.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.factories.engine_batch import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hookline.factories.export_queue import Item

__all__ = ["ToHost"]


class ToHost:
    """Brings tensors to the host, from any number of GPUs."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def bring(self, items: Sequence[Item]) -> None:
        """Have the tensors of items on the host; one wait for each device."""
        sent: dict[torch.device, list[tuple[Item, Tensor]]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for item in items:
                if item.tensor.device.type == "cuda":
                    sent.setdefault(item.tensor.device, []).append((item, self._sent(item)))
                else:
                    item.tensor = item.tensor.cpu()
        for device, some in sent.items():
            with self._stream(device) as stream:
                make: Any = torch.cuda.Event
                arrived = make(blocking=True)
                arrived.record(stream)
            arrived.synchronize()
            for item, host in some:
                item.tensor = host  # what was on the GPU was needed until now

    def _sent(self, item: Item) -> Tensor:
        """Where the tensor will be, once the stream has got so far."""
        with self._stream(item.tensor.device) as stream:
            item.ready.wait(stream)
            host = torch.empty(item.tensor.shape, dtype=item.tensor.dtype, pin_memory=True)
            host.copy_(item.tensor, non_blocking=True)
            if isinstance(item.rows, TokenBatch):
                item.rows = item.rows.on_host()
        return host

    @contextlib.contextmanager
    def _stream(self, device: torch.device) -> Iterator[torch.cuda.Stream]:
        stream = self._streams.get(device)
        if stream is None:
            make: Any = torch.cuda.Stream
            stream = self._streams[device] = make(device)
        with torch.cuda.stream(stream):
            yield stream
