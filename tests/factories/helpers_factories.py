"""What the tests of factories share: a decoder of SGLang's shape, its registration loop, and structures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookline.factories import Tokens, export, read_export, serving
from hookline.factories.exporting import ExportRecord

__all__ = ["PADDED", "Batch", "Decoder", "Layer", "Mode", "Named", "Wrapped", "exported"]

WIDTH = 8
PADDED = Tokens.padded(("a", "b"), ((1, 2, 3), (9,)), (0, 0), "prefill")
"""Two prompts in one batch, the second padded by two."""


class Mode:
    """As much of a ForwardMode as is asked for."""

    def __init__(self, name: str) -> None:
        for each in ("decode", "idle", "mixed", "target_verify"):
            setattr(self, f"is_{each}", lambda each=each: each == name)


@dataclass
class Batch:
    """As much of a ForwardBatch as layers pass on."""

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    req_pool_indices: Tensor
    extend_seq_lens: Tensor | None = None
    rids: list[str] | None = None
    extend_seq_lens_cpu: list[int] | None = None
    forward_mode: Any = None

    def __post_init__(self) -> None:
        is_decode = self.extend_seq_lens is None and not self.extend_seq_lens_cpu
        self.forward_mode = self.forward_mode or Mode("decode" if is_decode else "extend")


class Layer(nn.Module):
    """(positions, hidden states, batch, residual) → (hidden states, residual)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions: Tensor, hidden: Tensor, batch: Batch, residual: Tensor | None) -> Any:
        residual = hidden if residual is None else residual + hidden
        return self.mlp(residual), residual


class Decoder(nn.Module):
    """All tokens of all requests in one row."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, batch: Batch) -> Tensor:
        hidden, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            hidden, residual = layer(batch.positions, hidden, batch, residual)
        return hidden + residual


def exported(
    folder: Path, *outputs: Any, rows: Tokens | None = None, **config: Any
) -> tuple[list[ExportRecord], dict[str, float]]:
    """Export the outputs of one module; what was written, and the metrics of the hook."""
    hook, module = export({"folder": str(folder), **config}), nn.Identity()
    with serving(rows):
        for output in outputs:
            hook(module, (), output)
    hook.close()
    return list(read_export(folder)) if folder.exists() else [], hook.to_metrics()


@dataclass
class Named:
    """Like a ModelOutput: the loss beside the states."""

    loss: Tensor
    states: Tensor
    extras: dict[str, Any] = field(default_factory=dict)


class Wrapped(nn.Module):
    """A linear layer whose output comes in a structure."""

    def __init__(self, make: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return {
            "tensor": y,
            "tuple": (y, None, 3),
            "dict": {"states": y, "count": torch.tensor(2)},
            "dataclass": Named(torch.zeros(()), y, {"k": 1}),
            "list": [torch.tensor(5), y],
        }[self.make]
