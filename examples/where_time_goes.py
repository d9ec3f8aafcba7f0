"""Measure where the time of a training step goes: by module, by function, forward and backward.

python examples/where_time_goes.py
"""

from __future__ import annotations

import torch
from torch import nn

import hookline as hl


def main() -> None:
    """Train a few steps of a small encoder under ``hl.profile`` and print the table."""
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
    with hl.profile(
        model, "layers.*", functions=["*.linear", "*.layer_norm", "*.multi_head_attention_forward"]
    ) as prof:
        for _ in range(5):
            step()

    print(prof)
    slowest = max(prof.rows, key=lambda row: row.forward_own_ms + row.backward_own_ms)
    print(f"\nMost of it goes into {slowest.name or 'the model itself'}.")


if __name__ == "__main__":
    main()
