"""Factories on a compiled model: they fire, attached before or after, and see what the eager model shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline import factories
from hookline.factories import read_export

SPECS: dict[str, dict[str, Any]] = {
    "activation_stats": {"stats": ["mean", "absmax"]},
    "nan_alarm": {},
    "export": {},
    "steer": {"vector": [1.0] * 8, "strength": 0.5, "positions": "last"},
}


class Layer(nn.Module):
    """Gives out a tuple, as decoder layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + self.mlp(x).relu(),)


class Model(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attach(model: nn.Module, folder: Path, observe: bool = False) -> tuple[dict[str, Any], hl.HandleSet]:
    """All factories on all layers, through specs; the hooks they made."""
    hooks: dict[str, Any] = {}

    def factory(name: str) -> Any:
        def make(config: dict[str, Any]) -> Any:
            hooks[name] = getattr(factories, name)({**config, **({"folder": str(folder)} if name == "export" else {})})
            return hooks[name]

        return make

    specs = [
        {"name": name, "target_modules": ["layers.#"], "hook_factory": factory(name), "config": config,
         "observe": observe and name != "steer"}
        for name, config in SPECS.items()
    ]  # fmt: skip
    return hooks, hl.register_hooks(model, specs)


@pytest.mark.parametrize(
    ("when", "mode", "observe"),
    [
        ("before", torch.inference_mode, False),
        pytest.param("after", torch.inference_mode, False, marks=pytest.mark.slow),
        ("after", torch.inference_mode, True),
        ("before", torch.no_grad, True),
        pytest.param("after", torch.no_grad, False, marks=pytest.mark.slow),
    ],
)
def test_compiled_and_eager_tell_the_same(when: str, mode: Any, observe: bool, tmp_path: Path) -> None:
    """One full graph, hooks attached before or after its first call; every number as in the eager model."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 5, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with mode():
        bare = compiled(x) if when == "after" else model(x)
        hooks, handles = attach(model, tmp_path / "compiled", observe)
        out = compiled(x)
        handles.remove()
        eager, others = attach(model, tmp_path / "eager", observe)
        want = model(x)
        others.remove()
    assert torch.allclose(out, want, atol=1e-6)
    assert not torch.allclose(out, bare)  # the steering is in the graph
    for name, hook in hooks.items():
        hook.close()
        eager[name].close()
        if name == "steer":  # nobody counts the runs of a graph, and so it gives no number
            assert (hook.to_metrics(), eager[name].to_metrics()) == ({}, {"steered_tokens": 3 * 2})
        elif name != "export":
            assert hook.to_metrics() == pytest.approx(eager[name].to_metrics(), rel=1e-5, abs=1e-6)
    assert hooks["activation_stats"].to_metrics().keys() == {
        f"layers.{layer}/{stat}" for layer in range(3) for stat in ("mean", "absmax")
    }
    both = zip(read_export(tmp_path / "compiled"), read_export(tmp_path / "eager"), strict=True)
    pairs = [(one.module, torch.allclose(one.tensor, other.tensor, atol=1e-6)) for one, other in both]
    assert pairs == [(f"layers.{layer}", True) for layer in range(3)]


@pytest.mark.parametrize("name", ["activation_stats", "nan_alarm", "export"])
def test_plain_hooks_of_torch_end_the_graph_and_fire(name: str, tmp_path: Path) -> None:
    """Where another system has registered the hook, without hookline, the compiler stops at it and goes on behind."""
    hook = getattr(factories, name)({**SPECS[name], **({"folder": str(tmp_path)} if name == "export" else {})})
    model, x = Model(), torch.randn(2, 5, 8)
    with torch.no_grad():
        want = model(x)
        for layer in model.layers:
            layer.register_forward_hook(hook)
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(x), want)
    hook.close()
    if name == "export":
        assert hook.to_metrics()["written_tensors"] == 6
    else:
        assert {key.rpartition("/")[0] for key in hook.to_metrics()} == {"Layer.0", "Layer.1", "Layer.2"}
