"""What a destination of metrics is.

Takes records from the fan-out; one method is enough for a sink of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hookline.errors import HookSignatureError, OptionError
from hookline.messages import type_name

if TYPE_CHECKING:
    from hookline.sinks.record import Record

__all__ = ["MetricSink", "check_sink", "hand"]


class MetricSink:
    """Where metrics go; a base for sinks, of which ``emit`` is all that has to be written.

    Recipe::

        class Printer(hookline.MetricSink):
            def emit(self, metrics, epoch, hook_point):
                print(epoch, metrics)

    A sink that wants to know more (the step, which values belong to which steps, the strategy) defines ``write``.
    """

    slow: ClassVar[bool] = False
    """Whether it would hold the training thread up: then it runs in a process of its own, which reads the log. It is
    made there anew from ``options()``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a class that could not take anything in: said here, it is not first said in the middle of a run."""
        if cls.emit is MetricSink.emit and cls.write is MetricSink.write:
            raise HookSignatureError(
                f"{cls.__name__} has to say what becomes of metrics: define emit(self, metrics, epoch, hook_point), "
                "or write(self, record)."
            )
        return super().__new__(cls)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Take in the metrics of one moment: numbers, lists and dictionaries, by ``"hook/metric"``."""
        raise NotImplementedError(f"{type(self).__name__} has to say what becomes of metrics: define emit().")

    def write(self, record: Record) -> None:
        """Take in a record; what the fan-out calls."""
        self.emit(dict(record.metrics), record.epoch, record.hook_point)

    def set_run_context(self, **context: Any) -> None:
        """A run begins, or another strategy of it; says which (``strategy=``, ``output_dir=``, …)."""

    def flush(self) -> None:
        """Whatever is held back goes out now."""

    def close(self) -> None:
        """No more will come: flush, and let go of files and connections. Called once or more often."""
        self.flush()

    def options(self) -> dict[str, Any]:
        """The arguments to make such a sink again in another process, as JSON has them; of sinks that are slow."""
        raise NotImplementedError(f"{type(self).__name__} is slow, so it has to say what it is made of: options().")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know, as JSON has it: how much of a file is written, say."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave: what was written after that goes."""


def check_sink(sink: Any, asked: str) -> None:
    """Raise unless this is an object with ``emit``; ``asked`` says who takes one."""
    if not callable(getattr(sink, "emit", None)) or isinstance(sink, type):
        call = f": call it, {sink.__name__}()" if isinstance(sink, type) else ""
        raise OptionError(
            f"{asked} with emit(metrics, epoch, hook_point), such as MemorySink(); got {type_name(sink)}{call}."
        )


def hand(sink: Any, record: Record) -> None:
    """Give a record to a sink, which may be one that knows ``emit`` alone."""
    if isinstance(sink, MetricSink):
        sink.write(record)
    else:
        sink.emit(dict(record.metrics), record.epoch, record.hook_point)
