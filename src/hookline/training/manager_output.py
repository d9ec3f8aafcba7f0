"""What becomes of metrics when hooks have returned them: flushed, handed to sinks, looked up, counted.

The half of `HookManager` that looks outwards, to loops that flush and to users who ask; `Records` does the work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from hookline.errors import HooklineWarning
from hookline.lifecycle.points import HookPoint
from hookline.training.firing import FiringReceipts, receipt_of

if TYPE_CHECKING:
    from hookline.error_policy import ErrorPolicy
    from hookline.sinks.fan_out import FanOut
    from hookline.training.firing import Done, Firing
    from hookline.training.metric_buffer import Records

__all__ = ["Reporting"]


class Reporting:
    """The part of `HookManager` that hands metrics on."""

    loop_type: str | None
    fired: Counter[str]
    _seconds: defaultdict[str, float]
    _global_step: int
    _records: Records
    _errors: ErrorPolicy
    _firing: Firing | None
    _done: Sequence[Done]

    # -- step metrics ------------------------------------------------------------------------------------

    def _flush_before(self, epoch: int | None) -> None:
        """What the steps before this one have left goes out."""
        before = self._global_step - 1
        if self.loop_type == "step":
            epoch = before
        elif epoch is None:
            epoch = self._records.axis or 0
        self._records.flush_steps(epoch, before)
        self._records.out.tell()

    def flush_step_metrics(self, epoch: int) -> dict[str, Any]:
        """Hand the metrics of all steps since the last time to the sinks, as lists; PRE_STEP first, then POST_STEP."""
        flushed = self._records.flush_steps(epoch, self._global_step)
        self._records.out.tell()
        return flushed

    # -- metrics -----------------------------------------------------------------------------------------

    def emit_metrics(self, metrics: Mapping[str, Any], step: int, point: HookPoint) -> None:
        """Hand metrics of the loop's own to the sinks."""
        self._records.emit(metrics, step, HookPoint.of(point), self._global_step)

    def get_last_metrics(self, point: HookPoint | None = None) -> dict[str, Any]:
        """What the hooks at a point have returned last; during a firing there, what they have returned so far.

        Args:
            point: None is the point that is firing; outside of a firing, the one that fired last.
        """
        return self._records.last(None if point is None else HookPoint.of(point), self._firing)

    @property
    def receipts(self) -> FiringReceipts:
        """What each hook of the last firing did: what it touched, what was put back, how long it took; as a table."""
        return FiringReceipts(receipt_of(*done) for done in self._done)

    @property
    def hook_errors(self) -> dict[str, int]:
        """How often each hook has raised."""
        return dict(self._errors.counts)

    @property
    def sink_errors(self) -> dict[str, int]:
        """How often each sink has failed."""
        return dict(self._records.out.errors)

    @property
    def fan_out(self) -> FanOut:
        """The log and the sinks."""
        return self._records.out

    def costs(self) -> dict[str, dict[str, float]]:
        """How often each hook was called and how long that took: ``count``, ``total_ms``, ``mean_ms``.

        By the clock of the host: work that a hook has left to a device is in ``manager.profiler`` alone.
        """
        total = {name: self._seconds[name] * 1e3 for name in self.fired}
        return {
            name: {"count": count, "total_ms": total[name], "mean_ms": total[name] / count}
            for name, count in self.fired.items()
        }

    # -- the end -----------------------------------------------------------------------------------------

    def flush_sinks(self) -> None:
        """The run is over: what is buffered goes out, and every sink writes what it holds back."""
        self._flush_rest()
        self._records.out.flush()
        self._records.out.tell()

    def _flush_rest(self) -> None:
        if self._records.steps:
            axis = max(self._global_step, 0) if self._records.axis is None else self._records.axis
            self._records.flush_steps(axis, self._global_step)

    def close(self) -> None:
        """No more will come: what is buffered goes out, sinks and log are closed. Once or more often."""
        self._flush_rest()
        self._records.out.close()
        self._records.out.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except HooklineWarning:  # where warnings are errors; what ended the block is what the user has to see
            if kind is None:
                raise
