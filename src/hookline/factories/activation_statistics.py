"""``activation_stats``: streaming statistics of what modules give out, by the engine of ``watch``.

Takes outputs from forward hooks, hands metrics to whoever asks, and lines of JSON to a file when they are due. Numbers
are added up on the device of the tensor; the forward waits for nothing but, where a line is due, for that line.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.factories.factory_hook import ByModule, Observer, checked_options, choice, path, whole, yes_or_no
from hookline.factories.output_rows import shown, without_padding
from hookline.factories.request_filter import PHASES, OfPhase
from hookline.factories.streaming_stats import Place, Streaming
from hookline.observe.watch.stat_columns import Layout, as_metrics, table_of
from hookline.observe.watch.watch_hooks import give_up
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sinks.record_log import LineFile
    from hookline.sites.site_info import Site

__all__ = ["ActivationStats", "activation_stats"]

logger = logging.getLogger("hookline.factories.activation_stats")

_NAME: Final = "activation_stats"
_OPTIONS: Final = {
    "stats": None,
    "every": 1,
    "phase": "both",
    "log_every": None,
    "file": None,
    "add_residual": False,
}
_DUE: Final = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(s|seconds?|forwards?)?\s*")


def activation_stats(config: Mapping[str, Any] | None = None) -> ActivationStats:
    """A hook that keeps streaming statistics of every module it is put on.

    Recipe::

        hook = activation_stats({"stats": ["mean", "absmax"]})
        with hookline.attach(model, "layers.#", hook):
            model(x)
        hook.to_metrics()  # {"layers.0/mean": ..., "layers.0/absmax": ...}

    Args:
        config: ``stats``: their names, as ``hookline.watch`` takes them. ``every``: look at each n-th call of a module.
            ``phase``: ``"prefill"`` or ``"decode"`` of a served model, for one of them alone. ``log_every``: seconds (a
            number, or ``"30s"``), or ``"500 forwards"``, after which the next call writes a line, to ``file`` (JSONL)
            if there is one, else to the log; it waits for the device once. ``add_residual``: of an output that is a
            pair of tensors of one shape, as SGLang's layers give, look at their sum.
    """
    options = checked_options(_NAME, config, _OPTIONS)
    stats = options["stats"]
    if stats is not None and not isinstance(stats, str | list | tuple):
        raise OptionError(f"{_NAME}: stats is a list of names such as 'mean', got {stats!r}.")
    file = None if options["file"] is None else path(_NAME, "file", options["file"])
    phase = choice(_NAME, "phase", options["phase"], PHASES)
    hook = (ActivationStats if phase == "both" else _OfPhase)(
        Layout.of(stats if stats is None or isinstance(stats, str) else tuple(stats)),
        every=whole(_NAME, "every", options["every"]),
        due=None if options["log_every"] is None else _due(options["log_every"]),
        file=file,
        add_residual=yes_or_no(_NAME, "add_residual", options["add_residual"]),
    )
    if isinstance(hook, _OfPhase):
        hook.phase = phase
    return hook


def _due(value: Any) -> tuple[float, bool]:
    """How much has to pass between two lines, and whether it is forwards, not seconds."""
    found = None if isinstance(value, bool) else _DUE.fullmatch(str(value))
    if found is None or not float(found[1]):
        raise OptionError(f"{_NAME}: log_every is a number of seconds, or '500 forwards'; got {value!r}.")
    return float(found[1]), bool(found[2]) and found[2].startswith("f")


class _Seen:
    """What is kept for one module."""

    __slots__ = ("calls", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.calls = 0


class ActivationStats(Observer):
    """The statistics of all modules that one ``activation_stats`` sits on; what was counted stays after removal."""

    name = _NAME

    def __init__(
        self,
        layout: Layout,
        *,
        every: int = 1,
        due: tuple[float, bool] | None = None,
        file: Path | None = None,
        add_residual: bool = False,
    ) -> None:
        self._streaming = Streaming(layout)
        self._seen = ByModule(lambda name: _Seen(self._streaming.place(name)))
        self._every = every
        self._add_residual = add_residual
        self._first: _Seen | None = None
        """The module that came first: when it comes again, a forward is over."""
        self.forwards = 0
        """How many forwards there have been, by the calls of that module."""
        self._lines = None if due is None and file is None else _Lines(due, file)

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """A module has given this out."""
        if _torch.in_recomputation():  # it was counted the first time
            return
        seen = self._seen.of(module, site)
        if seen is self._first:
            self._begin_forward()
        elif self._first is None:
            self._first, self.forwards = seen, 1
        count = seen.calls
        seen.calls = count + 1
        if count % self._every == 0:
            self._take(seen.place, output)

    def _begin_forward(self) -> None:
        self.forwards += 1
        self._streaming.begin_forward()
        if self._lines is not None and self._lines.is_due(self.forwards - 1):
            self._lines.write(self.to_metrics(), self.forwards - 1)

    def _take(self, place: Place, output: Any) -> None:
        tensor = shown(output, self._add_residual)
        if tensor is None:
            place.watched.unread = "there is no tensor in its output"
            return
        try:
            real = without_padding(tensor)
            if real is not None:
                self._streaming.take(place, real)
        except Exception as error:  # whoever only watches must not lose the run to it
            give_up(place.watched, tensor, error)

    def to_metrics(self) -> dict[str, float]:
        """Every statistic by ``"module/statistic"``, of what was seen since the last reset; one transfer."""
        layout = self._streaming.layout
        if layout.by_unit:
            return self._streaming.by_unit()
        return {
            f"{name}/{stat}": value
            for name, cells in self.read().items()
            for stat, value in as_metrics(cells, layout).items()
        }

    def read(self) -> dict[str, dict[str, float]]:
        """The columns of each module's row, of which statistics are made."""
        seen = self._seen.items()
        return dict(zip(dict(seen), self._streaming.read([each.place for _, each in seen]), strict=True))

    def reset(self) -> None:
        """Forget what was counted so far, and go on."""
        self._streaming.reset([seen.place for seen in self._seen.values()])

    def close(self) -> None:
        """Write the last line."""
        if self._lines is not None:
            self._lines.close(self.to_metrics(), self.forwards)


