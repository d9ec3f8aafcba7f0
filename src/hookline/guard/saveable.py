"""Tell which tensors can be saved: those that have numbers of their own.

`TensorStates` refuses the others by name, and `ContainerTree` leaves those of a batch out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.errors import GuardError
from hookline.sites import _torch

__all__ = ["can_be_saved", "check_saveable"]


def check_saveable(tensor: Tensor, name: str) -> None:
    """Raise a `GuardError` that names a tensor without numbers of its own."""
    if torch.nn.parameter.is_lazy(tensor):
        raise GuardError(f"{name} has no numbers yet, so there is nothing to save. Next: run the model once.")
    if tensor.device.type == "meta":
        raise GuardError(f"{name} is on the meta device, where nothing can be saved. Next: to_empty() gives it memory.")
    if not _torch.has_numbers(tensor):
        raise GuardError(f"{name} stands for other tensors (a trace, a transform), and cannot be saved there.")
    if hasattr(type(_torch.own_part(tensor)), "__tensor_flatten__"):
        kind = type(tensor).__name__
        raise GuardError(
            f"{name} is a {kind}, which wraps other tensors that would not be saved. Next: guard it unwrapped."
        )


def can_be_saved(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers of its own that can be copied."""
    try:
        check_saveable(tensor, "")
    except GuardError:
        return False
    return True
