"""Define `Site`: a place in a model, and, while a hook fires there, the moment.

Hooks that declare ``*, site`` get one at each firing; ``find`` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.kinds import Kind


@dataclass(frozen=True, slots=True)
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
    began: Any = None
    """For a profiler's gradient hook on a call with several outputs: its clock, when the first gradient came."""
    ended: Any = None
    """For a profiler's gradient hook: its clock, when the call had sent the last gradient to its inputs."""

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