class _OfPhase(OfPhase, ActivationStats):
    """The same for one phase of a served model."""


class _Lines:
    """When the next line is due, and where it goes."""

    def __init__(self, due: tuple[float, bool] | None, file: Path | None) -> None:
        self._after, self._by_forwards = due or (float("inf"), True)
        self._path = file
        self._file: LineFile | None = None
        self._lock = threading.Lock()
        self._last_time = time.monotonic()
        self._last_forward = 0
        self._failed = False
        if file is not None:
            self._opened()  # a path that cannot be written is an error now, not in the middle of a run

    def is_due(self, forwards: int) -> bool:
        """Whether enough has passed since the last line."""
        if self._by_forwards:
            return forwards - self._last_forward >= self._after
        return time.monotonic() - self._last_time >= self._after

    def write(self, metrics: dict[str, float], forwards: int) -> None:
        """A line, of the forwards there have been so far."""
        with self._lock:
            self._last_time, self._last_forward = time.monotonic(), forwards
            if self._path is None:
                logger.info("%d forwards\n%s", forwards, table_of(metrics).text())
                return
            try:
                self._opened().write(_line(metrics, forwards))
            except OSError as error:
                if not self._failed:
                    logger.error("%s cannot be written, and the run goes on: %s", self._path, error)
                self._failed = True

    def close(self, metrics: dict[str, float], forwards: int) -> None:
        """The last line, if forwards came after the one before."""
        if forwards > self._last_forward:
            self.write(metrics, forwards)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _opened(self) -> LineFile:
        if self._file is None:
            from hookline.sinks.record_log import LineFile

            assert self._path is not None
            self._file = LineFile(self._path)
        return self._file


def _line(metrics: dict[str, float], forwards: int) -> bytes:
    from hookline.sinks.metric_values import JsonCleaner, dumps

    cleaner = JsonCleaner()
    line = {"time": time.time(), "forwards": forwards, **cleaner.clean(metrics)}
    if cleaner.flags:
        line["nonfinite"] = cleaner.flags
    return dumps(line) + b"\n"


# Where plain torch calls it in compiled code, the graph ends there; what is behind the call is not compiled as well.
_torch.leave_to_python(ActivationStats.__call__)
