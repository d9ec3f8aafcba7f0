"""A run at its beginning: what was given is checked, the model is in training mode, hooks and sinks are told."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineWarning, OptionError
from hookline.messages import caller_stacklevel, type_name
from hookline.training.loops.loop_run import Run
from hookline.training.manager import HookManager

if TYPE_CHECKING:
    from hookline.lifecycle.points import HookPoint
    from hookline.training.loops.experiment_adapter import Blocks

__all__ = ["start"]


def start(
    blocks: Blocks,
    manager: HookManager | None,
    *,
    points: frozenset[HookPoint],
    first: int,
    resume: bool,
    run_context: Mapping[str, Any] | None,
) -> Run:
    """A run at its beginning; one that goes on from another (``first`` over 0) leaves hooks as they are."""
    if manager is not None and not isinstance(manager, HookManager):
        raise OptionError(f"manager= is a HookManager(hooks=[...], sinks=[...]), got {type_name(manager)}.")
    if resume and first:
        raise OptionError(
            f"resume=True goes on where the run was saved, and first_{blocks.loop}={first} elsewhere: give one of them."
        )
    if not blocks.model.training:  # parts of a training model may be in evaluation mode on purpose
        blocks.model.train()
    if manager is not None:
        _prepare(manager, blocks.loop, anew=first == 0, run_context=run_context or {})
        for sentence in manager.will_fire(points):
            warnings.warn(sentence, HooklineWarning, stacklevel=caller_stacklevel())
    run = Run(blocks, manager)
    run.next_epoch = first
    if blocks.loop == "step":
        _check_step(run, first)
    return run


def _prepare(manager: HookManager, loop: str, *, anew: bool, run_context: Mapping[str, Any]) -> None:
    manager.set_loop_type(loop)
    if anew:
        manager.reset_all()
    if run_context:
        manager.set_run_context(**run_context)


def _check_step(run: Run, first: int) -> None:
    """Schedules go by the manager's count of steps, the loop by its own."""
    if run.manager is None:
        run.step = first - 1
    elif run.step != first - 1:
        raise OptionError(
            f"first_step={first} goes on from step {first - 1}, and the manager is at step {run.step}: have it load "
            "the state_dict() that it had then."
        )
