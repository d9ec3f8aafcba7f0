"""A model that makes observing hard, ways to train it, and all that a run leaves behind to the last bit.

Tests of hooks on modules compare a run with hooks with the run without them.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from helpers_models import batch_for, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

STEPS = 20
Hooking = Callable[[nn.Module], "hl.HandleSet"]
"""Puts hooks on a model; each hook reads every tensor that it is shown."""
Build = Callable[[], nn.Module]
Step = Callable[[nn.Module, int], Tensor]
"""Forward and backward of one optimizer step, by its number; gives the loss."""
Mark = dict[str, Tensor]
"""Everything a run leaves behind, by name."""


def house_step(model: nn.Module, index: int) -> Tensor:
    """One batch."""
    loss = model(*house_batch(index))["loss"]
    loss.backward()
    return loss


def bert_step(model: nn.Module, index: int) -> Tensor:
    """One batch for BERT."""
    loss = loss_of(model(**batch_for("bert_classifier", seed=index)))
    loss.backward()
    return loss


def t5_step(model: nn.Module, index: int) -> Tensor:
    """One batch for T5."""
    loss = loss_of(model(**batch_for("t5", seed=index)))
    loss.backward()
    return loss


def micro_batch_step(model: nn.Module, index: int) -> Tensor:
    """Four micro-batches: two with a backward of their own, then two forwards before one backward."""
    losses = [house_step(model, 4 * index + part) for part in range(2)]
    joint = sum(model(*house_batch(4 * index + part))["loss"] for part in (2, 3))
    joint.backward()
    return sum(losses) + joint


def autocast_step(model: nn.Module, index: int) -> Tensor:
    """One batch in bfloat16 where autocast sees fit."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(*house_batch(index))["loss"]
    loss.backward()
    return loss


def penalty_step(model: nn.Module, index: int) -> Tensor:
    """One batch with a penalty on the gradient of its input."""
    inputs, target = house_batch(index)
    inputs.requires_grad_()
    loss = model(inputs, target)["loss"]
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    total = loss + slope.square().sum()
    total.backward()
    return total


def house_batch(index: int) -> tuple[Tensor, Tensor]:
    """Inputs (B, C, T) and classes (B,)."""
    source = torch.Generator().manual_seed(index)
    return torch.randn(4, 3, 6, generator=source), torch.randint(0, 5, (4,), generator=source)


def train(build: Build, step: Step, hooking: Hooking = lambda model: hl.HandleSet(), *, steps: int = STEPS) -> Mark:
    """Train from seed zero, with hooks if given; at each step save, load and register; what the run leaves behind."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handles = hooking(model)
    losses = []
    for index in range(steps):
        optimizer.zero_grad()
        losses.append(step(model, index).detach())
        optimizer.step()
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        register_anew(model)
    assert all(report.fired >= steps for report in handles.report())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.errors.HookNeverFired)  # which modules fire is asked elsewhere
        handles.remove()
    hl.assert_no_hooks(model)
    return fingerprint(model, optimizer, losses)


def register_anew(model: nn.Module) -> None:
    """Store what every module has once more: its children and parameters as they are, its buffers as copies."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            module.add_module(name, child)
        for name, parameter in list(module._parameters.items()):
            module.register_parameter(name, parameter)
        for name, buffer in list(module._buffers.items()):
            setattr(module, name, None if buffer is None else buffer.clone())
        module.register_buffer("fresh", torch.ones(1), persistent=False)


