"""Write metrics as lines of JSON, for tools that read such files.

A `Reader` hands records to `JSONLSink`, which appends an object per record. The record log has more; this is the flat
form, one key per metric.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from hookline.errors import OptionError
from hookline.records.log import dumps, is_json, json_line
from hookline.records.sink import FileSink, Record, StepSeries
from hookline.records.values import column_name
from hookline.when import HookPoint

_RESERVED: Final = frozenset({"epoch", "hook_point", "step", "strategy", "steps"})


class JSONLSink(FileSink):
    """Appends ``{"epoch": …, "hook_point": …, "step": …, "strategy": …, metric: …}`` to a file, a line per record.

    Recipe::

        sink = hookline.sinks.JSONLSink("metrics.jsonl")
        sink.emit({"loss": 0.5}, epoch=0, hook_point="POST_EPOCH")

    Strict JSON: NaN and infinity are the strings "NaN", "Infinity" and "-Infinity". The step numbers of step series are
    in ``"steps"``. A metric with the name of another key is written as ``metric/epoch``. Tensors and arrays become
    numbers and lists. Each line is handed to the system at once.

    Args:
        path: The file, or ``metrics_1.jsonl`` where there is such a file already. None for ``{strategy}.jsonl`` in the
            folder of the run, once that is known.
        points: ``"all"``, or ``"step"``: the metrics of single steps alone.
    """

    ending: ClassVar[str] = ".jsonl"

    def __init__(self, path: str | Path | None = None, *, points: str = "all") -> None:
        if points not in ("all", "step"):
            raise OptionError(f"points= of a JSONLSink is 'all' or 'step'; got {points!r}.")
        super().__init__(path)
        self._is_of_steps = points == "step"

    def write(self, record: Record) -> None:
        """Append a line."""
        point = record.hook_point
        if self._is_of_steps and not (isinstance(point, HookPoint) and point.is_step):
            return
        file = self._file or self._open_file()
        if file is None:
            self._drop()
        else:
            file.write(_line(record))


def _line(record: Record) -> bytes:
    metrics = record.metrics
    head = {"epoch": record.epoch, "hook_point": record.point, "step": record.step, "strategy": record.strategy}
    if is_json(metrics.values()) and _RESERVED.isdisjoint(metrics):
        with suppress(TypeError, ValueError):
            return dumps({**head, **metrics}) + b"\n"
    keys = {name: column_name(str(name), _RESERVED) for name in metrics}
    steps = {keys[name]: value.steps for name, value in metrics.items() if isinstance(value, StepSeries)}
    line = {**head, **{keys[name]: value for name, value in metrics.items()}}
    return json_line({**line, "steps": steps} if steps else line)
