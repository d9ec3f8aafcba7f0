"""Rows about ``compare``: how fast two traces with tensors are read and compared on one core.

Takes a `Setting`, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Row, ratios, spread
from subject import Setting

from hookline.debug import read_trace
from hookline.debug.compare.compare import compare
from hookline.debug.compare.trace import trace

__all__ = ["comparing"]

_COUNT = 8
_NUMBERS = 1 << 22


def comparing(setting: Setting) -> Iterator[Row]:
    """``compare`` of two traces, against reading the same tensors and adding them up; CPU seconds of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            yield _row(setting, Path(folder), dtype)


def _row(setting: Setting, folder: Path, dtype: torch.dtype) -> Row:
    name = str(dtype).removeprefix("torch.")
    paths = [_traced(folder / f"{name}_{run}", dtype, run) for run in (0, 1)]
    read = [read_trace(path) for path in paths]

    def add_up() -> None:
        for one in read:
            for record in one.records:
                record.tensor().sum(dtype=torch.float32)

    seconds: dict[str, list[float]] = {"compare": [], "read": [], "read again": []}
    for _ in range(setting.rounds(20)):
        for key, call in (("compare", lambda: compare(*paths)), ("read", add_up), ("read again", add_up)):
            start = time.process_time()  # what is asked for is the work of one core, whoever else uses it
            call()
            seconds[key].append(time.process_time() - start)
    size = 2 * _COUNT * _NUMBERS * dtype.itemsize
    absolute = f"{size / min(seconds['compare']) / 1e9:.1f} GB per second of one core"
    model = f"{_COUNT} tensors of {_NUMBERS * dtype.itemsize >> 20} MiB in each, {name}"
    return Row("compare: two traces", "compare two traces of tensors", "read them and add them up", model,
               spread(ratios(seconds, "compare", "read")), spread(ratios(seconds, "read again", "read")),
               absolute)  # fmt: skip


def _traced(path: Path, dtype: torch.dtype, seed: int) -> Path:
    model = torch.nn.Identity()
    source = torch.Generator().manual_seed(0)
    values = [torch.randn(_NUMBERS, generator=source) for _ in range(_COUNT)]
    with trace(model, to=path, kinds="output", tensors=True, budget=None):
        for value in values:
            model((value * (1 + 1e-6 * seed)).to(dtype))
    return path
