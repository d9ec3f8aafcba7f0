"""Hand metrics to the logger of a host, beside or in place of sinks of hookline.

A `HostRun` with ``report_to=`` adds it to the sinks of its manager; it calls the function that the adapter of the host
gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hookline.records.sink import MetricSink, Record
from hookline.records.values import mean, number, numbers, step_axis, values_in

__all__ = ["HostLog", "HostLogSink"]

HostLog: TypeAlias = Callable[[dict[str, float], int], None]
"""Takes the numbers of one step, and the step."""


class HostLogSink(MetricSink):
    """Give every number to ``log(metrics, step)``; a list becomes its mean, and text is left out.

    Args:
        log: What the host logs with.
        per_step: Call it once for each step. False: once for each record, with the mean over its steps, for hosts that
            log at their current step only.
    """

    def __init__(self, log: HostLog, *, per_step: bool = True) -> None:
        self._log = log
        self._per_step = per_step

    def write(self, record: Record) -> None:
        """Log the numbers of ``record``."""
        rows: dict[int, dict[str, list[float]]] = {}
        last = step_axis(record)
        for name, value, step in values_in(record):
            single = number(value)
            if single is None:
                several = numbers(value)
                name, single = f"{name}_mean", mean(several) if several else None
            if single is not None:
                rows.setdefault(step if self._per_step else last, {}).setdefault(name, []).append(single)
        for step in sorted(rows):
            self._log({name: mean(values) for name, values in rows[step].items()}, step)
