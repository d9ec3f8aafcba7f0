"""Training in compiled code: a run that is watched ends with the same bits as the run that is not.

Under ``aot_eager`` every operator runs as in eager code, so the bits have to be the same. Under inductor an observed
tensor has to exist, which changes what is fused and so the rounding: there the hooked run is another compilation of the
same program, and is compared with the run without hooks within what compiling it at all changes.
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


def _train(attach: Callable[[nn.Module], Any] | None, way: str, backend: str = "aot_eager", steps: int = STEPS) -> Mark:
    """Train with AdamW from the same seed; everything the run leaves behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = House(2 if steps == STEPS else 1).train()  # the short runs are about one graph
    run: Any = model
    if way == "whole":
        run = torch.compile(model, backend=backend, fullgraph=True)
    elif way == "per block":
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    attach_at = 2 if backend == "aot_eager" else 0  # late, after the first compilation, where that is cheap
    handles = None
    losses = []
    for step in range(steps):
        if attach is not None and step == attach_at:
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
def _plain(way: str, steps: int = STEPS) -> Mark:
    """What the run without hooks leaves behind: the same each time, as the tests of one kind by itself show."""
    return _train(None, way, steps=steps)


def _differences(one: Mark, other: Mark) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _norms(kept: list[float], kinds: tuple[str, ...] = KINDS) -> Callable[[nn.Module], hl.HandleSet]:
    def note(module, *shown):
        kept.extend(
            float(value.norm()) for value in flat(shown) if isinstance(value, Tensor) and value.is_floating_point()
        )
        return "to be ignored"

    return lambda model: hl.HandleSet([hl.attach(model, "*", note, on=kind, observe=True) for kind in kinds])


@pytest.mark.parametrize("way", ["whole", "per block"])
def test_a_watched_compiled_run_ends_with_the_same_bits(way: str) -> None:
    """All four kinds on every module at once, hooks that read each tensor: nothing is rounded otherwise."""
    kept: list[float] = []
    plain, hooked = _plain(way), _train(_norms(kept), way)
    assert _differences(plain, hooked) == []
    assert len(kept) > 1000
    assert breaks() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_a_run_with_hooks_of_one_kind(kind: str) -> None:
    """By itself, each takes another way through the graph."""
    kept: list[float] = []
    assert _differences(_plain("whole", 6), _train(_norms(kept, (kind,)), "whole", steps=6)) == []
    assert kept


def test_the_comparison_can_fail() -> None:
    """A hook that draws one random number changes the dropout of the rest of the run."""

    def draw(module, args, output):
        torch.rand(())

    def attach(model: nn.Module) -> Any:
        return hl.attach(model, "layers.0.down", draw, observe=True)

    different = _differences(_plain("whole"), _train(attach, "whole"))
    assert "random" in different
    assert "losses" in different


@pytest.mark.full
def test_under_inductor_it_is_another_compilation_of_the_same_program() -> None:
    """Within a few times what compiling changes; dropout is drawn from the same stream, which ends the same.

    inductor's own random numbers are not those of eager code, so the runs are compared compiled with compiled, and the
    yardstick is the rounding of single precision over six steps of AdamW.
    """
    kept: list[float] = []
    plain, hooked = _train(None, "whole", "inductor", 6), _train(_norms(kept), "whole", "inductor", 6)
    assert torch.equal(plain["random"], hooked["random"])
    torch.testing.assert_close(plain["losses"], hooked["losses"], atol=1e-4, rtol=1e-4)
    assert kept
