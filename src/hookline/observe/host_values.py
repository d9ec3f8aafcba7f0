"""Bring tensors to the host in as few transfers as possible, and check which tensors trackers can count.

`fetch` and `on_host` are called where results on devices become numbers: among others by watch/engine.py, trackers.py
and train_tool.py of metta, analyses, `HookManager` (lifecycle/manager.py), and factories/request_notes.py for the flags
of probes. They wait for the device, so no hook may call them at every module. `sent_to_host` does not wait: captures,
exports (factories/exporting.py), hidden states (engines/hidden_states.py) and the step monitor (watch/monitor.py) call
it, and wait later.

`unit_axis` says what trackers, ``watch`` and edits (`mean_ablate`) take for units, so they agree. `countable` says
which tensors trackers take, and heat maps, which draw whole numbers besides. ``watch`` has a rule of its own, which
takes whole and complex numbers too (`numbers_in` of watch/engine.py, `_as_float` of watch/row.py). `outside_inference`
is for metta/trackers.py.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hookline.sites import _torch


def fetch(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """Return the numbers of each tensor, flat, by one transfer for all that share a device and a dtype."""
    return [tensor.reshape(-1).tolist() for tensor in on_host(tensors)]


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return each tensor in the memory of the host, by one transfer for all that share a device and a dtype.

    Those that are on the host already are returned as they are.
    """
    found = list(tensors)
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, tensor in enumerate(found):
        if tensor.device.type != "cpu":
            groups[tensor.device, tensor.dtype].append(index)
    for members in groups.values():
        flat = torch.cat([found[index].reshape(-1) for index in members]).cpu()
        sizes = [found[index].numel() for index in members]
        for index, part in zip(members, torch.split(flat, sizes), strict=True):
            found[index] = part.reshape(found[index].shape)
    return found


def sent_to_host(value: Any) -> Any:
    """Return a copy of a CUDA tensor on the host, which is still being made; other values as they are.

    Wait for the device's current stream before you read it. The memory is pinned, so the host goes on meanwhile. The
    copy runs in the current stream, which has to be the one that made the tensor: whatever is done to that memory later
    comes after it, also a reuse by the allocator.
    """
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    host = torch.empty_like(value, device="cpu", pin_memory=True, requires_grad=False)
    return host.copy_(value, non_blocking=True)


def countable(value: Any) -> Tensor | None:
    """Return the tensor without its graph, or None for what trackers pass over.

    They pass over: what is no tensor, whole and complex numbers, sparse and nested tensors, tensors without memory
    (meta, fake), and all tensors inside a transform of ``torch.func``. A distributed tensor stands for its local part.
    """
    if not isinstance(value, Tensor) or value.is_nested:
        return None
    tensor: Tensor | None = _torch.local_tensor(value)
    if tensor is None or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return None
    if tensor.is_meta or _torch.in_transform():
        return None
    tensor = tensor.detach()
    return tensor.float() if tensor.itemsize == 1 else tensor  # 8-bit floats have no comparison


def unit_axis(tensor: Tensor) -> int | None:
    """Return the dimension whose entries are the units; None if the tensor has no dimension.

    It is the last of (B, F) and (B, T, F), and the channels of (N, C, H, W) and (N, C, D, H, W). A tensor of
    one dimension is one sample of that many units.
    """
    dims = tensor.dim()
    if dims < 2:
        return 0 if dims else None
    return dims - 1 if dims < 4 else 1


def outside_inference() -> AbstractContextManager[Any]:
    """Leave inference mode for a block, to make tensors in it: one made in inference mode can be changed only there."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
