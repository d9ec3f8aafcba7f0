"""Give each rank its part of the training data.

`share_experiment` calls `share_loader` for the loader of an experiment. The parts are of one length on every rank, so
that all ranks make the same number of steps: where the data do not divide evenly, the first are given out twice, as
torch's `DistributedSampler` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from hookline.errors import OptionError
from hookline.guard.loaders import samplers_of
from hookline.guard.rng import RandomStates
from hookline.messages import type_name

__all__ = ["RankSampler", "has_rank_sampler", "share_loader"]

_OTHER_SEED: Final = 0x9E3779B9
"""What one epoch's seed differs from the next by; an odd number that is no usual distance of seeds."""
_COPIED: Final = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip
"""The options of a DataLoader that say nothing of which samples make a batch."""


class RankSampler(Sampler[Any]):
    """Give out every n-th index (or batch of indices) of another sampler, beginning with this rank's.

    All ranks read the whole of the other sampler with the same random streams, so that they agree on its order, and
    their parts are disjoint. Random streams of the run stay where they are.

    Recipe: ``DataLoader(dataset, sampler=RankSampler(RandomSampler(dataset), rank=0, ranks=2, seed=1))``.
    """

    def __init__(self, sampler: Any, *, rank: int, ranks: int, seed: int) -> None:
        self.sampler = sampler
        self.generator = getattr(sampler, "generator", None)  # where checkpoints look for the streams of a loader
        self._rank, self._ranks, self._seed = rank, ranks, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take another order for another epoch; the loops call it."""
        self._epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        before = RandomStates()
        try:
            _seed_all(self._seed + _OTHER_SEED * (self._epoch + 1))
            order = list(self.sampler)
        finally:
            before.restore()
        return iter(part_of(order, self._rank, self._ranks))

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self._ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch: rank and seed are those of the run that goes on."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._epoch = int(state["epoch"])


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)


def part_of(items: Sequence[Any], rank: int, ranks: int) -> list[Any]:
    """Return every n-th item, as many for each rank; the first items again where there are too few at the end."""
    if not items:
        return []
    each = -(-len(items) // ranks)
    return [items[(rank + number * ranks) % len(items)] for number in range(each)]


def has_rank_sampler(loader: Any) -> bool:
    """Return whether a loader gives each rank its own part already."""
    found = list(samplers_of(loader).values())
    found += [inner for sampler in found if (inner := getattr(sampler, "sampler", None)) is not None]
    return any(isinstance(sampler, DistributedSampler | RankSampler) for sampler in found)


def share_loader(loader: Any, *, rank: int, ranks: int, seed: int) -> Any:
    """Return a loader of this rank's part of the data; `loader` itself if it gives out parts already.

    A `DataLoader` keeps its batch size: the batch of a step of all ranks is as many times larger. Of a list of batches
    each rank gets every n-th.
    """
    if loader is None or has_rank_sampler(loader):
        return loader
    if isinstance(loader, list | tuple):
        if not loader:
            raise OptionError("The loader is an empty list: there are no batches to share out among the ranks.")
        return part_of(loader, rank, ranks)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise OptionError(_unshareable(loader))
    where = {"rank": rank, "ranks": ranks, "seed": seed}
    options: dict[str, Any] = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    if not options.get("pin_memory_device"):
        options.pop("pin_memory_device", None)
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return DataLoader(loader.dataset, batch_sampler=RankSampler(batches, **where), **options)
    source = loader if batches is None else batches
    options |= {"batch_size": source.batch_size, "drop_last": source.drop_last}
    return DataLoader(loader.dataset, sampler=RankSampler(source.sampler, **where), **options)


def _unshareable(loader: Any) -> str:
    what = f"a DataLoader of {type_name(loader.dataset)}" if isinstance(loader, DataLoader) else type_name(loader)
    return (
        f"The training data are {what}, which can only be iterated, so hookline cannot give each rank its part. Next: "
        "have it give out the part of torch.distributed.get_rank(), and say so in the experiment: shares_data = True; "
        "or use a DataLoader over a dataset with a length, or a list of batches."
    )
