"""What ``consecutive`` and ``parameter_delta`` share: a vector of this report beside that of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.analyses._shared import Work, work_of
from hookline.lifecycle.points import HookPoint

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["SinceLast"]


class SinceLast(Analysis):
    """Compares a vector with what it was at the last report; nothing the first time, or if its size is another."""

    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS
    kept = ("previous",)
    previous: Tensor | None

    def __init__(self) -> None:
        self.reset()

    def vector(self, work: Work) -> Tensor | None:
        """What is compared; None if there is none, which is kept in mind as such."""
        raise NotImplementedError

    def compared(self, now: Tensor, before: Tensor) -> dict[str, Any]:
        """The metrics."""
        raise NotImplementedError

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Compare, and keep this one for the next time."""
        now = self.vector(work_of(ctx))
        before, self.previous = self.previous, now
        if now is None or before is None or before.shape != now.shape:
            return None
        return self.compared(now, before.to(now.device))

    def reset(self) -> None:
        """Another run begins."""
        super().reset()
        self.previous = None
