"""Runs to guard, and portraits of them: all that could be otherwise afterwards, told without the guard's help."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.guard.guard import Guard
from hookline.guard.model_context import ModelDataContext

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
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
        make: Callable[[], nn.Module] = Tied,
        dtype: torch.dtype = torch.float32,
        steps: int = 2,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.device, self.dtype = device, dtype
        self.model = make().to(device, dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        self.data = TensorDataset(torch.randn(24, 5), torch.arange(24))
        self.loader = DataLoader(self.data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
        for _ in range(steps):
            self.step()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Differentiable everywhere, and drops out."""
        return model(batch[0].to(self.device, self.dtype)).float().square().mean()

    def forward(self) -> Tensor:
        """Return the loss of the next random batch."""
        return self.loss(self.model, [torch.randn(6, 5)])

    def step(self, loss: Tensor | None = None) -> None:
        """Make one training step, on the next random batch or with a loss that was computed before."""
        loss = self.forward() if loss is None else loss
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    @property
    def guarded(self) -> tuple[Any, ...]:
        """What ``Guard`` and ``rollback`` take."""
        return self.model, self.optimizer, self.scheduler, self.scaler


class Stop(Exception):
    """Ends a block in the middle."""


def guard_of(run: Run, **options: Any) -> Guard:
    """Return a guard for all of a run."""
    return Guard(*run.guarded, loader=run.loader, **options)


def ruin(run: Run) -> None:
    """Fill everything with 999, step everything, and leave the model another one."""
    with torch.no_grad():
        for tensor in [*run.model.parameters(), *run.model.buffers()]:
            tensor.fill_(999)
    run.step()
    run.model.eval()
    del run.model.head


def portrait(run: Run, *, addresses: bool = True) -> dict[str, Any]:
    """Return by name everything that decides how the run goes on, and which objects it is made of.

    Without ``addresses``, memory may be elsewhere, as after a resize.
    """
    seen: dict[str, Any] = {}
    for name, module in run.model.named_modules(remove_duplicate=False):
        seen[f"{name} class"] = type(module)
        for key, value in vars(module).items():
            seen[f"{name}.{key} attribute"] = _value(value)
        for key, value in [*module._parameters.items(), *module._buffers.items(), *_items(vars(module))]:
            if isinstance(value, Tensor):
                seen[f"{name}.{key}" if name else key] = _tensor(value, addresses)
    for index, (parameter, state) in enumerate(run.optimizer.state.items()):
        seen[f"state {index}"] = id(parameter), id(state), [(key, _value(value)) for key, value in state.items()]
        seen |= {f"state {index} {key}": _tensor(v, addresses) for key, v in state.items() if isinstance(v, Tensor)}
    for index, group in enumerate(run.optimizer.param_groups):
        seen[f"group {index}"] = id(group), [(key, _value(value)) for key, value in group.items()]
    seen["scheduler"] = repr(run.scheduler.state_dict())
    seen["scaler"] = repr(run.scaler.state_dict())
    return seen | _random(run)


def _items(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return attributes, and what is in those that are lists."""
    lists = [(key, value) for key, value in attributes.items() if isinstance(value, list)]
    return [*attributes.items(), *((f"{key}[{i}]", item) for key, value in lists for i, item in enumerate(value))]


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


def _tensor(tensor: Tensor, addresses: bool) -> Any:
    grad = tensor.grad if tensor.is_leaf else None
    begin = tensor.untyped_storage().data_ptr()
    return (
        id(tensor),
        type(tensor),
        tensor.data_ptr() if addresses else tensor.data_ptr() - begin,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._version,
        bytes_of(tensor),
        sorted(vars(tensor)),
        len(tensor._backward_hooks or ()),
        len(tensor._post_accumulate_grad_hooks or ()),
        None if grad is None else (id(grad), grad.data_ptr() if addresses else 0, grad._version, bytes_of(grad)),
    )


def bytes_of(tensor: Tensor) -> bytes:
    """Return the numbers of a tensor; by a copy, since torch does not resize memory that was shown to NumPy."""
    return tensor.detach().clone().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def _value(value: Any) -> Any:
    """Return what can be told of an attribute by itself."""
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, np.ndarray):
        return id(value), value.shape, value.tobytes()
    if isinstance(value, list):
        return id(value), [id(item) for item in value]
    return repr(value) if isinstance(value, int | float | str | bool | None) else id(value)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what is not the same."""
    return [name for name in {**one, **other} if name not in one or name not in other or one[name] != other[name]]


def context_of(run: Run, **options: Any) -> ModelDataContext:
    """Return the context of a run, with a batch of its own."""
    given = {
        "scheduler": run.scheduler,
        "scaler": run.scaler,
        "loader": run.loader,
        "loss_fn": run.loss,
        "batch": [torch.ones(6, 5)],
    }
    return ModelDataContext(run.model, run.optimizer, **(given | options))


def small_context(**options: Any) -> tuple[nn.Module, ModelDataContext]:
    """Return a model without randomness, so that gradients can be compared, and its context."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"loader": loader, "loss_fn": small_loss, "batch": next(iter(loader))}
    return model, ModelDataContext(model, optimizer, **(given | options))


def small_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of `small_context`."""
    return model(batch[0]).square().mean()
