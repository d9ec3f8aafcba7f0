"""The tensors that trackers take in, and the way back to plain numbers.

Takes whatever hooks were shown, hands trackers a tensor they can count or nothing; at the end fetches all their results
at once.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hookline.sites import _torch

__all__ = ["countable", "fetch", "outside_inference", "unit_axis"]


def countable(value: Any) -> Tensor | None:
    """The tensor without its history, or None for what trackers pass over.

    Those are: what is no tensor, whole and complex numbers, sparse and nested tensors, tensors without a memory (meta,
    fake), and all tensors while a transform of ``torch.func`` is at work. A distributed tensor stands for its local
    part.
    """
    if not isinstance(value, Tensor) or value.is_nested:
        return None
    tensor: Tensor | None = _torch.local_tensor(value)
    if tensor is None or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return None
    if tensor.is_meta or _torch.in_transform():
        return None
    tensor = tensor.detach()
    return tensor.float() if tensor.itemsize == 1 else tensor  # 8-bit floats know no comparison


def unit_axis(tensor: Tensor, unit_dim: int | None) -> int | None:
    """The dimension whose entries are the units; None if the tensor has no such dimension.

    Unless told otherwise: the last of (B, F) and (B, T, F), the channels of (N, C, H, W) and (N, C, D, H, W). One
    dimension alone is one sample of that many units, whatever ``unit_dim`` says.
    """
    dims = tensor.dim()
    if dims < 2:
        return 0 if dims else None
    if unit_dim is None:
        return dims - 1 if dims < 4 else 1
    return unit_dim % dims if -dims <= unit_dim < dims else None


def outside_inference() -> AbstractContextManager[Any]:
    """What is made in the block can be changed later; a tensor made in inference mode could be changed only there."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def fetch(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """The numbers of each tensor, with one transfer for all that share a device and a type."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, tensor in enumerate(flat):
        groups[tensor.device, tensor.dtype].append(index)
    found: list[list[Any]] = [[] for _ in flat]
    for members in groups.values():
        numbers = torch.cat([flat[index] for index in members]).tolist()
        for index, part in zip(members, _parts(numbers, [flat[index].numel() for index in members]), strict=True):
            found[index] = part
    return found


def _parts(numbers: list[Any], lengths: Sequence[int]) -> list[list[Any]]:
    parts, start = [], 0
    for length in lengths:
        parts.append(numbers[start : start + length])
        start += length
    return parts
