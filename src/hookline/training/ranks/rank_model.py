"""Average gradients over ranks around a model that looks as it did before.

`share_experiment` wraps the model of an experiment; the loops and checkpoints look inside by `bare_model`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["RankModel", "bare_model"]


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
