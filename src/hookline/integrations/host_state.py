"""Put the state of hooks, schedules, sinks and sums into a dictionary for a host's checkpoint, and load it again.

`HostRun` calls it. Everything in the dictionary is plain or a tensor, so that any checkpoint can hold it. Hosts write
the dictionary of rank 0 alone, and every rank loads that: it may have the states of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.error_policy import warn_user
from hookline.errors import LifecycleError
from hookline.training.checkpoints import local_parts, map_dicts, place_parts
from hookline.tree import map_tensors

if TYPE_CHECKING:
    from hookline.training.run import Run

_PARTS: Final = ("loop", "run", "manager", "gradients", "held", "ranks")
_AWAY: Final = "\x1faway"
"""The key of a tensor that was not on the CPU: each rank puts it on its own device."""


def save_state(run: Run, held: Mapping[int, Tensor], *, within: bool, all_ranks: bool) -> dict[str, Any]:
    """Return the state of ``run``.

    Args:
        run: The run.
        held: The gradients that are kept for the next step, by the place of their parameter.
        within: Whether an epoch has begun and is not over.
        all_ranks: Whether every rank calls this, and gets the states of all; else it is the state of this rank.
    """
    ranks = run.manager.output.ranks

    def make() -> dict[str, Any]:
        return _portable(
            {
                "loop": run.loop,
                "run": run.state_dict(within=within),
                "manager": run.manager.state_dict(),
                "gradients": run.retention.state_dict(),
                "held": dict(held),
            }
        )

    own: dict[str, Any] = {}
    if all_ranks and not ranks.is_single:  # what fails on one, fails on all
        ranks.together("saving the state of hooks", lambda: own.update(make()))
        if not ranks.is_lost:
            by_rank = ranks.gather(own, "states of hooks of each rank")
            return {**by_rank[0], "ranks": {"count": ranks.size, "by_rank": by_rank}}
    return {**(own or make()), "ranks": {"count": ranks.size, "rank": ranks.rank}}


def check_state(state: Mapping[str, Any], loop: str) -> None:
    """Raise if ``state`` cannot be loaded into a run that counts ``loop``."""
    missing = [name for name in _PARTS if name not in state]
    if missing:
        raise LifecycleError(f"load_state_dict() takes what state_dict() gave; this has no {', '.join(missing)}.")
    if state["loop"] != loop:
        raise LifecycleError(
            f"The state is of loop={state['loop']!r}, and this run has loop={loop!r}. Next: make it with the same."
        )


def load_state(run: Run, state: Mapping[str, Any], step: int | None) -> Any:
    """Load this rank's part of ``state``, and return the gradients that were kept.

    If the host says that it goes on after another ``step``, schedules follow the host.
    """
    manager = run.manager
    state, sentence = _choose_state(state, run.experiment.model, manager.output.ranks.rank, manager.output.ranks.size)
    if sentence:
        warn_user(sentence)
    manager.load_state_dict(state["manager"])
    run.retention.load_state_dict(state["gradients"])
    run.load_state_dict(state["run"])
    if step is not None and manager.global_step != step - 1:
        warn_user(
            f"The state of the hooks is of {manager.global_step + 1} steps, and the run continues after {step}; "
            "schedules follow the run."
        )
        manager.global_step = step - 1
    return state["held"]


# -- of several ranks ------------------------------------------------------------------------------------------------


def _choose_state(state: Mapping[str, Any], model: nn.Module, rank: int, count: int) -> tuple[dict[str, Any], str]:
    """Return the state that is this rank's, and a sentence if it goes on with that of another; nothing if not.

    Args:
        state: What `save_state` returned, with any number of ranks.
        model: Whose layout sharded tensors get, and whose device the others.
        rank: This rank.
        count: How many ranks go on.
    """
    about, sentence = state["ranks"], ""
    has_all = "by_rank" in about and about["count"] == count
    chosen = about["by_rank"][rank] if has_all else {name: part for name, part in state.items() if name != "ranks"}
    if about["count"] != count and rank == 0:
        sentence = (
            f"The state of the hooks was saved by {about['count']} ranks, and the run continues with {count}: all "
            f"continue with the state of rank {about.get('rank', 0)}."
        )
    elif not has_all and about["count"] == count and about["rank"] != rank:
        sentence = (
            f"The state of the hooks is only of rank {about['rank']}, and rank {rank} continues with it. Next: save on "
            "every rank, by state_dict(all_ranks=True)."
        )
    return _at_home(chosen, model), sentence


# -- tensors -----------------------------------------------------------------------------------------------------------


def _portable(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with tensors that any rank can read: parts of sharded ones, on the CPU."""
    found: dict[str, Any] = map_tensors(local_parts(state), lambda _, tensor: _to_cpu(tensor))
    return found


def _to_cpu(tensor: Tensor) -> Any:
    return tensor.detach() if tensor.device.type == "cpu" else {_AWAY: tensor.detach().cpu()}


def _at_home(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the state with tensors where this rank needs them."""
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    found = map_dicts(state, lambda one: one[_AWAY].to(device) if _AWAY in one else None)
    placed: dict[str, Any] = place_parts(found, parameters)
    return placed
