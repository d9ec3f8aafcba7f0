"""Show a host's model, optimizer and data to the hooks, as the loops show those of an experiment.

`HostRun` makes a `HostExperiment` when a run begins, and a `Run` of it with `HostPasses` and `HostSchedule`.
Interventions train by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.sites.optimizers import unwrap_optimizer
from hookline.training.experiment import Experiment, whole_number
from hookline.training.run import Schedule
from hookline.training.state import Passes

__all__ = ["HostExperiment", "HostPasses", "HostSchedule"]

_PARTS: Final = ("optimizer", "scheduler", "scaler", "loader", "loss_fn")
"""What a host may have, by the names that ``requires`` of a hook uses."""


class HostExperiment(Experiment):
    """Hold a host's objects."""

    def __init__(self, model: Any, optimizer: Any, **parts: Any) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"A run begins with the nn.Module that is trained; got {type_name(model)}.")
        if optimizer is None:
            raise OptionError(
                "The run begins without an optimizer, and steps are steps of one. Next: hand it over, also where it "
                "is wrapped."
            )
        # Wrappers of optimizers skip steps and scale gradients by rules of the host; interventions train without them.
        super().__init__(model, unwrap_optimizer(optimizer), **parts)
        whole_number("accumulate", self.accumulate, 1)
        self.capabilities = {name for name in _PARTS if parts.get(name, optimizer) is not None}
        """What the host has."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Nothing: the host looks after what it has besides."""
        return {}


class HostPasses(Passes):
    """Give out the loader of the host, which tells samplers itself which epoch it is."""

    def take_loader(self, epoch: int) -> None:
        """Keep the loader that the host gave."""
        self.loader = self.experiment.loader

    def set_loader(self, loader: Any) -> None:
        """Show another loader from now on."""
        self.experiment.loader = self.loader = loader


class HostSchedule(Schedule):
    """Step the scheduler for an intervention that trains; for the run itself the host does it."""

    def step(self, per: str, loss: Any) -> None:
        """Step the scheduler for a step; leave the ends of epochs to the host."""
        if per == "step":
            super().step(per, loss)
