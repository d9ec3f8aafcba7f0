"""Runs to guard, and portraits of them: all that could be otherwise afterwards, told without the guard's help."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["OPTIMIZERS", "Run", "differing", "portrait"]

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=False),
    "adam_amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, foreach=True),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


class Tied(nn.Module):
    """An embedding whose weight is also the output's, with a normalization that has buffers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(6, 5)
        self.head.weight = nn.Parameter(torch.randn(5, 6))
        self.out = nn.Linear(5, 6, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("half_of_scale", self.scale[::2], persistent=False)
        self.calls = 0
        self.history: list[Any] = [1, torch.arange(3.0)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.drop(self.norm(self.embed(x)) * self.scale)
        return self.out(self.head(hidden))


class Run:
    """A model with all that goes with it; a few steps are behind it."""

    def __init__(
        self,
        optimizer: str = "adamw_foreach",
        *,
        dtype: torch.dtype = torch.float32,
        steps: int = 2,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.device, self.dtype = device, dtype
        self.model = Tied().to(device, dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        data = TensorDataset(torch.randn(24, 5), torch.arange(24))
        self.loader = DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
        for _ in range(steps):
            self.step()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Differentiable everywhere, and drops out."""
        return model(batch[0].to(self.device, self.dtype)).float().square().mean()

    def step(self) -> None:
        """One training step, on the next random batch."""
        batch = [torch.randn(6, 5)]
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(self.model, batch)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    @property
    def guarded(self) -> tuple[Any, ...]:
        """What ``Guard`` and ``rollback`` take."""
        return self.model, self.optimizer, self.scheduler, self.scaler


def portrait(run: Run) -> dict[str, Any]:
    """By name, everything that decides how the run goes on, and which objects it is made of."""
    seen: dict[str, Any] = {}
    for name, module in run.model.named_modules(remove_duplicate=False):
        seen[f"{name} class"] = type(module)
        seen[f"{name} attributes"] = [(key, _value(value)) for key, value in vars(module).items()]
        for key in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            seen[f"{name} {key}"] = [(k, id(v)) for k, v in getattr(module, key).items()]
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                seen[f"{name}.{key}"] = _tensor(tensor)
    seen["history"] = _tensor(run.model.history[1])
    for index, (parameter, state) in enumerate(run.optimizer.state.items()):
        seen[f"state {index}"] = id(parameter), id(state), [(key, _value(value)) for key, value in state.items()]
        seen |= {f"state {index} {key}": _tensor(v) for key, v in state.items() if isinstance(v, Tensor)}
    for index, group in enumerate(run.optimizer.param_groups):
        seen[f"group {index}"] = id(group), [(key, _value(value)) for key, value in group.items()]
    seen["scheduler"] = repr(run.scheduler.state_dict())
    seen["scaler"] = repr(run.scaler.state_dict())
    return seen | _random(run)


def _random(run: Run) -> dict[str, Any]:
    seen = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "loader": run.loader.generator.get_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        seen["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return seen


def _tensor(tensor: Tensor) -> Any:
    grad = tensor.grad if tensor.is_leaf else None
    return (
        id(tensor),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._version,
        _bytes(tensor),
        sorted(vars(tensor)),
        len(tensor._backward_hooks or ()),
        None if grad is None else (id(grad), grad.data_ptr(), grad._version, _bytes(grad)),
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def _value(value: Any) -> Any:
    """What can be told of an attribute by itself."""
    return repr(value) if isinstance(value, int | float | str | bool | None) else id(value)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same."""
    return [name for name in {**one, **other} if name not in one or name not in other or one[name] != other[name]]