@functools.cache
def train_without_hooks(build: Build, step: Step, steps: int = STEPS) -> Mark:
    """The run to compare with; run once for all tests."""
    return train(build, step, steps=steps)


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Mark:
    """Everything a run leaves behind."""
    mark: Mark = {"loss": torch.stack(losses)}
    for name, parameter in model.named_parameters():
        mark[f"parameter.{name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            mark[f"gradient.{name}"] = parameter.grad.clone()
        for key, value in optimizer.state[parameter].items():
            mark[f"optimizer.{name}.{key}"] = torch.as_tensor(value).clone()
    for name, buffer in model.named_buffers():
        mark[f"buffer.{name}"] = buffer.clone()
    mark["random.torch"] = torch.get_rng_state()
    _, keys, position, *_ = np.random.get_state()
    mark["random.numpy"] = torch.tensor([*map(int, keys), position])
    mark["random.python"] = torch.tensor(random.getstate()[1])
    return mark


def differences(one: Mark, other: Mark) -> list[str]:
    """Names of what is not the same to the last bit, or on one side alone."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    )


def reading_hook(*, observe: bool = False, wants_site: bool = False, **_: Any) -> Callable[..., Any]:
    """A hook that reads every tensor it is shown; an observer also returns something, to be ignored."""
    sums: dict[int, Tensor] = {}

    def read(*args: Any) -> None:
        for index, tensor in enumerate(tensors_in(args[1:] or (args[0], args[0].grad))):
            sums[index] = tensor.detach().sum()

    def read_with_site(*args: Any, site: hl.Site) -> None:
        read(*args)

    def read_and_return(*args: Any) -> Any:
        read(*args)
        return "to be ignored"

    return read_and_return if observe else read_with_site if wants_site else read


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries; a module's parameters."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return list(value.parameters())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


class Attention(nn.Module):
    """Queries from one input, keys and values from another, which may be the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).transpose(-1, -2)
        return self.out((scores / x.shape[-1] ** 0.5).softmax(-1) @ self.value(memory))


class EncoderLayer(nn.Module):
    """Post-LN: the attention uses x three times inside, and the residual once more after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.1)
        self.norm_2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.dropout(self.attention(x, x)))
        return self.norm_2(x + self.dropout(self.feed_forward(x)))


class DecoderLayer(nn.Module):
    """Takes the memory by keyword and gives a tuple back, as Hugging Face's layers do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.cross = Attention(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, *, memory: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.attention(x, x)
        x = x + attended
        return self.norm(x + self.cross(x, memory)), attended


class House(nn.Module):
    """A stem with BatchNorm and in-place ReLU, an encoder, two decoder layers on its output, a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU(inplace=True))
        self.encoder = EncoderLayer(width)
        self.decoder = nn.ModuleList(DecoderLayer(width) for _ in range(2))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, 5)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.stem(inputs).transpose(1, 2)  # (B, T, D)
        memory = self.encode(x)
        seen = []
        for layer in self.decoder:
            x, attended = layer(x, memory=memory)
            seen.append(attended)
        logits = self.head(self.dropout(x + memory).mean(1))
        loss = F.cross_entropy(logits, target) + 1e-2 * sum(value.square().mean() for value in seen)
        return {"loss": loss, "logits": logits}


class CheckpointedHouse(House):
    """The same, with the encoder's activations recomputed in the backward pass."""

    def encode(self, x: Tensor) -> Tensor:
        return checkpoint(self.encoder, x, use_reentrant=False)


class Passing(nn.Module):
    """Gives its input back beside something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


class Squaring(nn.Module):
    """Uses its input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x) * x


class Splitting(nn.Module):
    """Gives three parts of one projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).chunk(3, -1)


class Fork(nn.Module):
    """A tensor that is used twice behind a module and twice beside it, alternately."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.stem = nn.Linear(18, 8)
        self.latent = nn.Parameter(torch.randn(8)) if shape == "learned input" else None
        self.users = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.between: nn.Module = {
            "identity": nn.Identity(),
            "dropout of zero": nn.Dropout(0.0),
            "passed through": Passing(),
            "learned input": Squaring(),
            "split": Splitting(),
        }[shape]

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        stem = self.stem(inputs.flatten(1))  # (B, D)
        x = stem if self.latent is None else self.latent
        handed_on = self.between(x)
        first, *others = (handed_on,) if isinstance(handed_on, Tensor) else handed_on
        logits = sum(user(value).sin() for user, value in zip(self.users, (first, x, first, x), strict=True))
        return {"loss": F.cross_entropy(stem * logits + sum(others), target)}
