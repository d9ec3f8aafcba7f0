"""Train a small transformer on modular addition, (a + b) mod p; strategies vary the order of its data.

``hookline run mod_arithmetic --strategy stride`` makes it; the epoch loop calls its parts. Every pair (a, b) is an
example: some are for training, the others for validation. The model memorises the first, and finds the rule some epochs
later: then validation accuracy rises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.errors import OptionError
from hookline.training.experiment import Experiment

_OBSERVERS = [
    *("training_metrics", "norms", "consecutive", "variance", "batch_dynamics", "weight_tracking", "parameter_delta"),
    *("path_length", "training_diagnostics", "subspace_gradient_info", "attention", "fourier", "token_gradient"),
    *("phases", "stats"),
]  # gradient_projection compares with the weights of another run: it is asked for together with their file
_INTERVENTIONS = ["hessian", "counterfactual", "adam_dynamics"]


@dataclass
class Config:
    """Hold the options; each field is a flag of ``hookline run mod_arithmetic``."""

    epochs: int = 100
    """How often to go through the training pairs."""
    snapshot_every: int = 25
    """How many epochs from one snapshot, and line, to the next."""
    eval_every: int = 1
    """How many epochs from one evaluation to the next."""
    p: int = 59
    """The modulus: tokens are 0 to p - 1, and there are p² pairs."""
    train_fraction: float = 0.6
    """How much of the pairs is trained on."""
    batch_size: int = 256
    """How many pairs make a step."""
    width: int = 64
    """How wide the residual stream is."""
    heads: int = 4
    """How many attention heads a layer has."""
    layers: int = 1
    """How many layers there are."""
    lr: float = 3e-3
    """The learning rate of AdamW."""
    weight_decay: float = 0.3
    """The weight decay of AdamW; with little of it the rule is found late, or never."""


class Block(nn.Module):
    """Add attention, then an MLP, to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) to (B, T, D)
        """Return the residual stream after the layer."""
        attended, _ = self.attention(x, x, x, need_weights=False)
        x = x + attended
        added: Tensor = self.mlp(x)
        return x + added


class ModularTransformer(nn.Module):
    """Return the logits of the sum of two tokens.

    Recipe: ``ModularTransformer(p=59)(torch.tensor([[3, 4]])).shape`` is ``(1, 59)``.
    """

    def __init__(self, p: int, width: int = 64, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(p, width)
        self.position = nn.Parameter(torch.randn(2, width) / math.sqrt(width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.decoder = nn.Linear(width, p, bias=False)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(width))

    def forward(self, pairs: Tensor) -> Tensor:  # (B, 2) to (B, p)
        """Return the logits at the place of the second token."""
        x = self.embedding(pairs) + self.position
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.decoder(x[:, -1])
        return logits


def arranged(pairs: Tensor, p: int, strategy: str) -> Tensor:
    """Return the pairs in the order of an epoch; ``"random"`` has another one in every epoch.

    Recipe: ``arranged(pairs, p=59, strategy="stride")``.

    ``"stride"`` goes through the first token in strides of ⌊√p⌋: 0, 7, 14, …, then 1, 8, 15, …. ``"target"`` goes by
    the answer, from 0 to p - 1. ``"fixed_random"`` is one shuffle, the same in every epoch: the control for an order
    that is always the same.
    """
    a, b = pairs.unbind(1)
    stride = math.isqrt(p)
    if strategy == "stride":
        return pairs[((a % stride) * p * p + a * p + b).argsort()]
    if strategy == "target":
        return pairs[((a + b) % p * p + a).argsort()]
    return pairs[torch.randperm(len(pairs))] if strategy == "fixed_random" else pairs


class ModArithmetic(Experiment):
    """Train on modular addition, with the data in one order or another.

    Recipe: ``hookline.epoch_loop(ModArithmetic(Config(epochs=5)), epochs=5)``; or ``hookline run mod_arithmetic``.

    All that is random comes from torch's stream: with one seed, every strategy begins with the same split and the same
    weights.
    """

    name = "mod_arithmetic"
    loop = "epoch"
    config_class = Config
    strategies = ("random", "stride", "target", "fixed_random")
    hook_sets: ClassVar = {
        "none": [],
        "minimal": ["training_metrics"],
        "observers": _OBSERVERS,
        "interventions": _INTERVENTIONS,
        "full": [*_OBSERVERS, *_INTERVENTIONS],
    }
    # Ten times the even share, what fourier asks for by itself, is 0.17 at p = 59; five frequencies have 0.1 each.
    # A look of stats takes 0.6 of a step of a model as small as this one: once in three epochs of nine steps.
    hook_config: ClassVar = {"fourier": {"significance_multiplier": 3.0}, "stats": {"every": 30}}
    live_metrics: ClassVar = {
        "Training": {
            "loss": "training_metrics/loss",
            "train accuracy": "training_metrics/train_acc",
            "validation accuracy": "training_metrics/val_acc",
        },
        "Gradients": {
            "norm": "norms/total_norm",
            "cosine to the last epoch": "consecutive/cos_sim",
            "signal to noise": "variance/signal_to_noise",
        },
        "Weights": {
            "relative change": "parameter_delta/relative_delta",
            "path efficiency": "path_length/path_efficiency",
            "peak frequency": "fourier/peak_frequency",
            "peak power": "fourier/peak_power",
        },
    }

    def __init__(self, config: Config | None = None, strategy: str = "random") -> None:
        config = config or Config()
        if strategy not in self.strategies:
            raise OptionError(f"mod_arithmetic has no strategy {strategy!r}; it has {', '.join(self.strategies)}.")
        tokens = torch.arange(config.p)
        pairs = torch.cartesian_prod(tokens, tokens)[torch.randperm(config.p**2)]
        num_train = round(config.train_fraction * len(pairs))
        if config.heads < 1 or config.width % config.heads or config.batch_size < 1 or not 0 < num_train < len(pairs):
            raise OptionError(
                "heads have to divide width, batch_size to be 1 or more, and train_fraction to leave pairs to train on "
                f"and to validate on; got heads={config.heads}, width={config.width}, batch_size={config.batch_size}, "
                f"train_fraction={config.train_fraction}."
            )
        model = ModularTransformer(config.p, config.width, config.heads, config.layers)
        self.train_set = _labelled(arranged(pairs[:num_train], config.p, strategy), config.p)
        self.val_set = _labelled(pairs[num_train:], config.p)
        super().__init__(
            model,
            torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay),
            DataLoader(self.train_set, batch_size=config.batch_size, shuffle=strategy == "random"),
            config=config,
        )

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Return accuracy and loss on the pairs that it is trained on, and on the others."""
        train_loss, train_acc = _score(model, self.train_set)
        val_loss, val_acc = _score(model, self.val_set)
        return {"train_acc": train_acc, "val_acc": val_acc, "train_loss": train_loss, "val_loss": val_loss}

    def target_gradient(self, model: nn.Module, step: int) -> dict[str, Tensor]:
        """Return the gradient of the loss on the validation pairs; hooks compare the training gradient with it."""
        loss, _ = _score(model, self.val_set)
        named = dict(model.named_parameters())
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def _labelled(pairs: Tensor, p: int) -> TensorDataset:
    return TensorDataset(pairs, pairs.sum(1) % p)


def _score(model: nn.Module, dataset: TensorDataset) -> tuple[Tensor, Tensor]:
    """Return loss and accuracy on the whole of `dataset`."""
    device = next(model.parameters()).device
    pairs, target = (tensor.to(device) for tensor in dataset.tensors)
    logits = model(pairs)
    return F.cross_entropy(logits, target), (logits.argmax(1) == target).float().mean()
