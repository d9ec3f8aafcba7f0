"""Let a manager be one of several ranks: find the others, do what all have to do, leave when the run ends by an error.

`HookManager` derives from `RankMember`, which calls `RankSync`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hookline.error_policy import error_text
from hookline.lifecycle.rank_sync import RankSync

if TYPE_CHECKING:
    from hookline.lifecycle.firing_engine import FiringEngine
    from hookline.lifecycle.output import MetricOutput
    from hookline.lifecycle.plan import Plan

__all__ = ["RankMember"]


class RankMember:
    """What a manager does where there are several ranks; nothing in one process."""

    _engine: FiringEngine
    _output: MetricOutput
    _global_step: int
    _plan: Plan

    if TYPE_CHECKING:

        def _make_plan(self) -> None: ...

    @property
    def ranks(self) -> RankSync | None:
        """What keeps this rank together with the others; None in one process, and before the run has begun."""
        return self._engine.ranks

    @contextmanager
    def ending_with_ranks(self, *, is_exit: bool = False) -> Iterator[bool]:
        """End a run in the block: the other ranks are reached also if their group was destroyed since.

        Yields whether all ranks end it; if not, hooks must not wait for the others.

        With ``is_exit`` the process ends, for whatever reason: others may still train, and are not waited for long.
        """
        ranks = self._engine.ranks
        if ranks is None:
            yield True
            return
        with ranks.reach():
            ranks.meet_at_end(is_exit=is_exit)
            yield not ranks.is_lost

    def _check_ranks(self, ranks: RankSync) -> None:
        ranks.check(self._global_step)
        self._settle()

    def _settle(self) -> None:
        """Do what all ranks have to do about hooks that failed on any of them."""
        if self._engine.ranks is not None:
            self._engine.settle()
            self._drop_disabled()

    def _drop_disabled(self) -> None:
        """Plan anew without hooks that were switched off since."""
        off = self._engine.errors.disabled
        if off and not off <= self._plan.left_out.keys():
            self._make_plan()

    def leave_ranks(self, error: BaseException) -> Exception | None:
        """Exchange nothing more, since the run ends here by `error`; the loops of hookline call it.

        If all ranks end by it together, what they hold is still exchanged. The record log says what happened. Returns
        an error that names the rank that ended first, where this one only lost it.
        """
        if self._engine.ranks is None:
            return None
        found = self._engine.ranks.leave(error)
        self._output.note(error_text(found or error), self._global_step)
        return found
