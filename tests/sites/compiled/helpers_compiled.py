"""Small models, the ways to compile them, and what hooks saw, for the tests of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hookline as hl

__all__ = [
    "KINDS",
    "WAYS",
    "Blocks",
    "Seen",
    "both_logs",
    "breaks",
    "compiled",
    "fill",
    "flat",
    "graphs",
    "observe_all",
    "same_fires",
    "same_values",
    "step",
    "tensors_in",
]

KINDS = ("forward_pre", "forward", "backward_pre", "backward")


class Block(nn.Module):
    """A residual block that uses its input twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """A stack of them."""

    def __init__(self, depth: int = 2, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


Compile = Callable[..., Any]


def _whole(model: Blocks, **options: Any) -> Any:
    return torch.compile(model, **options)


def _in_place(model: Blocks, **options: Any) -> Any:
    model.compile(**options)
    return model


def _each_block(model: Blocks, **options: Any) -> Any:
    for layer in model.layers:
        layer.compile(**options)
    return model


def _each_block_wrapped(model: Blocks, **options: Any) -> Any:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, **options)
    return model


def _function(model: Blocks, **options: Any) -> Any:
    return torch.compile(lambda x: model(x) * 1, **options)


def _after_another(model: Blocks, **options: Any) -> Any:
    other = torch.compile(Blocks(len(model.layers)), **options)
    other(torch.randn(3, 4)).sum().backward()
    return torch.compile(model, **options)


WAYS: dict[str, Compile] = {
    "torch.compile(model)": _whole,
    "model.compile()": _in_place,
    "block.compile()": _each_block,
    "torch.compile(block)": _each_block_wrapped,
    "a function that calls the model": _function,
    "another instance before": _after_another,
}
"""How a model can be compiled."""


def compiled(model: Any, *, backend: str = "aot_eager", way: str = "torch.compile(model)", **options: Any) -> Any:
    """The model, compiled one way, in one graph."""
    return WAYS[way](model, backend=backend, **{"fullgraph": True, **options})


class Seen(NamedTuple):
    """One firing of a hook."""

    kind: str
    name: str
    step: int
    call: int
    values: list[Any]
    """Copies of the tensors it was shown, beside whatever else there was."""

    @property
    def where(self) -> tuple[str, str, int, int]:
        """Everything but the values."""
        return self[:4]


def observe_all(model: nn.Module, seen: list[Seen], target: Any = "*", kinds: tuple[str, ...] = KINDS) -> hl.HandleSet:
    """Observers of every kind that note where they fire and what they are shown."""

    def note(module, *shown, site):
        seen.append(Seen(site.kind.value, site.name, site.step, site.call, flat(shown)))

    return hl.HandleSet([hl.attach(model, target, note, on=kind, observe=True) for kind in kinds])


def both_logs(
    model: nn.Module, act: Callable[[Any], Any], target: Any = "*", **options: Any
) -> tuple[list[Seen], list[Seen]]:
    """Return what observers of every kind see while ``act(run)`` runs the model, eagerly and then compiled."""
    eager: list[Seen] = []
    seen: list[Seen] = []
    for run, log in ((model, eager), (compiled(model, **options), seen)):
        with observe_all(model, log, target):
            act(run)
    return eager, seen


def flat(value: Any) -> list[Any]:
    """The leaves of nested containers; of tensors, copies."""
    if isinstance(value, Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flat(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def step(run: Callable[..., Tensor], *args: Any) -> Tensor:
    """A forward and its backward."""
    loss = run(*args).square().sum()
    loss.backward()
    return loss.detach()


def same_fires(one: list[Seen], other: list[Seen]) -> bool:
    """Whether the same hooks fired at the same moments, in the same order."""
    return [seen.where for seen in one] == [seen.where for seen in other] != []


def same_values(one: list[Seen], other: list[Seen], tolerance: float = 1e-5) -> bool:
    """Whether they were shown the same."""
    return all(_alike(a.values, b.values, tolerance) for a, b in zip(one, other, strict=True))


def _alike(one: list[Any], other: list[Any], tolerance: float) -> bool:
    return len(one) == len(other) and all(
        torch.allclose(a, b, atol=tolerance, rtol=tolerance, equal_nan=True) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def graphs() -> int:
    """How many graphs have been compiled."""
    return int(counters["stats"]["unique_graphs"])


def breaks() -> int:
    """How many times the compiler had to stop in the middle."""
    return sum(counters["graph_break"].values())


def tensors_in(values: list[Any]) -> list[Tensor]:
    """Return the tensors among the values that a hook was shown."""
    return [value for value in values if isinstance(value, Tensor)]


def fill(module: nn.Module, args: Any, output: Tensor) -> None:
    """Change the output in place: a hook that looks like one that only watches."""
    output[:] = 0
