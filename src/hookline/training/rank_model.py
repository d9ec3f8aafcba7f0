"""Average gradients over ranks around a model that looks as it did before.

`share_experiment` wraps the model of an experiment; the loops and checkpoints look inside by `bare_model`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookline.distributed._torch_distributed import is_joining
from hookline.distributed.ranks import rank_names
from hookline.errors import HooklineWarning, RankError
from hookline.messages import caller_stacklevel
from hookline.sites.wrappers import inner_key, unwrap

if TYPE_CHECKING:
    from hookline.lifecycle.ranks import OneProcess

__all__ = ["RankModel", "averaging_model", "bare_model", "check_alike", "warn_of_join"]


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


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`; the model itself if it is none.

    Recipe: ``bare_model(experiment.model).named_parameters()`` has the names that one process has.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


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
        warnings.warn(
            "The model is in model.join(), for ranks with different numbers of batches. Hooks exchange metrics at the "
            "same steps on every rank: a rank that runs out of batches waits for the others until the time-out ends "
            "the run. Next: give every rank as many batches: DistributedSampler(data, drop_last=True), or islice().",
            HooklineWarning,
            stacklevel=caller_stacklevel(),
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
            "made; or wrap that in DistributedDataParallel itself.",
            ranks=tuple(different),
        )
        ranks.agree_on(error)
        raise error
