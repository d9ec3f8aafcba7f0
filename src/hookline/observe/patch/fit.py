"""Tensors that are given once and used on activations of whatever device and dtype.

Takes vectors, activations of other runs and places of an index from `edits` and `index`, hands them back as the
activation has it: converted once, anew when they were changed in place, and at each use where a gradient has to flow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.sites import _torch

__all__ = ["Held", "as_tensor"]


class Held:
    """One given tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        """As it was given; trained or changed in place, it is what counts."""
        self.converted: dict[tuple[torch.device, torch.dtype], tuple[int, Tensor]] = {}
        """For each device and dtype that was asked for: which version of the tensor was converted, and the result."""

    def like(self, x: Tensor) -> Tensor:
        """The tensor on the device and in the dtype of ``x``."""
        return self._as(x, x.dtype)

    def on(self, x: Tensor) -> Tensor:
        """The tensor on the device of ``x``."""
        return self._as(x, self.tensor.dtype)

    def _as(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        tensor = self.tensor
        if tensor.dtype == dtype and tensor.device == x.device:
            return tensor
        # In a compiled graph the conversion is part of it, and fused with what follows. A tensor that takes gradients
        # is converted under the eyes of autograd.
        if torch.compiler.is_compiling() or tensor.requires_grad or not _is_lasting(x):
            return tensor.to(device=x.device, dtype=dtype)
        version = tensor._version
        kept = self.converted.get((x.device, dtype))
        if kept is None or kept[0] != version:
            with torch.inference_mode(False):  # what is made here may serve in training later
                kept = version, tensor.to(device=x.device, dtype=dtype)
            self.converted[(x.device, dtype)] = kept
        return kept[1]


def _is_lasting(x: Tensor) -> bool:
    """Whether what is made beside ``x`` may be kept: not under fake tensors, transforms, or in a CUDA graph."""
    ordinary = type(x) is Tensor or isinstance(x, torch.nn.Parameter)
    return ordinary and not _torch.in_transform() and not _torch.capturing()


def as_tensor(value: Any, what: str) -> Tensor:
    """A given tensor, number, list or array as a tensor that can be used in training."""
    with torch.inference_mode(False):
        if isinstance(value, Tensor):
            return value.clone() if value.is_inference() else value
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(f"{what} has to be a tensor, or numbers to make one of, got {value!r}.") from error
