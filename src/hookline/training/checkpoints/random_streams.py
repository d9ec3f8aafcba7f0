"""Save random streams, and set them again.

The other files of this folder call it. The streams are those of torch, NumPy, Python and the generators of a run, and
two of hooks: the stream that NumPy uses while hooks fire, and the count of shuffles that interventions have made.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hookline.errors import HooklineWarning, ResumeError
from hookline.guard import loaders, rng
from hookline.messages import caller_stacklevel

__all__ = ["generator_states", "set_generators", "set_streams", "streams"]


def streams(model: nn.Module) -> dict[str, Any]:
    """Return the states of the random streams of the process; about 150 µs."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": rng.cuda_states(),
        "numpy": rng.numpy_state(),
        "python": random.getstate(),
        "hooks": rng.hook_stream(),
        "shuffles": loaders.num_shuffles(model),
    }


def set_streams(states: Mapping[str, Any], model: nn.Module) -> None:
    """Set the random streams of the process."""
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None:
        _set_cuda(states["cuda"])
    rng.set_numpy_state(states["numpy"])
    random.setstate(states["python"])
    rng.set_hook_stream(states["hooks"])
    loaders.set_num_shuffles(model, states["shuffles"])


def _set_cuda(states: Sequence[torch.Tensor]) -> None:
    if not torch.cuda.is_available():
        _warn("The run was on a GPU and goes on without one: what is drawn from now on is other than it would be.")
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    rng.set_cuda_states([state.cpu() for state in states])


# -- generators ----------------------------------------------------------------------------------------------------


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """Return the states of these generators."""
    return [rng.state_of(generator) for generator in generators]


def set_generators(generators: Sequence[Any], states: Sequence[Any], whose: str) -> None:
    """Set the states of these generators."""
    if len(generators) != len(states):
        raise ResumeError(
            f"The checkpoint has the states of {len(states)} generators of {whose}, and there are {len(generators)} "
            "here. Make the run as it was made when it was saved."
        )
    for generator, state in zip(generators, states, strict=True):
        try:
            rng.set_state(generator, state.cpu() if isinstance(state, torch.Tensor) else state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise ResumeError(
                f"A generator of {whose} is of another kind than when the run was saved ({error})."
            ) from error


def _warn(text: str) -> None:
    warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
