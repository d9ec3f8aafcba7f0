"""The same with inductor, torch's own compiler: few tests, because each takes seconds to compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_compiled import Blocks, Seen, breaks, compiled, graphs, observe_all, same_fires, same_values, step
from helpers_models import build
from torch import Tensor, nn

import hookline as hl

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    # torch's own, where what is compiled takes something that is no leaf, with hooks or without.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def _gpt2() -> nn.Module:
    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = build("gpt2", n_layer=2, n_embd=32, vocab_size=97, use_cache=False, **no_dropout)
    model.loss_type = "ForCausalLM"  # transformers warns otherwise, which breaks the graph
    return model


def _train(model: nn.Module, run: Any, seen: list[Seen]) -> list[float]:
    """Three steps of AdamW; the hooks come after the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    losses = []

    def one() -> None:
        optimizer.zero_grad()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    one()
    with observe_all(model, seen, ["transformer.h.#", "transformer.h.1.mlp"]):
        one(), one()
    one()
    return losses


@pytest.mark.full
def test_a_late_hook_on_gpt2_sees_a_training_run_as_in_eager_code() -> None:
    """Forward and gradient, on blocks and their parts, without a break: one graph without hooks and one with."""
    model = _gpt2()
    eager: list[Seen] = []
    losses = _train(model, model, eager)
    model = _gpt2()
    run = torch.compile(model, fullgraph=True)
    seen: list[Seen] = []
    ours = _train(model, run, seen)
    assert same_fires(seen, eager)
    assert len(seen) == 2 * 4 * 3
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), atol=1e-4, rtol=1e-4)
    for one, other in zip(seen, eager, strict=True):
        for a, b in zip(one.values, other.values, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2)
    assert breaks() == 0
    assert graphs() == 2


@pytest.mark.full
def test_on_and_off_twelve_times_takes_two_graphs_and_every_call_fires() -> None:
    """Attached before the first call: one graph with hooks, one without."""
    model, x = Blocks(), torch.randn(3, 4)
    eager: list[Seen] = []
    with observe_all(model, eager):
        step(model, x)
    run = compiled(model, backend="inductor")
    for _ in range(12):
        seen: list[Seen] = []
        with observe_all(model, seen):
            step(run, x)
        assert same_fires(seen, eager)
        assert same_values(seen, eager)
        step(run, x)
    assert (graphs(), breaks()) == (2, 0)


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
