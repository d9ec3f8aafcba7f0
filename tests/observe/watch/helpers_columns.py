"""What the columns of a row should be: the same tensor in float64, by torch; for what is reduced by a kernel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.observe.watch.row import Layout

LAYOUTS = {
    "default": Layout.of(None),
    "two thresholds": Layout.of(["mean", "nan", "over:0.5", "over:2"]),
    "six thresholds": Layout.of([f"over:{each}" for each in (0, 0.25, 0.5, 1, 2, 4)]),
}
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def reference(tensor: Tensor, layout: Layout, scale: float = 1.0) -> np.ndarray[Any, Any]:
    """The columns of one firing, in float64; a kernel fills all of them."""
    x = _numbers(tensor, scale)
    finite = x[x.isfinite()]
    nan, inf, zeros = (int(found.sum()) for found in (x.isnan(), x.isinf(), x == 0))
    over = [int((x.abs() > threshold).sum()) for threshold in layout.thresholds]
    kept = [-math.inf] * 4
    if x.numel():
        kept[:2] = [-x.amin().item(), x.amax().item()]
    if finite.numel():
        kept[2:] = [-finite.min().item(), finite.max().item()]
    moments = x.sum().item(), (x * x).sum().item()
    return np.array([1, x.numel(), *moments, zeros, float(nan + inf > 0), nan, inf, *over, *kept])


def _numbers(tensor: Tensor, scale: float) -> Tensor:
    return (tensor.abs() if tensor.is_complex() else tensor).double().reshape(-1) / scale


def assert_close(found: np.ndarray[Any, Any], tensor: Tensor, layout: Layout, scale: float = 1.0) -> None:
    x = _numbers(tensor, scale)
    for name, got, want in zip(layout.names, found, reference(tensor, layout, scale), strict=True):
        same = got == want or (math.isnan(got) and math.isnan(want))
        if not same and name in ("sum", "squares"):
            same = abs(got - want) <= 2e-6 * float((x.abs() if name == "sum" else x * x).sum())
        assert same, (name, got, want)
