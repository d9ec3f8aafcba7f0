"""The tensor that a module's output is about, whatever structure it comes in.

Takes outputs of any make from those who watch, capture or edit "the output": a tensor, a tuple with the hidden states
first, a dict, a ModelOutput with its loss beside the logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.sites.tree import leaves

__all__ = ["main_of", "main_tensor"]


def main_tensor(value: Any) -> Tensor | None:
    """The first tensor of real numbers that is more than one number, else the first tensor, else None."""
    if isinstance(value, Tensor):
        return value
    return main_of([leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)])


def main_of(tensors: list[Tensor]) -> Tensor | None:
    """The same, of the tensors in the order they come in the structure."""
    for tensor in tensors:
        if tensor.dim() and tensor.is_floating_point():
            return tensor
    return tensors[0] if tensors else None
