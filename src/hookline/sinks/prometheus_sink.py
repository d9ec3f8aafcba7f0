"""Serve the newest metrics to Prometheus: text on a port of this machine.

A `Reader` hands records to `PrometheusSink`; a thread of ``prometheus_client`` answers HTTP requests.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from hookline.errors import OptionError
from hookline.records.log import utf8_text
from hookline.records.sink import Record, RunSink, StepSeries
from hookline.records.values import as_numbers, to_plain, values_in

_FORBIDDEN: Final = re.compile(r"[^a-zA-Z0-9_]")
_PROGRESS: Final = ("step", "epoch")
_LABELS: Final = ("metric", "strategy", "rank", "hook_point")


class PrometheusSink(RunSink):
    """Serves the newest value of every metric on ``http://127.0.0.1:{port}/metrics``.

    Recipe::

        sink = hookline.sinks.PrometheusSink(port=0)  # 0: any port that is free
        sink.start()  # or at the first record; the port is in sink.port
        sink.emit({"norms/total": 1.5}, epoch=0, hook_point="POST_EPOCH")
        sink.close()

    A metric ``norms/total`` is the gauge ``hookline_norms_total`` with the labels ``metric`` (its own name),
    ``strategy``, ``rank`` and ``hook_point``; ``hookline_step`` and ``hookline_epoch`` say how far the run is. Of step
    metrics the last value is served, of lists ``_mean``, ``_min`` and ``_max``; text and None have no gauge. When
    another strategy begins, the gauges of the one before are removed.

    Args:
        port: The port to listen at; 0 takes one that is free.
        host: The address to listen at; any but this machine's own lets everyone on the network read.
    """

    package: ClassVar[str | None] = "prometheus_client"
    extra: ClassVar[str | None] = "prometheus"

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__()
        self._wanted = port
        self._host = host
        self._newest: dict[tuple[str, str, str], dict[str, Any]] = {}  # by strategy, rank and point
        self._lock = threading.Lock()  # between the run, which writes, and the thread that serves
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int | None:
        """The port it listens at; None before `start`."""
        return None if self._server is None else int(self._server.server_port)

    def start(self) -> int:
        """Listen, unless it does already; return the port."""
        if self._server is None:
            client = self._import("prometheus_client")
            registry = client.CollectorRegistry(auto_describe=False)
            registry.register(self)
            try:
                self._server, self._thread = client.start_http_server(self._wanted, self._host, registry)
            except (OSError, OverflowError) as error:
                raise OptionError(
                    f"PrometheusSink cannot listen at {self._host}:{self._wanted} ({error}). Give it another port; "
                    "port=0 takes one that is free."
                ) from error
        assert self.port is not None
        return self.port

    def write(self, record: Record) -> None:
        """Keep the last value of every metric as it is; `collect` makes gauges of them."""
        self.start()
        strategy, rank = "" if record.strategy is None else utf8_text(record.strategy), str(record.rank)
        found = {name: value if type(value) is float else _last(value) for name, value in record.metrics.items()}
        progress = {"step": record.step or 0, "epoch": record.epoch}  # one gauge for all hook points; of None, none
        with self._lock:
            self._newest.setdefault((strategy, rank, utf8_text(record.point)), {}).update(found)
            self._newest[strategy, rank, ""] = progress

    def collect(self) -> Iterator[Any]:
        """Yield the gauges for ``prometheus_client``; metrics whose names become the same share one."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            newest = {labels: dict(values) for labels, values in self._newest.items()}
        families: dict[str, Any] = {}
        for labels, values in newest.items():
            for one in values_in(Record(values, 0, ""), reserved=_PROGRESS if labels[-1] else ()):
                for metric, value in as_numbers(one.name, one.value).items():
                    name = "hookline_" + _FORBIDDEN.sub("_", metric)
                    if name not in families:
                        families[name] = GaugeMetricFamily(name, f"The newest {metric}", labels=_LABELS)
                    families[name].add_metric([metric, *labels], value)
        yield from families.values()

    def set_run_context(self, **context: Any) -> None:
        """Remove the gauges of another run, and listen."""
        super().set_run_context(**context)
        self.start()

    def end_run(self) -> None:
        with self._lock:
            self._newest.clear()

    def close(self) -> None:
        """Stop listening. May be called more than once."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        self._server = self._thread = None


def _last(value: Any) -> Any:
    return to_plain(value[-1] if isinstance(value, StepSeries) and value else value)
