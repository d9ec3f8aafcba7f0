"""Train one experiment on several ranks: average its gradients, and give each rank its part of the data.

``hookline run`` calls `share_experiment` under torchrun, after the experiment was made and moved to its device. The
loops and checkpoints look inside the model by `bare_model`. The parts of the data are of one length on every rank, so
that all ranks make the same number of steps: where the data do not divide evenly, the first are given out twice. A
`DataLoader` gets torch's `DistributedSampler`; what that cannot share out, an experiment shares out itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hookline.distributed.ranks import rank_names
from hookline.errors import OptionError, RankError
from hookline.guard.loaders import samplers_of
from hookline.messages import type_name
from hookline.sites.wrappers import inner_key, unwrap
from hookline.training.experiment import Experiment

if TYPE_CHECKING:
    from hookline.lifecycle.ranks import OneProcess

_COPIED: Final = (
    "batch_size", "drop_last", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator",
    "multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip
"""The options of a DataLoader that say nothing of the order of the samples."""
_SHARE_YOURSELF: Final = (
    "Next: give it a DistributedSampler; or have it give out the part of each rank, and say so in the experiment: "
    "shares_data = True; or use a DataLoader without a sampler, or a list of batches."
)


def share_experiment(experiment: Experiment, *, rank: int, ranks: int, seed: int) -> None:
    """Let each of several ranks train its part: wrap the model, replace the loader, in place.

    An experiment that has done so itself keeps what it has: a model that is a `DistributedDataParallel` or was given
    to `fully_shard`, a loader with a `DistributedSampler`, an experiment with ``shares_data = True``.
    """
    if not _is_parallel(experiment.model) and any(p.requires_grad for p in experiment.model.parameters()):
        experiment.model = _wrapped(experiment.model)
    if experiment.shares_data:
        return
    if experiment.has_own("get_loader"):
        raise OptionError(f"The experiment has a get_loader() of its own. {_SHARE_YOURSELF}")
    experiment.loader = share_loader(experiment.loader, rank=rank, ranks=ranks, seed=seed)


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


def share_loader(loader: Any, *, rank: int, ranks: int, seed: int) -> Any:
    """Return a loader of this rank's part of the data; `loader` itself if it gives out parts already.

    A `DataLoader` keeps its batch size: the batch of a step of all ranks is as many times larger. Of a list of batches
    each rank gets every n-th.
    """
    if loader is None or any(isinstance(sampler, DistributedSampler) for sampler in samplers_of(loader).values()):
        return loader
    if isinstance(loader, list | tuple):
        each = -(-len(loader) // ranks)
        return [loader[(rank + number * ranks) % len(loader)] for number in range(each)]
    usual = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
    if usual and type(loader.sampler) is RandomSampler:
        usual = not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)
    if not usual or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise OptionError(
            f"The training data, {type_name(loader)}, are not batches of a whole dataset, in its order or shuffled, "
            f"which is all that hookline shares out. {_SHARE_YOURSELF}"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, ranks, rank, shuffle=type(loader.sampler) is RandomSampler, seed=seed
    )
    options: dict[str, Any] = {name: getattr(loader, name) for name in _COPIED if getattr(loader, name, "") != ""}
    return DataLoader(loader.dataset, sampler=sampler, **options)
