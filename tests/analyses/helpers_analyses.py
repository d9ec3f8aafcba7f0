"""A small model with all the parts that analyses look for, contexts by hand, and formulas in float64."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline import analyses
from hookline.analyses._values import singular_values_of
from hookline.records.sink import StepSeries

__all__ = [
    "CLASSES",
    "GPU",
    "INTERVENTIONS",
    "OBSERVERS",
    "TokenModel",
    "by_epoch",
    "by_step",
    "context",
    "cos",
    "flat",
    "made",
    "new_manager",
    "random_grads",
    "singular_values",
    "token_experiment",
]

CLASSES = {name: getattr(analyses, path.partition(":")[2]) for name, path in analyses.BUILT_IN.items()}
INTERVENTIONS = [name for name, cls in CLASSES.items() if issubclass(cls, hl.InterventionHook)]
OBSERVERS = [name for name in CLASSES if name not in INTERVENTIONS]
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
)
P, WIDTH = 11, 8


class TokenModel(nn.Module):
    """Embedding, attention, BatchNorm, dropout, a hidden layer and a decoder, on pairs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(P, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, P)

    def forward(self, pairs: Tensor) -> Tensor:  # (B, 2) to (B, P)
        """The logits."""
        x = self.embedding(pairs)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x[:, -1])
        return self.decoder(x + self.out(self.dropout(torch.relu(self.hidden(x)))))


def token_experiment(device: str = "cpu", **options: Any) -> hl.Experiment:
    """Sums of two tokens, 5 batches an epoch."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    pairs = torch.cartesian_prod(torch.arange(P), torch.arange(P))[torch.randperm(P * P)][:60]
    dataset = TensorDataset(pairs, pairs.sum(1) % P)
    model = TokenModel()

    def evaluate(model: nn.Module) -> dict[str, Any]:
        logits = model(pairs)
        return {"val_acc": (logits.argmax(1) == dataset.tensors[1]).float().mean(), "val_loss": logits.sum()}

    settings: dict[str, Any] = {"evaluate": evaluate if device == "cpu" else None} | options
    return hl.Experiment(
        model.to(device),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(dataset, batch_size=12, shuffle=True),
        **settings,
    )


def made(name: str, **options: Any) -> Any:
    """A built-in hook by its name."""
    return CLASSES[name](**options)


def new_manager(names: list[str], sink: Any = None, **options: Any) -> hl.HookManager:
    """A manager of these hooks, with reference weights that are not the model's."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        reference = {name: value + 0.5 for name, value in TokenModel().state_dict().items()}
    hooks = [made(name, every=2) if name == "stats" else made(name) for name in names]
    return hl.HookManager(hooks=hooks, sinks=[sink] if sink else [], **({"reference_weights": reference} | options))


def context(
    model: nn.Module | None = None, point: hl.HookPoint = hl.HookPoint.POST_EPOCH, **given: Any
) -> hl.RunDataContext:
    """What a hook is shown."""
    return hl.RunDataContext(point, 0, model=model, **given)


def random_grads(model: nn.Module, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """A gradient for every parameter, with a part that all seeds share."""
    common, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    return {
        name: scale * (torch.randn(p.shape, generator=common) + torch.randn(p.shape, generator=own))
        for name, p in model.named_parameters()
    }


def flat(tensors: dict[str, Tensor]) -> np.ndarray:
    """Sorted by name, no biases, in float64: the rule for gradients, said again in other words."""
    kept = [name for name in sorted(tensors) if "bias" not in name]
    return np.concatenate([tensors[name].detach().double().numpy().ravel() for name in kept])


def cos(one: Any, other: Any) -> float:
    """Of the angle between two vectors, in float64; 0 if one of them has no length."""
    one, other = np.asarray(one, np.float64).ravel(), np.asarray(other, np.float64).ravel()
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / lengths) if lengths else 0.0


def by_step(sink: hl.sinks.MemorySink, hook: str) -> dict[int, dict[str, float]]:
    """What a hook said at single steps."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for record in sink.records:
        for key, series in record.metrics.items():
            if key.startswith(f"{hook}/"):
                assert isinstance(series, StepSeries)
                for step, value in zip(series.steps, series, strict=True):
                    found[step][key.removeprefix(f"{hook}/")] = value
    return dict(found)


def by_epoch(sink: hl.sinks.MemorySink, hook: str) -> dict[int, dict[str, float]]:
    """What a hook said when epochs were over."""
    found: dict[int, dict[str, float]] = {}
    for record in sink.records:
        metrics = {k.removeprefix(f"{hook}/"): v for k, v in record.metrics.items() if k.startswith(f"{hook}/")}
        if metrics:
            found[record.epoch] = metrics
    return found


def singular_values(matrix: Tensor) -> np.ndarray:
    """The singular values of one matrix, as the analyses find them."""
    return singular_values_of({"": matrix})[""]
