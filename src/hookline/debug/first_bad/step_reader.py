"""Read the statistics of a watch step by step, without waiting for the device.

`BadOperationFinder` and `FlightRecorder` end each step here and take the steps whose numbers have arrived. On a CPU
they are there at once; from a GPU they come by a copy that runs beside the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.observe.watch.bad_order import CalledPlace, CallOrder, FirstCalls
from hookline.observe.watch.row import BAD, FIRES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookline.observe.watch.place import WatchedPlace
    from hookline.observe.watch.watch import Watch

__all__ = ["StepReader", "StepRows", "copy_to_host"]


@dataclass(slots=True)
class StepRows:
    """The statistics of one step, and one number beside them."""

    number: int
    rows: dict[torch.device, Tensor]
    """On the host, once `is_there`."""
    loss: Tensor | float | None
    events: list[Any]
    order: CallOrder

    def is_there(self) -> bool:
        """Return whether all numbers have arrived."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Wait until they have."""
        for event in self.events:
            event.synchronize()

    def is_bad(self) -> bool:
        """Return whether a place had NaN or infinity."""
        return any(bool(values[:, BAD].any()) for values in self.rows.values())

    def of_places(self, places: list[WatchedPlace]) -> list[tuple[int, WatchedPlace, NDArray[np.float64]]]:
        """Return for each place that had a tensor its position by first calls and its row; in that order."""
        found = []
        arrays = {device: values.numpy() for device, values in self.rows.items()}
        for place in places:
            for device, row in place.rows.items():
                values = arrays.get(device)
                if values is not None and row.number < len(values) and values[row.number, 0] > 0:
                    found.append((row.number, place, values[row.number]))
        return sorted(found, key=lambda each: each[0])

    def bad_places(self, places: list[WatchedPlace], leave_out: Collection[str] = ()) -> FirstCalls:
        """Return the places that had NaN or infinity by their first bad calls."""
        if not self.is_bad():
            return FirstCalls([], 0)
        found = []
        for place in places:
            for device, row in place.rows.items():
                values = self.rows.get(device)
                if values is not None and row.number < len(values) and place.label not in leave_out:
                    fires, bad = values[row.number, [FIRES, BAD]].tolist()
                    if bad > 0:
                        found.append(CalledPlace(place.label, device, row.number, fires == bad))
        return self.order.sort(found)


class StepReader:
    """Hand out the statistics of a watch step by step."""

    def __init__(self, watched: Watch) -> None:
        self._watch = watched
        self._engine = watched._engine
        self._pending: deque[StepRows] = deque()
        self._ordered_rows: dict[torch.device, int] = {}

    @property
    def places(self) -> list[WatchedPlace]:
        """The places that the watch looks at."""
        return list(self._engine.places.values())

    def end_step(self, number: int, loss: Any = None) -> None:
        """Take the statistics since the last call as those of a step; count from zero again."""
        self._engine.flush()
        copies = {device: rows.copy() for device, rows in self._engine.device_rows.items()}
        self._ordered_rows = self._ordered_rows or {device: len(rows) for device, rows in copies.items()}
        order = CallOrder.take(self._engine.device_rows, self._ordered_rows)
        self._watch.reset()
        events: list[Any] = []
        rows = {device: copy_to_host(values, events) for device, values in copies.items()}
        if isinstance(loss, Tensor):
            loss = copy_to_host(loss.detach(), events)
        self._pending.append(StepRows(number, rows, loss, events, order))

    def note_loss(self, number: int, loss: Any) -> None:
        """Take the loss of a step that has ended; it comes by itself."""
        events: list[Any] = []
        host = copy_to_host(loss.detach(), events) if isinstance(loss, Tensor) else loss
        self._pending.append(StepRows(number, {}, host, events, CallOrder()))

    def arrived(self, *, wait: bool = False) -> list[StepRows]:
        """Return the steps whose numbers are on the host, the oldest first; each once."""
        found = []
        while self._pending and (wait or self._pending[0].is_there()):
            step = self._pending.popleft()
            if wait:
                step.wait()
            found.append(step)
        return found

    def coming(self) -> list[StepRows]:
        """Return the steps that have not been taken, and wait for their numbers; `arrived` returns them again."""
        found = list(self._pending)
        for step in found:
            step.wait()
        return found

    def arrived_until(self, number: int) -> list[StepRows]:
        """Return the steps that have arrived; wait for those up to ``number``."""
        found = self.arrived()
        while self._pending and self._pending[0].number <= number:
            step = self._pending.popleft()
            step.wait()
            found.append(step)
        return found + self.arrived()

    def forget(self) -> None:
        """Drop what has not been taken, and what is being counted."""
        self._pending.clear()
        self._watch.reset()


def copy_to_host(values: Tensor, events: list[Any]) -> Tensor:
    """Copy numbers to the host without waiting; what tells that they have arrived is added to ``events``."""
    if values.device.type == "cpu":
        return values.clone() if not values.dim() else values
    if values.device.type != "cuda":
        return values.cpu()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    events.append(event)
    return host
