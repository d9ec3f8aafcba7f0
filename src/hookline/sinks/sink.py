"""What a destination of metrics is.

Takes flat dictionaries of metrics with the moment they belong to, from whoever reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MetricSink"]


class MetricSink:
    """Where metrics go; a base for sinks, of which ``emit`` is all that has to be written.

    Recipe::

        class Printer(hookline.MetricSink):
            def emit(self, metrics, epoch, hook_point):
                print(epoch, metrics)
    """

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Take in the metrics of one moment: numbers, 0-d tensors, lists and dictionaries, by ``"hook/metric"``."""
        raise NotImplementedError(f"{type(self).__name__} has to say what becomes of metrics: define emit().")

    def set_run_context(self, **context: Any) -> None:
        """A run begins, or another strategy of it; says which (``strategy=``, ``output_dir=``, …)."""

    def flush(self) -> None:
        """Whatever is held back goes out now."""
