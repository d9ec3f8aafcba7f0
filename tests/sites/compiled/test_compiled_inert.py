"""Training in compiled code: a run that is watched ends with the same bits as the run that is not.

Under ``aot_eager`` every operator runs as in eager code, so the bits have to be the same. Under inductor an observed
tensor has to exist, which changes what is fused, and so the rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_compiled import KINDS, breaks, flat
from torch import Tensor, nn

import hookline as hl

pytestmark = [
    pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired"),
    # torch's own, where what is compiled takes something that is no leaf, with hooks or without.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

STEPS = 20
Mark = dict[str, Tensor]


class Layer(nn.Module):
    """Norms of both makes, dropout, an activation in place; the input is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.batch_norm = nn.BatchNorm1d(2 * width)
        self.act = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.act(self.batch_norm(self.up(self.norm(x))))))


class House(nn.Module):
    """Layers and a head that gives a dict back."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


def _train(attach: Callable[[nn.Module], Any] | None, way: str) -> Mark:
    """Train with AdamW from the same seed; everything the run leaves behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = House().train()
    run: Any = model
    if way == "whole":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif way == "per block":
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    handles = None
    losses = []
    for step in range(STEPS):
        if attach is not None and step == 2:
            handles = attach(model)
        x, target = torch.randn(12, 8, generator=data), torch.randint(3, (12,), generator=data)
        optimizer.zero_grad()
        loss = run(x, target)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if handles is not None:
        handles.remove()
    mark = {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    for index, parameter in enumerate(model.parameters()):
        mark[f"gradient {index}"] = parameter.grad
        mark |= {f"{key} {index}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
    return mark | {"losses": torch.stack(losses), "random": torch.get_rng_state()}


@functools.cache
def _plain(way: str) -> Mark:
    """Return what the run without hooks leaves behind."""
    return _train(None, way)


def _differences(one: Mark, other: Mark) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _norms(kept: list[float]) -> Callable[[nn.Module], hl.HandleSet]:
    def note(module, *shown):
        kept.extend(
            float(value.norm()) for value in flat(shown) if isinstance(value, Tensor) and value.is_floating_point()
        )
        return "to be ignored"

    return lambda model: hl.HandleSet([hl.attach(model, "*", note, on=kind, observe=True) for kind in KINDS])


@pytest.mark.parametrize("way", ["whole", "per block"])
def test_a_watched_compiled_run_ends_with_the_same_bits(way: str) -> None:
    """All four kinds on every module at once, hooks that read each tensor: nothing is rounded otherwise."""
    kept: list[float] = []
    plain, hooked = _plain(way), _train(_norms(kept), way)
    assert _differences(plain, hooked) == []
    assert len(kept) > 1000
    assert breaks() == 0


def test_the_comparison_can_fail() -> None:
    """A hook that draws one random number changes the dropout of the rest of the run."""

    def draw(module, args, output):
        torch.rand(())

    def attach(model: nn.Module) -> Any:
        return hl.attach(model, "layers.0.down", draw, observe=True)

    different = _differences(_plain("whole"), _train(attach, "whole"))
    assert "random" in different
    assert "losses" in different
