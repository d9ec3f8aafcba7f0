"""The same with inductor, torch's own compiler: few tests, because each takes seconds to compile."""

from __future__ import annotations

import pytest
import torch
from helpers_compiled import Blocks, breaks, compiled, step
from torch import Tensor, nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Chain(nn.Module):
    """Many steps of one shape, so that inductor has memory to use again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


@pytest.mark.parametrize("way", ["torch.compile(model)", "block.compile()"])
def test_what_a_hook_keeps_is_not_written_over(way: str) -> None:
    """inductor uses memory again, within a call and between two; what hooks keep is their own."""
    model, kept = Chain(), []

    def keep(module, args, output):
        kept.append((args[0], output))

    run = compiled(model, backend="inductor", way=way)
    inputs = [torch.randn(16, 64) for _ in range(3)]
    with torch.no_grad(), hl.attach(model, "layers.#", keep, observe=True):
        for x in inputs:
            run(x)
    with torch.no_grad():
        expected = []
        for x in inputs:
            for layer in model.layers:
                y = nn.functional.linear(x, layer.weight, layer.bias)
                expected.append((x, y))
                x = y.sin()
    assert len(kept) == len(expected)
    for ours, theirs in zip(kept, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_an_edit_is_compiled_with_the_model_and_differentiated() -> None:
    """Also its own parameters get gradients: a steering vector is learned through the compiled model."""
    model, x = Blocks(), torch.randn(3, 4)
    vector = torch.randn(4, requires_grad=True)

    def steer(module, args, output):
        return output + vector

    run = compiled(model, backend="inductor")
    results = []
    for call in (model, run):
        vector.grad = None
        with hl.attach(model, "layers.0", steer):
            step(call, x)
        results.append(vector.grad.clone())
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    assert breaks() == 0
