"""Put the state of hooks, schedules, sinks and sums into a dictionary for a host's checkpoint, and load it again.

`HostRun` calls it. Everything in the dictionary is plain or a tensor, so that any checkpoint can hold it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import HooklineWarning, LifecycleError
from hookline.integrations.rank_states import choose_state, gather_states, mark_state
from hookline.messages import caller_stacklevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.training.run import Run

__all__ = ["check_state", "load_state", "save_state"]

_FORMAT: Final = 2
"""A later one that cannot be read by this code has a higher number. 1 did not tell of which rank it is."""
_PARTS: Final = ("format", "loop", "run", "manager", "gradients", "held")


def save_state(run: Run, held: Callable[[], Any], *, within: bool, all_ranks: bool) -> dict[str, Any]:
    """Return the state of ``run``.

    Args:
        run: The run.
        held: Returns the gradients that are held for the next step.
        within: Whether an epoch has begun and is not over.
        all_ranks: Whether every rank calls this, and gets the states of all; else it is the state of this rank.
    """
    ranks = run.manager.ranks

    def make() -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "loop": run.loop,
            "run": run.state_dict(within=within),
            "manager": run.manager.state_dict(),
            "gradients": run.retention.state_dict(),
            "held": held(),
        }

    return gather_states(make, ranks) if all_ranks and not ranks.is_single else mark_state(make(), ranks)


def check_state(state: Mapping[str, Any], loop: str) -> None:
    """Raise if ``state`` cannot be loaded into a run that counts ``loop``."""
    missing = [name for name in _PARTS if name not in state]
    if missing:
        raise LifecycleError(f"load_state_dict() takes what state_dict() gave; this has no {', '.join(missing)}.")
    if state["format"] > _FORMAT or state["loop"] != loop:
        raise LifecycleError(
            f"The state is of loop={state['loop']!r} in format {state['format']}, and this run has loop={loop!r} and "
            f"format {_FORMAT}. Next: make it with the same loop= and version of hookline."
        )


def load_state(run: Run, state: Mapping[str, Any], step: int | None) -> Any:
    """Load this rank's part of ``state``, and return the gradients that were held.

    If the host says that it goes on after another ``step``, schedules follow the host.
    """
    manager = run.manager
    state, sentence = choose_state(state, run.experiment.model, manager.ranks.rank, manager.ranks.size)
    if sentence:
        warnings.warn(sentence, HooklineWarning, stacklevel=caller_stacklevel())
    manager.load_state_dict(state["manager"])
    run.retention.load_state_dict(state["gradients"])
    run.load_state_dict(state["run"])
    if step is not None and manager.global_step != step - 1:
        warnings.warn(
            f"The state of the hooks is of {manager.global_step + 1} steps, and the run goes on after {step}; "
            "schedules follow the run.",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
        )
        manager.global_step = step - 1
    return state["held"]
