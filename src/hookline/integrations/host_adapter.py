"""Show a host's model, optimizer and data to the hooks, as the loops show those of an experiment.

`HostRun` makes one when a run begins; `Run`, `Contexts` and `GradientRetention` read it. Interventions train by it.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.sites.optimizers.optimizer_wrappers import unwrap_optimizer
from hookline.training.experiment import Experiment
from hookline.training.experiment_adapter import ExperimentAdapter, whole_number

__all__ = ["HostAdapter"]

_PARTS: Final = ("optimizer", "scheduler", "scaler", "loader", "loss_fn")
"""What a host may have, by the names that ``requires`` of a hook uses."""


class HostAdapter(ExperimentAdapter):
    """Read a host's objects; leave samplers, evaluation and the end of epochs to the host."""

    def __init__(self, loop: str, model: Any, optimizer: Any, **parts: Any) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"A run begins with the nn.Module that is trained; got {type_name(model)}.")
        # Wrappers of optimizers skip steps and scale gradients by rules of the host; interventions train without them.
        experiment = Experiment(model, unwrap_optimizer(optimizer), **parts)
        super().__init__(experiment, loop)
        self.capabilities = {name for name in _PARTS if parts.get(name, optimizer) is not None}
        """What the host has."""
        self.steps_of_scheduler = 1
        """How often the host steps its scheduler for one step of the optimizer."""

    @property
    def has_loss(self) -> bool:
        """True if the host told how it computes a loss."""
        return "loss_fn" in self.capabilities

    def take_loader(self, epoch: int) -> None:
        """Keep the loader that the host gave; the host tells samplers which epoch it is."""
        self.current_loader = self.loader

    def step_scheduler(self, per: str, loss: Any) -> None:
        """Step the scheduler for an intervention that trains; for the run itself the host does it."""
        if per == "step":
            for _ in range(self.steps_of_scheduler):
                super().step_scheduler(per, loss)

    def set_loader(self, loader: Any) -> None:
        """Show another loader from now on."""
        self.experiment.loader = self.current_loader = loader

    def _check(self) -> None:
        if self.optimizer is None:
            raise OptionError(
                "The run begins without an optimizer, and steps are steps of one. Next: hand it over, also where it "
                "is wrapped."
            )
        whole_number("accumulate", self.accumulate, 1)
