"""``activation_stats``: keep streaming statistics of the outputs of modules, by the engine of ``watch``.

Specs and users make it. It writes lines of JSON to a file when they are due. Numbers are added up on the device of the
tensor; a forward waits for nothing but, where a line is due, for that line.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hookline.errors import OptionError
from hookline.factories.factory_hook import read_options, tried_by
from hookline.factories.served_batch import Stage, only_in_stage
from hookline.factories.streaming_stats import StreamedModule, Streaming, StreamingObserver
from hookline.observe.watch.row import Layout, as_metrics, table_of
from hookline.records.log import LineFile, json_line

__all__ = ["ActivationStats", "activation_stats"]

logger = logging.getLogger("hookline.factories.activation_stats")

_COUNTS: Final = ("nonfinite", "nan", "inf")


@dataclass(frozen=True)
class StatsOptions:
    """The config of ``activation_stats``."""

    stats: Any = None
    phase: Stage = "both"
    log_every: int | None = None
    file: Path | None = None
    add_residual: bool = False

    @property
    def layout(self) -> Layout:
        """The statistics that are asked for."""
        if self.stats is not None and not isinstance(self.stats, str | list | tuple):
            raise OptionError(f"activation_stats: stats is a list of names such as 'mean', got {self.stats!r}.")
        return Layout.of(tuple(self.stats) if isinstance(self.stats, list) else self.stats)


def _try(config: Mapping[str, Any]) -> ActivationStats:
    """Check a config without opening the file."""
    return _make(replace(read_options("activation_stats", StatsOptions, config), file=None))


@tried_by(_try)
def activation_stats(config: Mapping[str, Any] | None = None) -> ActivationStats:
    """Make a hook that keeps streaming statistics of every module it is on.

    Recipe::

        hook = activation_stats({"stats": ["mean", "absmax"]})
        with hookline.attach(model, "layers.#", hook):
            model(x)
        hook.to_metrics()  # {"layers.0/mean": ..., "layers.0/absmax": ...}

    Args:
        config: ``stats``: their names, as ``hookline.watch`` takes them. ``phase``: ``"prefill"`` or ``"decode"`` of a
            served model, for one of them alone. ``log_every``: seconds after which the next forward writes a line, to
            ``file`` (JSONL) if there is one, else to the log; it waits for the device once. ``add_residual``: of an
            output that is a pair of tensors of one shape, as SGLang's layers give, look at their sum.
    """
    return _make(read_options("activation_stats", StatsOptions, config))


def _make(options: StatsOptions) -> ActivationStats:
    log = None if options.log_every is None and options.file is None else _StatsLog(options)
    return only_in_stage(ActivationStats, options.phase)(options.layout, log=log, add_residual=options.add_residual)


class ActivationStats(StreamingObserver[StreamedModule]):
    """Keep the statistics of all modules that one ``activation_stats`` is on, also after removal."""

    name = "activation_stats"

    def __init__(self, layout: Layout, *, log: _StatsLog | None = None, add_residual: bool = False) -> None:
        super().__init__(Streaming(layout), StreamedModule, add_residual=add_residual)
        self._ended = 0
        self._log = log

    @property
    def forwards(self) -> int:
        """Return how many forwards there have been, by the calls of the module that was called first."""
        return self._ended + (self._first is not None)

    def _end_forward(self) -> None:
        self._ended += 1
        super()._end_forward()
        if self._log is not None and self._log.is_due():
            self._log.write(self.to_metrics(), self._ended)

    def to_metrics(self) -> dict[str, float]:
        """Return every statistic since the last reset by ``"module/statistic"``; one transfer.

        Counts of what is not finite are there as 0 before the first: an alert needs its series then.
        """
        layout = self._streaming.layout
        if layout.by_unit:
            return self._streaming.engine.to_metrics()
        return {
            f"{name}/{stat}": value
            for name, cells in self.read().items()
            for stat, value in (self._zeros(name, cells) | as_metrics(cells, layout)).items()
        }

    def _zeros(self, name: str, cells: Mapping[str, float]) -> dict[str, float]:
        """Return the counts of a module that has given nothing but finite numbers so far."""
        is_known = name in self._expected or cells["count"]
        is_asked = "nonfinite" in self._streaming.layout.stats
        return dict.fromkeys(_COUNTS, 0.0) if is_known and is_asked and not cells["bad"] else {}

    def read(self) -> dict[str, dict[str, float]]:
        """Return the columns of each module's row, from which statistics are computed."""
        modules = dict(self._modules.items())
        return dict(zip(modules, self._streaming.read([*modules.values()]), strict=True))

    def reset(self) -> None:
        """Drop what was counted so far."""
        self._streaming.engine.reset()

    def close(self) -> None:
        """Write the last line."""
        if self._log is not None:
            self._log.close(self.to_metrics(), self.forwards)


class _StatsLog:
    """Write the lines of one hook, and keep when the next is due."""

    def __init__(self, options: StatsOptions) -> None:
        self._after = float("inf") if options.log_every is None else options.log_every
        # A path that cannot be written is an error now, not in the middle of a run.
        self._file = None if options.file is None else LineFile(options.file)
        self._lock = threading.Lock()
        self._last_time = time.monotonic()
        self._last_forward = 0
        self._failed = False

    def is_due(self) -> bool:
        """Return whether enough time has passed since the last line."""
        return time.monotonic() - self._last_time >= self._after

    def write(self, metrics: dict[str, float], forwards: int) -> None:
        """Write a line; ``forwards`` is how many there have been so far."""
        with self._lock:
            self._last_time, self._last_forward = time.monotonic(), forwards
            if self._file is None:
                logger.info("%d forwards\n%s", forwards, table_of(metrics).text())
                return
            try:
                self._file.write(json_line({"time": time.time(), "forwards": forwards, **metrics}))
            except OSError as error:
                if not self._failed:
                    logger.error("The file of statistics cannot be written, and the run goes on: %s", error)
                self._failed = True

    def close(self, metrics: dict[str, float], forwards: int) -> None:
        """Write the last line, if there were forwards after the one before; may be called again."""
        if forwards > self._last_forward:
            self.write(metrics, forwards)
        if self._file is not None:
            self._file.close()
