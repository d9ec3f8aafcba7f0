"""Train one experiment on several ranks: average its gradients, and give each rank its part of the data.

``hookline run`` calls `share_experiment` under torchrun, after the experiment was made and moved to its device. The
loops and checkpoints look inside the model by `bare_model`. The parts of the data are of one length on every rank, so
that all ranks make the same number of steps: where the data do not divide evenly, the first are given out twice, as
torch's `DistributedSampler` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from hookline.distributed._torch_distributed import is_joining
from hookline.distributed.ranks import rank_names
from hookline.error_policy import warn_user
from hookline.errors import OptionError, RankError
from hookline.guard.loaders import samplers_of
from hookline.guard.rng import RandomStates
from hookline.messages import type_name
from hookline.sites.wrappers import inner_key, unwrap
from hookline.training.experiment import Experiment

if TYPE_CHECKING:
    from hookline.lifecycle.ranks import OneProcess

_OTHER_SEED: Final = 0x9E3779B9
"""What one epoch's seed differs from the next by; an odd number that is no usual distance of seeds."""
_COPIED: Final = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip
"""The options of a DataLoader that say nothing of which samples make a batch."""


def share_experiment(experiment: Any, *, rank: int, ranks: int, seed: int) -> None:
    """Let each of several ranks train its part: wrap the model, replace the loader, in place.

    An experiment that has done so itself keeps what it has: a model that is a `DistributedDataParallel` or was given
    to `fully_shard`, a loader with a `DistributedSampler`, an experiment with ``shares_data = True``.
    """
    if not _is_parallel(experiment.model) and any(p.requires_grad for p in experiment.model.parameters()):
        experiment.model = _wrapped(experiment.model)
    if getattr(experiment, "shares_data", False):
        return
    where = {"rank": rank, "ranks": ranks, "seed": seed}
    loader = getattr(experiment, "loader", None)
    shared = share_loader(loader, **where)
    if shared is not loader:
        experiment.loader = shared
    get_loader = getattr(experiment, "get_loader", None)
    if get_loader is not None and getattr(get_loader, "__func__", None) is not Experiment.get_loader:
        experiment.get_loader = _sharing(get_loader, where)


def _sharing(get_loader: Any, where: dict[str, int]) -> Any:
    """Return the experiment's own function with this rank's part of the loader that it returns."""
    kept: list[Any] = []  # the last one given and its part: a loader with workers that persist is made once

    def get_part(epoch: int) -> Any:
        found = get_loader(epoch)
        if not kept or kept[0] is not found:
            kept[:] = [found, share_loader(found, **where)]
        return kept[1]

    return get_part


def _is_parallel(model: nn.Module) -> bool:
    """Return whether the ranks hold parts of the model, or average its gradients, by something of the experiment's."""
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return True
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    is_sharded = not names.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})
    return is_sharded or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _wrapped(model: nn.Module) -> RankModel:
    devices = {parameter.device for parameter in model.parameters()}
    on_one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    with torch.random.fork_rng(devices=[]):  # DDP draws nothing today; the run must not depend on it
        return RankModel(model, device_ids=[next(iter(devices))] if on_one_gpu else None)


# -- the model ---------------------------------------------------------------------------------------------------


class RankModel(DistributedDataParallel):
    """Average the gradients of all ranks; in all else, look like the model inside.

    Recipe: ``experiment.model = RankModel(experiment.model)``. A loss function that reads an attribute of the model
    finds it.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def averaging_model(model: nn.Module) -> nn.Module:
    """Return the `DistributedDataParallel` among the wrappers of a model; the model inside all of them if none is one.

    Recipe: ``averaging_model(prepared)`` is what a guarded step trains, so that its gradients are averaged over ranks.
    """
    inside: nn.Module | None = model
    while inside is not None and not isinstance(inside, DistributedDataParallel):
        key = inner_key(inside)
        inside = None if key is None else inside._modules[key]
    return unwrap(model) if inside is None else inside


def warn_of_join(model: nn.Module) -> None:
    """Warn if the model is in ``model.join()``: ranks may then make different numbers of steps, and hooks cannot."""
    if is_joining(model):
        warn_user(
            "The model is in model.join(), and hooks exchange metrics at the same steps on every rank: one that runs "
            "out makes the others wait. Next: give every rank as many batches: DistributedSampler(drop_last=True)."
        )


def check_alike(model: nn.Module, ranks: OneProcess) -> None:
    """Raise on every rank if the ranks have different weights after a step, though their gradients are averaged.

    The loops call it after the first step. It happens where an experiment trains the model that it made, and not
    ``experiment.model``, which `hookline run` has wrapped.
    """
    if not isinstance(model, RankModel):
        return
    with torch.no_grad():
        sums = torch.stack([parameter.double().sum() for parameter in model.parameters()]).cpu()
    said = ranks.gather([value.hex() for value in sums.tolist()], "comparing weights after the first step")
    different = [rank for rank, one in enumerate(said) if one != said[0]]
    if different:
        error = RankError(
            f"After the first step {rank_names(different)} had other weights than rank 0: the gradients were not "
            "averaged. Next: have the experiment train by self.model, and not by another name of the model that it "
            "made; or wrap that in DistributedDataParallel itself."
        )
        ranks.agreed_error = error
        raise error


# -- the data ----------------------------------------------------------------------------------------------------


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
        return part_of(loader, rank, ranks)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        data = f"a DataLoader of {type_name(loader.dataset)}" if isinstance(loader, DataLoader) else type_name(loader)
        raise OptionError(
            f"The training data are {data}, which can only be iterated. Next: have it give out the part of each rank, "
            "and say so in the experiment: shares_data = True; or use a dataset with a length, or a list of batches."
        )
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
