"""``nan_alarm``: log which module was the first to return NaN or infinity.

Specs and users make it. Counts are kept on the device of the tensors. On a CPU they are read in the same call; on a GPU
once in a second, at the end of a forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hookline.factories.factory_hook import read_options, tried_by
from hookline.factories.served_batch import shape_of
from hookline.factories.streaming_stats import Gathered, StreamedModule, Streaming, StreamingObserver
from hookline.observe.watch.engine import StatsEngine
from hookline.observe.watch.row import BAD, INF, NAN, Layout
from hookline.sites import _torch

__all__ = ["NanAlarm", "nan_alarm"]

logger = logging.getLogger("hookline.factories.nan_alarm")

_CPU: Final = torch.device("cpu")
_PAUSE: Final = 1.0
"""Seconds between two reads of a GPU's counts: each waits for the device."""


@dataclass(frozen=True)
class AlarmOptions:
    """The config of ``nan_alarm``: it has no options."""


@tried_by()
def nan_alarm(config: Mapping[str, Any] | None = None) -> NanAlarm:
    """Make a hook that logs once for each module when it first returns NaN or infinity.

    Recipe::

        hook = nan_alarm({})
        with hookline.attach(model, "*", hook):
            model(x)
        hook.to_metrics()  # {"layers.3/nonfinite": 1.0, "layers.3/nan": 4.0, "layers.3/inf": 0.0}

    Args:
        config: Empty; the alarm has no options.
    """
    read_options("nan_alarm", AlarmOptions, config)
    return NanAlarm()


class _AlarmModule(StreamedModule):
    """Hold the rows of one module, the shape of its last output, and whether it was logged."""

    __slots__ = ("shape", "was_logged")

    def __init__(self, engine: StatsEngine, name: str) -> None:
        super().__init__(engine, name)
        self.shape: tuple[int, ...] = ()
        self.was_logged = False


class NanAlarm(StreamingObserver[_AlarmModule]):
    """Watch all modules that one ``nan_alarm`` is on."""

    name = "nan_alarm"

    def __init__(self) -> None:
        super().__init__(Streaming(Layout.of("nonfinite")), _AlarmModule)
        self._next = 0.0
        """When to read the counts of GPUs."""

    def _end_forward(self) -> None:
        super()._end_forward()
        is_on_gpu = any(device.type == "cuda" for device in self._streaming.engine.device_rows)
        if is_on_gpu and time.monotonic() > self._next and not _torch.capturing():
            self.to_metrics()
            self._next = time.monotonic() + _PAUSE

    def _take(self, seen: _AlarmModule, tensor: Tensor, gathered: Gathered | None) -> None:
        super()._take(seen, tensor, gathered)
        row = seen.watched.rows.get(_CPU)
        if row is not None and row.cells is not None and row.cells[BAD] and not seen.was_logged:
            self._log(seen, row.cells[NAN], row.cells[INF])

    def _add(self, seen: _AlarmModule, real: Tensor, gathered: Gathered | None) -> None:
        seen.shape = shape_of(real)
        super()._add(seen, real, gathered)

    def _log(self, seen: _AlarmModule, nan: float, inf: float) -> None:
        seen.was_logged = True
        logger.warning(
            "%s gave out %d NaN and %d infinities, in a tensor of shape %s, in call %d",
            seen.name, int(nan), int(inf), seen.shape, seen.calls,
        )  # fmt: skip

    def to_metrics(self) -> dict[str, float]:
        """Return, for each module, in how many calls there were some, and how many NaN and infinities; one transfer."""
        items = self._modules.items()
        found: dict[str, float] = {}
        for (name, seen), mine in zip(items, self._streaming.read([seen for _, seen in items]), strict=True):
            if mine["bad"] and not seen.was_logged:
                self._log(seen, mine["nan"], mine["inf"])
            found |= {f"{name}/nonfinite": mine["bad"], f"{name}/nan": mine["nan"], f"{name}/inf": mine["inf"]}
        return found

    def close(self) -> None:
        """Log what has not been logged yet."""
        self.to_metrics()
