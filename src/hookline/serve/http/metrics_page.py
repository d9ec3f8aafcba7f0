"""Write ``GET /metrics``: the counts of the engine, its hooks and HTTP, in Prometheus' format.

The app asks for the page with ``engine.counts()`` and the figures of live hooks; the request gate observes the time
of every request. The registry is its own, so that nothing else of the process appears.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

__all__ = ["HookFigures", "Metrics"]

_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Of a request that generates, in seconds; prometheus_client's own end at 10."""

_NOW: Final = frozenset(
    {"requests_waiting", "requests_running", "captured_bytes_reserved", "captured_bytes_limit", "hooks"}
)
"""Counts of an engine that are of the moment; others only grow."""

HookFigures = tuple[Mapping[str, Any], Mapping[str, float]]
"""A live hook as ``GET /hooks`` shows it, and its own metrics."""


class Metrics:
    """Hold the registry, and write the page.

    Recipe: ``metrics.page(engine.counts(), [])``.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.seconds = Histogram(
            "hookline_http_request_duration_seconds",
            "From the first byte of a request to the last of its answer",
            ["method", "route", "status"],
            registry=self._registry,
            buckets=_BUCKETS,
        )
        """Of every request; `Gate` observes it."""
        self._now: list[Any] = []
        """The families of the moment."""
        self._registry.register(self)
        self.content_type = str(CONTENT_TYPE_LATEST)
        """The media type of the page."""

    def page(self, counts: Mapping[str, float], hooks: Sequence[HookFigures]) -> bytes:
        """Return the text."""
        self._now = [*_engine_families(counts), *_hook_families(hooks)]
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Any]:
        """Yield what the registry asks for beside its histogram."""
        yield from self._now


def _family(name: str, words: str, *, grows: bool, **options: Any) -> Any:
    return (CounterMetricFamily if grows else GaugeMetricFamily)(f"hookline_{name}", words, **options)


def _engine_families(counts: Mapping[str, float]) -> Iterator[Any]:
    for name, value in sorted(counts.items()):
        words = f"{name.replace('_', ' ')} of the engine, {'now' if name in _NOW else 'since its start'}"
        yield _family(f"engine_{name}", words, grows=name not in _NOW, value=float(value))


_OF_HOOKS: Final = (
    ("fired", "How often the hook ran", True),
    ("errors", "How often the hook raised", True),
    ("off", "1 if the hook is switched off because it raised", False),
    ("cost_us", "Microseconds of the host that one run takes, on average", False),
)


def _hook_families(hooks: Sequence[HookFigures]) -> Iterator[Any]:
    labels = ("hook", "name", "factory")
    named = [((hook["id"], hook["name"], hook["hook_factory"]), hook, metrics) for hook, metrics in hooks]
    for field, words, grows in _OF_HOOKS:
        family = _family(f"hook_{field}", words, grows=grows, labels=labels)
        for values, hook, _ in named:
            if hook[field] is not None:
                family.add_metric(values, float(hook[field]))
        yield family
    words = "What the hook itself measures since it was attached: a stat of a module, or of all if module is empty"
    found = _family("hook_metric", words, grows=False, labels=(*labels, "module", "stat"))
    for values, _, metrics in named:
        for metric, value in metrics.items():
            module, slash, stat = metric.partition("/")  # a metric of the hook as a whole has no module
            found.add_metric((*values, *((module, stat) if slash else ("", metric))), float(value))
    yield found
