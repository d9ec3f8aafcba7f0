"""Measure where the time of a training step goes: torch's profiler, with a range for each call of a module.

python examples/where_time_goes.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.profiler import profile, record_function

import hookline as hl


def mark_calls(model: nn.Module, target: str, **options: Any) -> hl.HandleSet:
    """Name the calls of modules in what torch's profiler records, until the handle is removed."""
    running: list[Any] = []

    def begin(module: nn.Module, args: Any, *, site: hl.Site) -> None:
        running.append(record_function(site.name))
        running[-1].__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        running.pop().__exit__(None, None, None)

    return hl.HandleSet(
        [
            hl.attach(model, target, begin, on="forward_pre", observe=True, **options),
            hl.attach(model, target, end, on="forward", observe=True, always_call=True, **options),
        ]
    )


def main() -> None:
    """Profile a few steps of a small encoder, and print the time of its parts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 32, 128)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # allocators and caches
    with mark_calls(model, "layers.*", exclude="*.out_proj"), profile() as prof:
        for _ in range(5):
            step()

    parts = [row for row in prof.key_averages() if row.key.startswith("layers.")]
    for row in sorted(parts, key=lambda row: -row.cpu_time_total):
        print(f"{row.key:28} {row.count} calls  {row.cpu_time_total / 1e3:8.2f} ms")
    print("\nThe ranges are in the file of prof.export_chrome_trace() too.")


if __name__ == "__main__":
    main()
