"""Write metrics as lines of JSON, for tools that read such files.

The fan-out hands records to `JSONLSink`, which appends an object per record to a `LineFile`. The record log has more;
this is the flat form, one key per metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hookline.records.log import LineFile, size_of
from hookline.records.sink import Record, RunSink, StepSeries, free_paths
from hookline.records.values import JsonCleaner, all_finite, dumps

__all__ = ["JSONLSink"]

_RESERVED: Final = frozenset({"epoch", "hook_point", "step", "strategy", "steps", "nonfinite"})


class JSONLSink(RunSink):
    """Appends ``{"epoch": …, "hook_point": …, "step": …, "strategy": …, metric: …}`` to a file, a line per record.

    Recipe::

        sink = hookline.sinks.JSONLSink("metrics.jsonl")
        sink.emit({"loss": 0.5}, epoch=0, hook_point="POST_EPOCH")

    Strict JSON: NaN and infinity are null, and ``"nonfinite"`` says which: ``{"loss": "nan"}``. The step numbers of
    step series are in ``"steps"``. A metric with the name of another key is written as ``metric/epoch``. Tensors and
    arrays become numbers and lists. Each line is handed to the system at once; a line that was cut short by a kill is
    removed when the file is opened again.

    Args:
        path: The file; None for ``{strategy}.jsonl`` in the folder of the run, once that is known.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self.path = None if path is None else Path(path)
        """The file, if it was given."""
        self._file: LineFile | None = None

    def _write(self, record: Record) -> None:
        file = self._file or self._open()
        if file is None:
            self._drop("Give it a path, or call set_run_context(run_dir=..., strategy=...).")
        else:
            file.write(_line(record))

    def _open(self) -> LineFile | None:
        path = self.path or self._context.file(".jsonl")
        if path is not None and self._is_replay:
            path = next(free for free in free_paths(path) if not free.exists())
        self._file = None if path is None else LineFile(path)
        return self._file

    def flush(self) -> None:
        """Do nothing: no line is held back."""

    def options(self) -> dict[str, Any]:
        """Return the path."""
        return {"path": None if self.path is None else str(self.path)}

    def _end_run(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Return how much is written."""
        if self._file is not None:
            return {"path": str(self._file.path), "bytes": self._file.size}
        path = self.path or self._context.file(".jsonl")
        return {} if path is None else {"path": str(path), "bytes": size_of(path)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off what was written after ``state``."""
        if not state:
            return
        self._end_run()
        self._file = LineFile(self.path or self._context.file(".jsonl") or Path(state["path"]))
        self._file.cut(int(state["bytes"]))
        self._resumed = True


def _line(record: Record) -> bytes:
    head = {"epoch": record.epoch, "hook_point": record.point, "step": record.step, "strategy": record.strategy}
    if all_finite(record.metrics.values()) and _RESERVED.isdisjoint(record.metrics):
        with suppress(TypeError, ValueError):
            return dumps({**head, **record.metrics}) + b"\n"
    cleaner = JsonCleaner()
    metrics = cleaner.clean(record.metrics)
    keys = {name: _key(name, metrics) for name in metrics}
    line = JsonCleaner().clean(head) | {keys[name]: value for name, value in metrics.items()}
    steps = {name: list(value.steps) for name, value in record.metrics.items() if isinstance(value, StepSeries)}
    if steps:
        line["steps"] = {keys.get(name, name): its_steps for name, its_steps in steps.items()}
    if cleaner.flags:
        line["nonfinite"] = {keys[name]: flag for name, flag in cleaner.flags.items()}
    return dumps(line) + b"\n"


def _key(name: str, taken: Mapping[str, Any]) -> str:
    """Return the key of a metric: with ``metric/`` before it as often as needed to be the only one."""
    if name not in _RESERVED:
        return name
    name = f"metric/{name}"
    while name in taken:
        name = f"metric/{name}"
    return name
