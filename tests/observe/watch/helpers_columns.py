"""What the columns of a row should be: the same tensor in float64, by torch; for what is reduced by a kernel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.observe.watch.row import Layout

__all__ = ["DTYPES", "LAYOUTS", "assert_close", "reference"]

LAYOUTS = {
    "default": Layout.of(None),
    "all": Layout.of(["mean", "nan", "zero_fraction", "over:0.5", "over:2"]),
    "moments": Layout.of(["mean"]),
    "extremes": Layout.of(["max"]),
    "zeros": Layout.of(["zero_fraction"]),
    "thresholds": Layout.of([f"over:{each}" for each in (0, 0.25, 0.5, 1, 2, 4)]),
}
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def reference(tensor: Tensor, layout: Layout, scale: float = 1.0) -> np.ndarray[Any, Any]:
    """The columns of one firing, in float64."""
    x = (tensor.abs() if tensor.is_complex() else tensor).double().reshape(-1) / scale
    finite = x[x.isfinite()]
    looked = layout.moments or layout.extremes
    nan, inf = (int(x.isnan().sum()), int(x.isinf().sum())) if looked else (0, 0)
    total, squares = (x.sum().item(), (x * x).sum().item()) if layout.moments else (0.0, 0.0)
    zeros = int((x == 0).sum()) if layout.zeros else 0
    over = [int((x.abs() > threshold).sum()) for threshold in layout.thresholds]
    kept = [-math.inf] * 4
    if layout.extremes and x.numel():
        low, high = x.amin().item(), x.amax().item()
        kept = [-low, high]
        kept += [-finite.min().item(), finite.max().item()] if finite.numel() else [-math.inf] * 2
    return np.array([1, x.numel(), total, squares, zeros, float(nan + inf > 0), nan, inf, *over, *kept])


def assert_close(found: np.ndarray[Any, Any], tensor: Tensor, layout: Layout, scale: float = 1.0) -> None:
    wanted = reference(tensor, layout, scale)
    x = (tensor.abs() if tensor.is_complex() else tensor).double().reshape(-1) / scale
    for name, got, want in zip(layout.names, found, wanted, strict=True):
        if name in ("sum", "squares"):
            size = float((x.abs() if name == "sum" else x * x).sum())
            same = got == want or (math.isnan(got) and math.isnan(want))
            assert same or abs(got - want) <= 2e-6 * size, (name, got, want)
        else:
            assert got == want or (math.isnan(got) and math.isnan(want)), (name, got, want)
