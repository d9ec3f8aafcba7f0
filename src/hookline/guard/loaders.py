"""Read the training data again without touching the run's loader; find its samplers, datasets and generators.

For interventions, `ModelDataContext` (guard/model_context.py) and its subclass of the loops (training/run.py) call
`copy_loader` with a `private_generator`. The finders (``…_of``, `generators_on`) are called by `roots_of` of
guard/snapshot.py, ``HookManager.fire``, training/state.py (checkpoints), training/experiment.py and training/ranks.py.

The run's loader must never be iterated here: that would move its generator, end a running epoch early where workers
persist, and use up what can be read only once. Checkpoints have the states of `generators_of_loader` by number, and the
count of `num_shuffles`: another order, or a generator more, is another format (training/state.py). The names of
`samplers_of` begin with "loader", by which guard/walk.py knows where to leave out the data. Tests:
tests/guard/test_guard_loaders.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from hookline.errors import LifecycleError
from hookline.guard.rng import GENERATOR_TYPES, kept_rng, run_seed

_SHUFFLES: Final[WeakKeyDictionary[nn.Module, int]] = WeakKeyDictionary()
"""How many generators the interventions of each model have had. The number is part of the seed, so every shuffle
differs from the one before; checkpoints keep it (training/state.py), so a resumed run shuffles as the first would
have."""

# -- parts of a loader ---------------------------------------------------------------------------------------------


def samplers_of(loader: Any) -> dict[str, Any]:
    """Return the samplers of a loader by their names in messages; one that has two names comes once, with the first."""
    batches = getattr(loader, "batch_sampler", None)
    named = {
        "loader.sampler": getattr(loader, "sampler", None),
        "loader.batch_sampler": batches,
        "loader.batch_sampler.sampler": getattr(batches, "sampler", None),
    }
    first = {id(sampler): name for name, sampler in reversed(named.items())}
    return {name: sampler for name, sampler in named.items() if sampler is not None and first[id(sampler)] == name}


def generators_on(thing: Any) -> list[Any]:
    """Return the generators among the attributes of ``thing``."""
    return [value for value in getattr(thing, "__dict__", {}).values() if isinstance(value, GENERATOR_TYPES)]


def datasets_of(dataset: Any) -> list[Any]:
    """Return a dataset and those it is made of (subsets, concatenations)."""
    parts = [dataset]
    for part in parts:
        held = getattr(part, "__dict__", {})
        several = held.get("datasets")
        below = [held.get("dataset"), *(several if isinstance(several, list | tuple) else ())]
        parts += [one for one in below if hasattr(one, "__dict__") and not any(one is known for known in parts)]
    return parts


def generators_of_dataset(dataset: Any) -> list[Any]:
    """Return the generators of a dataset and of those it is made of."""
    return [generator for part in datasets_of(dataset) for generator in generators_on(part)]


def generators_of_loader(loader: Any) -> list[Any]:
    """Return the generators of a loader, its samplers and its dataset, each once.

    The order is the same in every process: a checkpoint has their states by number.
    """
    if loader is None:
        return []
    found = [one for part in (loader, *samplers_of(loader).values()) for one in generators_on(part)]
    if isinstance(loader, DataLoader):
        found += generators_of_dataset(loader.dataset)
    return list({id(generator): generator for generator in found}.values())


# -- the data again, for interventions -----------------------------------------------------------------------------


def num_shuffles(model: nn.Module) -> int:
    """Return how many generators the interventions of a model have had."""
    return _SHUFFLES.get(model, 0)


def set_num_shuffles(model: nn.Module, number: int) -> None:
    """Continue counting the generators of a model's interventions from ``number``."""
    _SHUFFLES[model] = number


def private_generator(model: nn.Module) -> torch.Generator:
    """Return a generator that no training draws from, another one at each call."""
    number = num_shuffles(model)
    set_num_shuffles(model, number + 1)
    return torch.Generator().manual_seed((run_seed() * 1_000_003 + number) % 2**63)


def copy_loader(loader: Any, generator: torch.Generator, *, shuffle: bool) -> Iterable[Any]:
    """Return another loader with the batches of ``loader``, in the order of the dataset or shuffled.

    It reads in this process: num_workers, and the options that go with workers (worker_init_fn, persistent_workers,
    timeout, …), are left out on purpose. So a firing starts no processes, which could outlive it, and what a dataset
    draws while it is read comes from the streams of this process, which are put back after the firing.
    """
    if isinstance(loader, list | tuple):
        order = torch.randperm(len(loader), generator=generator).tolist() if shuffle else range(len(loader))
        return [loader[index] for index in order]
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise LifecycleError(_unreadable_message(loader))
    indices, sizes = _indices_of(loader)
    if shuffle:
        indices = [indices[place] for place in torch.randperm(len(indices), generator=generator).tolist()]
    source = _batching_of(loader)
    batches: dict[str, Any] = {"batch_size": source.batch_size, "sampler": indices, "drop_last": source.drop_last}
    if sizes is not None:
        rest = iter(indices)
        batches = {"batch_sampler": [list(islice(rest, size)) for size in sizes]}
    return DataLoader(
        loader.dataset,
        **batches,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=generator,  # without one, each iteration draws a seed from the stream of the run
    )


def _unreadable_message(loader: Any) -> str:
    if loader is None:
        return "The training data is asked for, and there is no loader. Next: ModelDataContext(..., loader=loader)."
    found = type(getattr(loader, "dataset", loader)).__name__
    return (
        f"The training data is asked for again, and {found!r} can only be iterated: that would take batches away from "
        "training. Next: pass a DataLoader over a dataset with a length, a list of batches, or shuffled_loader=."
    )


def _batching_of(loader: DataLoader[Any]) -> Any:
    """Return the object that knows batch size and sampler: torch's batch sampler, or the loader itself.

    The batch sampler comes first, as a loader made by ``batch_sampler=BatchSampler(…)`` has batch_size None and a
    sampler that it does not use.
    """
    return loader.batch_sampler if type(loader.batch_sampler) is BatchSampler else loader


def _indices_of(loader: DataLoader[Any]) -> tuple[Sequence[Any], list[int] | None]:
    """Return the indices that a loader reads, and the sizes of its batches where those differ."""
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        read = [list(batch) for batch in _read(batches)]
        return list(chain.from_iterable(read)), list(map(len, read))
    sampler: Any = _batching_of(loader).sampler
    whole = (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if whole or type(sampler) is SequentialSampler:
        return range(len(sampler.data_source)), None
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices), None
    return _read(sampler), None


def _read(sampler: Any) -> list[Any]:
    """Return what a sampler of any kind gives, as many as its length says, and leave its generators where they are.

    A sampler without a length is refused, since it may have no end.
    """
    if not hasattr(sampler, "__len__"):
        raise LifecycleError(
            f"The training data is asked for again, and {type(sampler).__name__!r} has no length: it may have no end. "
            "Next: give it a __len__, or pass shuffled_loader=."
        )
    inner = getattr(sampler, "sampler", None)  # of a batch sampler; the copy shares it
    with kept_rng(generators=[*generators_on(sampler), *generators_on(inner)]):
        return list(islice(copy.copy(sampler), len(sampler)))
