"""A run that is captured ends bit for bit as one that is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

Watch = Callable[[nn.Module], AbstractContextManager[Any]]
STEPS = 20


class Mixing(nn.Module):
    """Uses its input three times, gives two tensors back, of which one is used outside as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        weights = (self.query(x) @ self.key(x).transpose(-1, -2) * scale).softmax(-1)
        return self.drop(weights @ self.value(x)) + x, {"weights": weights}


class Net(nn.Module):
    """Dropout, BatchNorm, in-place ReLU, a checkpoint, keyword arguments, a dict for an output."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.mix = nn.ModuleList(Mixing(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.again = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        extra = x.new_zeros(())
        for mix in self.mix:
            mixed, more = mix(x, scale=0.5)
            x, extra = self.norm(mixed + x), extra + more["weights"].square().mean()
        x = checkpoint(self.again, x, use_reentrant=False) + self.again(x)
        return self.head(x.mean(1)) + extra


def train(watch: Watch, before: Callable[[nn.Module], None] = lambda model: None) -> dict[str, Tensor]:
    """Train from one seed; everything the run leaves behind."""
    torch.manual_seed(0)
    model = Net().train()
    before(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        x, target = torch.randn(4, 6, 5), torch.randint(3, (4,))
        optimizer.zero_grad()
        with watch(model) as cache:
            loss = F.cross_entropy(model(x), target)
            loss.backward()
        assert not isinstance(cache, hl.Cache) or len(cache) > 10
        optimizer.step()
        losses.append(loss.detach())
    left = {"losses": torch.stack(losses), "random": torch.get_rng_state()}
    left |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        left[f"grad {name}"] = parameter.grad.clone()
        left |= {f"{key} {name}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
    hl.assert_no_hooks(model, foreign=True)
    return left


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """The run to compare with."""
    return train(lambda model: nullcontext())


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


WATCHES: dict[str, dict[str, Any]] = {
    "outputs": {},
    "everything": {"inputs": True, "grads": True},
    "everything, by copies": {"inputs": True, "grads": True, "clone": True, "detach": True},
    "parts of everything": {"inputs": True, "grads": True, "index": (slice(None), -1), "dtype": "bfloat16"},
    "of the process": {"inputs": True, "grads": True, "scope": "process", "limit": "1GB"},
}


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
@pytest.mark.parametrize("options", WATCHES.values(), ids=WATCHES)
def test_a_captured_run_ends_with_the_same_bits(plain, options):
    """Weights, buffers, gradients, optimizer state, losses and the random stream, after 20 steps."""
    index = options.get("index")
    if index is not None:
        options = {**options, "index": lambda tensor: tensor[..., -1]}
    found = train(lambda model: hl.capture(model, "*", **options))
    assert differences(plain, found) == []


def test_the_comparison_notices_the_least_change(plain):
    """The control: one weight, in its last bit; and a random number that is drawn once."""

    def nudge(model: nn.Module) -> None:
        with torch.no_grad():
            bias = model.get_parameter("head.bias")
            bias[0] = torch.nextafter(bias[0], bias[0] + 1)

    assert "state head.bias" in differences(plain, train(lambda model: nullcontext(), nudge))

    def draw(module: nn.Module, args: Any, output: Tensor) -> None:
        torch.rand(1)

    assert "random" in differences(plain, train(lambda model: hl.attach(model, "head", draw)))
