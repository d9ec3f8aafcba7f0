"""Metrics as lines of JSON, for tools that read such files.

Takes records from the fan-out, appends an object per record to a file. The record log has more (``log``); this is the
flat form, one key per metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hookline.sinks.line_file import LineFile, size_of
from hookline.sinks.record import Record, StepSeries
from hookline.sinks.run_sink import RunSink
from hookline.sinks.sink_paths import candidates
from hookline.sinks.strict_json import Clean, dumps, finite

__all__ = ["JSONLSink"]

_RESERVED: Final = frozenset({"epoch", "hook_point", "step", "strategy", "steps", "nonfinite"})


class JSONLSink(RunSink):
    """Appends ``{"epoch": …, "hook_point": …, "step": …, "strategy": …, metric: …}`` to a file, a line per record.

    Recipe::

        sink = hookline.sinks.JSONLSink("metrics.jsonl")
        sink.emit({"loss": 0.5}, epoch=0, hook_point="POST_EPOCH")

    Strict JSON: NaN and infinity are null, and ``"nonfinite"`` says which: ``{"loss": "nan"}``. The step numbers of
    step series are in ``"steps"``. A metric that bears the name of another key is written as ``metric/epoch``. Tensors
    and arrays become numbers and lists. Each line is handed to the system at once; a line that was cut short by a kill
    goes when the file is opened again.

    Args:
        path: The file; None for ``{strategy}.jsonl`` in the folder of the run, once that is known.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self.path = None if path is None else Path(path)
        """The file, if it was given."""
        self._file: LineFile | None = None

    def _write(self, record: Record) -> None:
        file = self._opened()
        if file is None:
            self._drop("Give it a path, or call set_run_context(run_dir=..., strategy=...).")
        else:
            file.write(_line(record))

    def _opened(self) -> LineFile | None:
        if self._file is None:
            path = self.path or self._context.file(".jsonl")
            if path is not None and self._is_copy:  # not after what the run itself has written
                path = next(free for free in candidates(path) if not free.exists())
            self._file = None if path is None else LineFile(path)
        return self._file

    def flush(self) -> None:
        """Nothing is held back."""

    def options(self) -> dict[str, Any]:
        """What it is made of."""
        return {"path": None if self.path is None else str(self.path)}

    def _end_run(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """How much is written."""
        if self._file is not None:
            return {"path": str(self._file.path), "bytes": self._file.size}
        path = self.path or self._context.file(".jsonl")
        return {} if path is None else {"path": str(path), "bytes": size_of(path)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off what was written later."""
        if not state:
            return
        self._end_run()
        path = self.path or self._context.file(".jsonl") or Path(state["path"])
        self._file = LineFile(path)
        self._file.cut(int(state["bytes"]))
        self._resumed = True


def _line(record: Record) -> bytes:
    head = {"epoch": record.epoch, "hook_point": record.point, "step": record.step, "strategy": record.strategy}
    if finite(record.metrics.values()) and _RESERVED.isdisjoint(record.metrics):
        with suppress(TypeError, ValueError):
            return dumps({**head, **record.metrics}) + b"\n"
    clean = Clean()
    metrics = clean.mapping(record.metrics)
    line = Clean().mapping(head)
    spelled = {name: _spelled(name, metrics) for name in metrics}
    line |= {spelled[name]: value for name, value in metrics.items()}
    steps = {name: list(value.steps) for name, value in record.metrics.items() if isinstance(value, StepSeries)}
    if steps:
        line["steps"] = {spelled.get(name, name): its for name, its in steps.items()}
    if clean.flags:
        line["nonfinite"] = {spelled[name]: flag for name, flag in clean.flags.items()}
    return dumps(line) + b"\n"


def _spelled(name: str, taken: Mapping[str, Any]) -> str:
    """A name of its own, if it is that of another key."""
    if name not in _RESERVED:
        return name
    name = f"metric/{name}"
    while name in taken:
        name = f"metric/{name}"
    return name
