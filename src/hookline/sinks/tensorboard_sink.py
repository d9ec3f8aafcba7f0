"""Write metrics as TensorBoard's event files.

The helper process hands records to `TensorBoardSink`, which writes events by the ``tensorboard`` package: torch and
TensorFlow are not needed.
"""

from __future__ import annotations

import math
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

from hookline.records.sink import FileSink, Record, file_name
from hookline.records.values import MetricValue, json_text, mean, number, numbers, values_in

_Value: TypeAlias = dict[str, Any]
"""The fields of a ``Summary.Value``."""
_BINS: Final = 30
_LONGEST: Final = 10_000
"""Characters of a text; TensorBoard cannot scroll a page with more."""


class TensorBoardSink(FileSink):
    """Writes scalars, histograms and texts for TensorBoard, at the global step, with ``epoch`` beside.

    Recipe::

        sink = hookline.sinks.TensorBoardSink("runs/tb")
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        sink.close()  # then: tensorboard --logdir runs/tb

    Step metrics are a scalar per step; any other list of numbers is a histogram of its finite values, and a scalar
    ``{name}_mean``. Strings are texts, dictionaries ``name/key``; None is left out. TensorBoard keeps scalars in single
    precision. A resumed run writes its folder again from the log.

    Args:
        log_dir: Holds a folder for each run, ``{strategy}`` or ``run``; None for ``{run_dir}/tensorboard``. A folder
            that there is already is left alone: this one gets ``_1``, ``_2``, …
    """

    slow: ClassVar[bool] = True
    package: ClassVar[str | None] = "tensorboard"
    extra: ClassVar[str | None] = "tensorboard"
    is_folder: ClassVar[bool] = True

    def __init__(self, log_dir: str | Path | None = None) -> None:
        super().__init__(log_dir)
        self._writer: Any = None
        self._epoch: tuple[int, int] | None = None

    def options(self) -> dict[str, Any]:
        """Return the folder."""
        return {"log_dir": None if self._given_path is None else str(self._given_path.absolute())}

    def _wanted_path(self) -> Path | None:
        if self._given_path is not None:
            return self._given_path / file_name(self._context.strategy or "run")
        return None if self._context.folder is None else self._context.folder / "tensorboard"

    def write(self, record: Record) -> None:
        """Write the events of a record."""
        writer = self._writer or self._open()
        if writer is None:
            self._drop()
            return
        found = sorted(values_in(record, reserved=("epoch",)), key=attrgetter("step"))
        for step, group in groupby(found, key=attrgetter("step")):
            self._add(record, step, [value for one in group for value in _values(one)])
        if record.epoch is not None and (at := (record.step or 0, record.epoch)) != self._epoch:
            self._epoch = at
            self._add(record, at[0], [_scalar("epoch", record.epoch)])

    def _open(self) -> Any:
        module = self._import("tensorboard.summary.writer.event_file_writer")
        if (folder := self._open_path()) is not None:
            self._writer = module.EventFileWriter(str(folder))
        return self._writer

    def _add(self, record: Record, step: int, values: list[_Value]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=record.time, step=step, summary={"value": values}))

    def flush(self) -> None:
        """Write everything to the file."""
        if self._writer is not None:
            self._writer.flush()

    def _release(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._epoch = None


def _values(one: MetricValue) -> list[_Value]:
    """Return ``one`` as TensorBoard shows it: a scalar, a histogram and its mean, a text, or nothing for None."""
    name, value, _ = one
    if value is None:
        return []
    single = number(value)
    if single is not None:
        return [_scalar(name, single)]
    several = numbers(value)
    if several is not None:
        return [*_histogram(name, several), _scalar(f"{name}_mean", mean(several))]
    return [_text(name, value if isinstance(value, str) else json_text(value))]


def _scalar(tag: str, value: float) -> _Value:
    # Single precision: protobuf refuses a larger number, which is infinite there.
    fits = abs(value) <= 3.4028234e38 or not math.isfinite(value)
    return {"tag": tag, "simple_value": value if fits else math.copysign(math.inf, value)}


def _histogram(tag: str, values: list[float]) -> list[_Value]:
    import numpy

    finite = numpy.array(list(filter(math.isfinite, values)))
    if not finite.size:
        return []
    counts, edges = numpy.histogram(finite, bins=_BINS)
    histogram = {
        "min": finite.min(), "max": finite.max(), "num": finite.size, "sum": finite.sum(),
        "sum_squares": (finite**2).sum(), "bucket_limit": edges[1:].tolist(), "bucket": counts.tolist(),
    }  # fmt: skip
    return [{"tag": tag, "histo": histogram}]


def _text(tag: str, value: str) -> _Value:
    shown = value if len(value) <= _LONGEST else f"{value[:_LONGEST]} … ({len(value):,} characters)"
    content = shown.encode("utf-8", "backslashreplace")
    tensor = {"dtype": "DT_STRING", "string_val": [content], "tensor_shape": {"dim": [{"size": 1}]}}
    return {"tag": tag, "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": "text"}}}
