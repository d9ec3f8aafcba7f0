"""Put the states of all ranks of a host's run into one dictionary, and find that of this rank in it again.

`host_state` calls it where there are several ranks: hosts write the dictionary of rank 0 alone, and every rank loads
that. What is the same on all ranks is in it once, beside the rest of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.errors import CheckpointError
from hookline.training.rank_checkpoint import local_parts, map_dicts, place_parts, rank_digest
from hookline.tree import map_tensors

if TYPE_CHECKING:
    from hookline.lifecycle.ranks import OneProcess

__all__ = ["choose_state", "gather_states", "mark_state"]

_Path = tuple[str, ...]
_AWAY: Final = "\x1faway"
"""The key of a tensor that was not on the CPU: each rank puts it on its own device."""
_SINKS: Final = ("manager", "sinks")
"""Of rank 0, which alone writes."""


def mark_state(state: dict[str, Any], ranks: OneProcess) -> dict[str, Any]:
    """Return the state of this rank alone, with its number in it."""
    about = {"count": ranks.size, "rank": ranks.rank}
    return {**(state if ranks.is_single else _portable(state)), "ranks": about}


def gather_states(make: Callable[[], dict[str, Any]], ranks: OneProcess) -> dict[str, Any]:
    """Return the states of all ranks, the same on each; every rank has to call it. What fails on one, fails on all."""
    made: dict[str, Any] = {}
    ranks.together("saving the state of hooks", lambda: made.update(make()))
    own = _pieces(_portable(made))
    said = ranks.gather({path: _digest(piece, ranks.rank) for path, piece in own.items()}, "comparing states of hooks")
    if ranks.is_lost:
        return mark_state(made, ranks)
    differing = [path for path in own if path != _SINKS and len({one.get(path) for one in said}) > 1]
    parts = ranks.gather([(path, own[path]) for path in differing], "states of hooks of each rank")
    by_rank = [_joined(dict(one)) for one in parts]
    return {**_merged(_joined(own), by_rank[0]), "ranks": {"count": ranks.size, "by_rank": by_rank}}


def choose_state(state: Mapping[str, Any], model: nn.Module, rank: int, count: int) -> tuple[dict[str, Any], str]:
    """Return the state that is this rank's, and a sentence if that is not all that it had; nothing if it is.

    Args:
        state: What ``mark_state`` or ``gather_states`` returned, with any number of ranks.
        model: Whose layout sharded tensors get, and whose device the others.
        rank: This rank.
        count: How many ranks go on.
    """
    about = state.get("ranks") or {"count": count, "rank": rank}  # of a version that did not tell
    sentence = ""
    chosen = {name: part for name, part in state.items() if name != "ranks"}
    if "by_rank" not in about:
        sentence = _of_one_rank(about["rank"], about["count"], rank, count)
    elif about["count"] == count:
        chosen = _merged(chosen, about["by_rank"][rank])
    else:
        differing = _pieces(about["by_rank"][0])
        chosen = _without(chosen, differing)
        sentence = _of_other_ranks(about["count"], count, differing) if rank == 0 else ""
    return _at_home(chosen, model), sentence


def _of_one_rank(saved: int, before: int, rank: int, now: int) -> str:
    if before != now and rank == 0:
        return (
            f"The state of the hooks is of {'one process' if before == 1 else f'rank {saved} of {before}'}, and the "
            f"run goes on with {now}: {'every rank begins' if now > 1 else 'it goes on'} with that state."
        )
    if before == now and saved != rank:
        return (
            f"The state of the hooks is of rank {saved} alone, and rank {rank} goes on with it. Next: save on every "
            "rank, by state_dict(all_ranks=True)."
        )
    return ""


def _of_other_ranks(before: int, now: int, differing: Mapping[_Path, Any]) -> str:
    hooks = [path[-1] for path in differing if path[:-1] == ("manager", "hooks")]
    others = [words for path, words in _LOST.items() if path in differing]
    begins = [*([f"the hooks {', '.join(hooks)}"] if hooks else []), *others]
    told = f" Not the same on all ranks, and begun anew: {'; '.join(begins)}." if begins else ""
    return f"The state of the hooks was saved by {before} ranks, and the run goes on with {now}.{told}"


_LOST: Final[dict[_Path, str]] = {
    ("manager", "step_metrics"): "metrics of steps that were not written yet",
    ("gradients",): "mean gradients of the epoch",
    ("held",): "gradients of the last step",
}


def _without(state: dict[str, Any], differing: Mapping[_Path, Any]) -> dict[str, Any]:
    """Return ``state`` without what was not the same on all ranks."""
    manager = dict(state["manager"])
    manager["hooks"] = {
        name: one for name, one in manager["hooks"].items() if ("manager", "hooks", name) not in differing
    }
    if ("manager", "step_metrics") in differing:
        manager["step_metrics"] = {}
    found = {**state, "manager": manager}
    if ("run",) in differing:  # the mean loss of the epoch goes on without the steps before
        found["run"] = {**state["run"], "losses": (None, 0), "accuracies": (None, 0)}
    if ("gradients",) in differing:
        found["gradients"] = {**state["gradients"], "gradients": None}
    return {**found, "held": {}} if ("held",) in differing else found


# -- pieces ------------------------------------------------------------------------------------------------------------


def _pieces(state: Mapping[str, Any]) -> dict[_Path, Any]:
    """Return the parts that are compared: each hook, the rest of the manager, everything else."""
    found: dict[_Path, Any] = {}
    for name, part in state.items():
        for key, one in part.items() if name == "manager" else [(None, part)]:
            if key == "hooks":
                found |= {(name, key, hook): kept for hook, kept in one.items()}
            else:
                found[(name,) if key is None else (name, key)] = one
    return found


def _joined(pieces: Mapping[_Path, Any]) -> dict[str, Any]:
    """Return the state of which these are the pieces."""
    found: dict[str, Any] = {}
    for path, piece in pieces.items():
        inner = found
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = piece
    return found


def _merged(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found = _joined({**_pieces(state), **_pieces(own)})
    found["manager"].setdefault("hooks", {})  # a run without hooks has no pieces there
    return found


def _digest(piece: Any, rank: int) -> Any:
    try:
        return rank_digest(piece)
    except CheckpointError:  # something that only pickle can save: not compared, so each rank keeps its own
        return f"rank {rank}"


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
