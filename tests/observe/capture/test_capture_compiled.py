"""Captures in compiled code: attached before or after the first call, whole graphs, the values of the run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hookline as hl


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """The compiler starts anew, in one thread, and counts from zero."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    yield
    assert not counters["graph_break"]
    torch.set_num_threads(threads)


class Block(nn.Module):
    """Gives back a tuple with a dict in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        inside = self.up(x)
        return x + self.down(torch.relu_(inside)), {"inside": inside}


class Net(nn.Module):
    """Two blocks, the second of which is called twice."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[1]):
            x, more = layer(x)
        return x * more["inside"].mean()


def batch(step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def values(cache: hl.observe.Cache) -> dict[str, list[Any]]:
    """Everything that was captured, as lists of tensors."""
    found: dict[str, list[Any]] = {}
    for name, captured in cache.items():
        for call in captured.calls:
            main, more = call.output
            parts = [main, more["inside"], *call.inputs, call.grad[0], call.grad[1]["inside"]]
            found[f"{name} {call.step} {call.call}"] = parts
    return found


def run(model: nn.Module, call: Any, *, late: bool) -> dict[str, list[Any]]:
    """Two steps captured, with one before the hooks come on."""
    if late:
        call(batch(9)).sum().backward()
    with hl.capture(model, "layers.#", inputs=True, grads=True, clone=True) as cache:
        for step in range(2):
            call(batch(step)).sum().backward()
    return values(cache)


@pytest.mark.parametrize(
    ("backend", "late"),
    [
        pytest.param("aot_eager", False, id="aot_eager-before the first call"),
        pytest.param("aot_eager", True, id="aot_eager-after it"),
        pytest.param("inductor", False, id="inductor-before the first call", marks=pytest.mark.full),
        pytest.param("inductor", True, id="inductor-after it"),
    ],
)
def test_compiled_captures_have_the_values_of_an_eager_run(backend, late):
    """Outputs, inputs, gradients, steps and calls; in one graph, without a break."""
    plain, model = Net(), Net()
    expected = run(plain, plain, late=False)
    found = run(model, torch.compile(model, backend=backend, fullgraph=True), late=late)
    assert found.keys() == expected.keys()
    assert len(found) == 6
    for key, tensors in expected.items():
        for one, other in zip(tensors, found[key], strict=True):
            if one is None or other is None:
                assert one is other, key
            else:
                torch.testing.assert_close(other, one, msg=lambda text, key=key: f"{key}: {text}")


def test_compiled_values_are_copies_without_a_graph():
    """So an in-place operation behind them, or memory that is used again, does not reach them."""
    model = Net()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.capture(model, "layers.0.up") as cache, hl.capture(model, "layers.0", index=0) as part:
        call(batch(0))
    assert torch.equal(cache["layers.0.up"].output, model.layers[0].up(batch(0)))  # before relu_
    assert not cache["layers.0.up"].output.requires_grad
    assert part["layers.0"].output[0].shape == (4,)
