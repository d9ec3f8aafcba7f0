"""What training itself goes by, as a checkpoint holds it: model, optimizer and the like, the experiment's own, streams.

Takes the building blocks of a run, hands plain values to `Saving`; also of the run as it was before the epoch, where a
hook may go back to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hookline.guard.guard import rollback
from hookline.training.checkpoints.model_state import ModelState, check_state, load_state, scalars_of, state_of
from hookline.training.checkpoints.random_streams import set_streams, streams
from hookline.training.hook_state import copied
from hookline.training.loops.extra_state import Attributes

if TYPE_CHECKING:
    from hookline.training.checkpoints.user_state import OwnState
    from hookline.training.loops.experiment_adapter import Blocks
    from hookline.training.loops.gradient_retention import Demand
    from hookline.training.manager import HookManager

__all__ = ["CoreState"]

_STATES: Final = ("optimizer", "scheduler", "scaler")


class CoreState:
    """What decides how training goes on, hooks apart."""

    def __init__(self, blocks: Blocks, own: OwnState) -> None:
        self._blocks = blocks
        self._own = own
        self._scalars = scalars_of(blocks.model)

    def save(self, manager: HookManager | None) -> dict[str, Any]:
        """Aliases of what is there."""
        blocks = self._blocks
        # The usual step sets gradients to zero first; hooks, and a step of one's own, may look at those of before.
        looked_at = blocks.has_own_step or (manager is not None and bool(manager.hooks))
        return {
            "model": ModelState(blocks.model).save(gradients=looked_at, before=self._scalars),
            **{name: state_of(getattr(blocks, name), name) for name in _STATES},
            "own": self._own.save(),
            "streams": streams(blocks.model),
        }

    def before_epoch(self, demand: Demand | None, manager: HookManager | None) -> dict[str, Any] | None:
        """The run as it was before the epoch, where a hook may go back to it: by going there, and coming back."""
        blocks = self._blocks
        if demand is None or demand.pre_epoch is None:
            return None
        attributes = Attributes(blocks)
        try:
            with rollback(blocks.model, blocks.optimizer, demand.belongings.all_but_optimizer, blocks.scaler):
                demand.pre_epoch.restore()
                saved: dict[str, Any] = copied(self.save(manager))
                return saved
        finally:
            attributes.put_back()

    def check(self, saved: Mapping[str, Any], *, force: bool) -> None:
        """Refuse what does not fit; nothing is loaded."""
        ModelState(self._blocks.model).check(saved["model"], force=force)
        for name in _STATES:
            check_state(getattr(self._blocks, name), saved[name], name, force=force)
        self._own.check(saved["own"], force=force)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Have everything as it was, each tensor in its place."""
        blocks = self._blocks
        ModelState(blocks.model).load(saved["model"])
        for name in _STATES:
            load_state(getattr(blocks, name), saved[name])
        self._own.load(saved["own"])
        set_streams(saved["streams"], blocks.model)
