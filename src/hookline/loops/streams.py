"""Random streams, as a checkpoint holds them.

Takes where they stand from torch, NumPy, Python and the generators of a run; hands plain values to `Saving`, and puts
the streams back there. Among them are two that hooks draw from: the stream that NumPy is lent while hooks fire, and
the count of shuffles that interventions have had.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from hookline.errors import HooklineWarning, ResumeError
from hookline.guard import loaders, rng, snapshot
from hookline.sites.receipt import outside

__all__ = ["generator_states", "generators_of_loader", "set_generators", "set_streams", "streams"]


def streams(model: nn.Module) -> dict[str, Any]:
    """Where the streams of the process stand; about 150 µs."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": rng._cuda_states(),
        "numpy": _numpy_state(),
        "python": random.getstate(),
        "lent": None if rng._Lent.stream is None else rng._Lent.stream.state,
        "shuffles": _shuffles(model),
    }


def set_streams(states: Mapping[str, Any], model: nn.Module) -> None:
    """Have them stand there."""
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None:
        _set_cuda(states["cuda"])
    _set_numpy(states["numpy"])
    random.setstate(states["python"])
    rng._Lent.stream = None  # begins where it always does, when a hook first fires
    if states["lent"] is not None:
        rng._Lent.stream = np.random.MT19937(0)
        rng._Lent.stream.state = states["lent"]
    loaders._DRAWN[model] = itertools.count(states["shuffles"])


def _shuffles(model: nn.Module) -> int:
    """How many generators interventions have had; a count can be read only by counting on."""
    counted = loaders._DRAWN.get(model)
    number = 0 if counted is None else next(counted)
    loaders._DRAWN[model] = itertools.count(number)
    return number


def _set_cuda(states: Sequence[torch.Tensor]) -> None:
    if not torch.cuda.is_available():
        _warn("The run was on a GPU and goes on without one: what is drawn from now on is other than it would be.")
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    rng._set_cuda_states([state.cpu() for state in states])


def _numpy_state() -> Any:
    state: Any = np.random.get_state(legacy=False)
    return state


def _set_numpy(state: Any) -> None:
    bits: Any = rng._NUMPY.get_bit_generator()
    if bits.state["bit_generator"] != state["bit_generator"]:
        rng._NUMPY.set_bit_generator(getattr(np.random, state["bit_generator"])())
    rng._set_numpy(state)


# -- generators ----------------------------------------------------------------------------------------------------


def generators_of_loader(loader: Any) -> list[Any]:
    """Those of a loader, its samplers and its dataset, in an order that is the same in every process."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [
        value
        for part in parts
        for value in getattr(part, "__dict__", {}).values()
        if isinstance(value, rng.GENERATOR_TYPES)
    ]
    if isinstance(loader, DataLoader):
        found += snapshot._generators_of_data(loader.dataset)
    return list({id(generator): generator for generator in found}.values())


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """Where they stand."""
    return [rng._state_of(generator) for generator in generators]


def set_generators(generators: Sequence[Any], states: Sequence[Any], whose: str) -> None:
    """Have them stand there."""
    if len(generators) != len(states):
        raise ResumeError(
            f"The checkpoint has the states of {len(states)} generators of {whose}, and there are {len(generators)} "
            "here. Make the run as it was made when it was saved."
        )
    for generator, state in zip(generators, states, strict=True):
        try:
            rng._set_state(generator, state.cpu() if isinstance(state, torch.Tensor) else state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise ResumeError(
                f"A generator of {whose} is of another kind than when the run was saved ({error})."
            ) from error


def _warn(text: str) -> None:
    warnings.warn(text, HooklineWarning, stacklevel=outside())
