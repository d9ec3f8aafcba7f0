"""Make an experiment of one process ready for several: average its gradients, and share out its data.

``hookline run`` calls `share_experiment` under torchrun, after the experiment was made and moved to its device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.training.experiment import Experiment
from hookline.training.rank_data import share_loader
from hookline.training.rank_model import RankModel

__all__ = ["share_experiment"]


def share_experiment(experiment: Any, *, rank: int, ranks: int, seed: int) -> None:
    """Let each of several ranks train its part: wrap the model, replace the loader, in place.

    An experiment that has done so itself keeps what it has: a model that is a `DistributedDataParallel` or was given
    to `fully_shard`, a loader with a `DistributedSampler`, an experiment with ``shares_data = True``.
    """
    if not _is_parallel(experiment.model) and any(p.requires_grad for p in experiment.model.parameters()):
        _set(experiment, "model", _wrapped(experiment.model))
    if getattr(experiment, "shares_data", False):
        return
    where = {"rank": rank, "ranks": ranks, "seed": seed}
    loader = getattr(experiment, "loader", None)
    shared = share_loader(loader, **where)
    if shared is not loader:
        _set(experiment, "loader", shared)
    get_loader = getattr(experiment, "get_loader", None)
    if get_loader is not None and getattr(get_loader, "__func__", None) is not Experiment.get_loader:
        _set(experiment, "get_loader", _sharing(get_loader, where))


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


def _set(experiment: Any, name: str, value: Any) -> None:
    try:
        setattr(experiment, name, value)
    except AttributeError as error:
        raise OptionError(
            f"Under torchrun the {name} of {type_name(experiment)} is replaced by one for this rank, and it cannot be "
            f"set ({error}). Next: let it be an ordinary attribute, or wrap the model in DistributedDataParallel and "
            "share out the data in the experiment itself (shares_data = True)."
        ) from None
