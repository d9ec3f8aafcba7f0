"""Keep metrics in memory, to look at: in tests, in a notebook.

A `Reader` hands records to `MemorySink`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.records.sink import MetricSink, Record
from hookline.tables import Table, number_text


@dataclass(frozen=True, slots=True)
class MemoryRecord(Record):
    """A record, and the run it belongs to."""

    context: dict[str, Any] = field(default_factory=dict)
    """The arguments of ``set_run_context`` until then."""


class MemorySink(MetricSink):
    """Keeps every record in a list.

    Recipe::

        sink = hookline.sinks.MemorySink()
        sink.emit({"loss": 0.5}, epoch=0, hook_point="POST_EPOCH")
        sink.series("loss")  # [(0, 0.5)]
    """

    def __init__(self) -> None:
        self.records: list[MemoryRecord] = []
        """Everything so far, in order."""
        self._context: dict[str, Any] = {}

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Keep a copy of the metrics, unless there are none."""
        self.write(Record(metrics, epoch, hook_point))

    def write(self, record: Record) -> None:
        """Keep a copy of the record, unless there is nothing in it."""
        if record.metrics:
            moment = (record.epoch, record.hook_point, record.step, record.strategy)
            origin = (record.rank, record.time, record.number)
            self.records.append(MemoryRecord(dict(record.metrics), *moment, *origin, dict(self._context)))

    def set_run_context(self, **context: Any) -> None:
        """Keep ``context`` with the records from now on."""
        self._context |= context

    def __repr__(self) -> str:
        newest = f", newest at {self.records[-1].place_text()}, {self.records[-1].point}" if self.records else ""
        return f"<MemorySink of {len(self.records)} records, {len(self.latest)} metrics{newest}>"

    def _repr_html_(self) -> str:
        rows = [(name, number_text(value)) for name, value in self.latest.items()]
        return Table(("metric", "newest value"), rows, numbers=(1,), title=repr(self)[1:-1]).html()

    def series(self, name: str) -> list[tuple[int, Any]]:
        """Return one metric over time: pairs of the epoch (in a run that counts steps, the step) and the value."""
        return [(record.position, record.metrics[name]) for record in self.records if name in record.metrics]

    @property
    def latest(self) -> dict[str, Any]:
        """The newest value of every metric."""
        return {name: value for record in self.records for name, value in record.metrics.items()}

    def restart(self) -> bool:
        """Drop all records: they come again."""
        self.clear()
        return True

    def drop_records_from(self, number: int) -> None:
        """Drop the records from ``number`` on: a run without a log is resumed in this process, by `FanOut`."""
        self.records[:] = [record for record in self.records if record.number < number]

    def clear(self) -> None:
        """Drop all records."""
        self.records.clear()
