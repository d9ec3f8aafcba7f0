"""Define `Site` and `OptimizerSite`: the place of a hook, and, while it fires, the moment.

Hooks that declare ``*, site`` get one at each firing; ``find`` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from hookline.sites.kinds import Kind


@dataclass(slots=True, unsafe_hash=True)  # frozen, one takes 1.9 µs to make instead of 0.4, at every firing
class Site:
    """A place where a hook sits, and the moment at which it fires.

    A hook that declares a keyword-only ``site`` is handed one at each firing:

        def hook(module, args, output, *, site):
            print(site.name, site.kind, site.call, site.step)
    """

    name: str
    """Dotted name in the model that was attached to; empty for that model itself."""
    module: nn.Module
    """The module."""
    kind: Kind | None = None
    """The kind of the hook that is firing; None in a listing."""
    call: int = 0
    """Which call of this module since its model's forward began: 0 for the first, 1 when it is reused, …"""
    step: int = -1
    """Which forward of the model, counted from 0 since the first hook came on; -1 before one began."""
    recompute: bool = False
    """Whether this forward only repeats an earlier one for activation checkpointing."""
    inputs: tuple[str, ...] = ()
    """For gradient hooks: which input each entry of ``grad_input`` belongs to ("0", "hidden_states", …)."""
    outputs: tuple[str, ...] = ()
    """For gradient hooks: which output each entry of ``grad_output`` belongs to ("", "0", "logits", …)."""
    training: bool = True
    """Whether the model was in training mode when its forward began; for gradient hooks, whether it is now."""
    gradients: bool = True
    """Whether gradients were on when the model's forward began, whatever they are around this module."""

    @property
    def type(self) -> str:
        """The module's class name."""
        return type(self.module).__name__

    @property
    def num_parameters(self) -> int:
        """The count of numbers in the module's parameters, its children's included; lazy ones hold none yet."""
        return sum(p.numel() for p in self.module.parameters() if not is_lazy(p))


@dataclass(frozen=True, slots=True)
class OptimizerSite:
    """The optimizer that a hook is on, and the step in which it fires.

    A hook that declares a keyword-only ``site`` is handed one at each firing:

        def hook(optimizer, args, kwargs, *, site):
            print(site.name, site.kind, site.step)
    """

    name: str
    """The optimizer's class name."""
    optimizer: Optimizer
    """The optimizer."""
    kind: Kind
    """The kind of the hook that is firing."""
    step: int = -1
    """The newest step of this optimizer, counted from 0 since its first hook came on; -1 before one began."""
    found_inf: Tensor | None = None
    """Above 0 if this step leaves the parameters alone, because a ``GradScaler`` found infinite gradients.

    There only for optimizers that a scaler lets decide by themselves (``fused=True``): their step is called either
    way. Others are not called, and no hook fires. It is on the device; reading its value waits for it.
    """
