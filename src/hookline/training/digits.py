"""Train a small CNN on handwritten digits: scikit-learn's 1,797 images of 8×8 pixels, in the step loop.

``hookline run digits`` makes it; the step loop calls its parts. The images are part of scikit-learn: nothing is
downloaded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.errors import MissingPackageError, OptionError
from hookline.guard.rng import kept_rng
from hookline.training.experiment import Experiment

_OBSERVERS = ["training_metrics", "batch_dynamics", "parameter_delta", "path_length", "training_diagnostics", "stats"]
_INTERVENTIONS = ["hessian", "adam_dynamics"]


@dataclass
class Config:
    """Hold the options; each field is a flag of ``hookline run digits``."""

    steps: int = 600
    """How many steps to train for."""
    snapshot_every: int = 100
    """How many steps from one snapshot, evaluation and line to the next."""
    batch_size: int = 64
    """How many images make a step."""
    train_fraction: float = 0.8
    """How much of the images is trained on."""
    channels: int = 16
    """How many channels the first convolution has; the second has twice as many."""
    dropout: float = 0.25
    """How much of the features is dropped before the last layer."""
    lr: float = 2e-3
    """The learning rate of AdamW."""
    weight_decay: float = 1e-2
    """The weight decay of AdamW."""


class DigitsNet(nn.Sequential):
    """Classify images by two convolutions with BatchNorm, dropout and one linear layer.

    Recipe: ``DigitsNet()(torch.zeros(2, 1, 8, 8)).shape`` is ``(2, 10)``.
    """

    def __init__(self, channels: int = 16, dropout: float = 0.25) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),  # 8×8 to 4×4
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),  # 4×4 to 2×2
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * channels, 10),
        )


class Digits(Experiment):
    """Train a classifier of handwritten digits.

    Recipe: ``hookline.step_loop(Digits(), steps=600)``; or ``hookline run digits``.

    All that is random comes from torch's stream: with one seed, every strategy begins with the same split and the same
    weights. ``"by_class"`` shows all zeros, then all ones, and so on, in every pass over the data.
    """

    name = "digits"
    loop = "step"
    config_class = Config
    strategies = ("random", "by_class")
    hook_sets: ClassVar = {
        "none": [],
        "minimal": ["training_metrics"],
        "observers": _OBSERVERS,
        "interventions": _INTERVENTIONS,
        "full": [*_OBSERVERS, *_INTERVENTIONS],
    }
    live_metrics: ClassVar = {
        "Training": {"loss": "training_metrics/loss", "validation accuracy": "eval/val_acc"},
        "Weights": {
            "relative change": "parameter_delta/relative_delta",
            "path efficiency": "path_length/path_efficiency",
        },
    }

    def __init__(self, config: Config | None = None, strategy: str = "random") -> None:
        config = config or Config()
        if strategy not in self.strategies:
            raise OptionError(f"digits has no strategy {strategy!r}; it has {', '.join(self.strategies)}.")
        if config.batch_size < 1:
            raise OptionError(f"batch_size={config.batch_size}: a step has at least 1 image.")
        images, digits = _images()
        order, num_train = torch.randperm(len(images)), _number(config.train_fraction, len(images))
        train, val = order[:num_train], order[num_train:]
        if strategy == "by_class":
            train = train[digits[train].argsort(stable=True)]
        self.train_set = TensorDataset(images[train], digits[train])
        self.val_set = TensorDataset(images[val], digits[val])
        model = DigitsNet(config.channels, config.dropout)
        super().__init__(
            model,
            torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay),
            DataLoader(self.train_set, batch_size=config.batch_size, shuffle=strategy == "random", drop_last=True),
            self.loss,
            config=config,
        )

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross entropy, on the device of the model and in its precision."""
        like = next(model.parameters())
        images, digits = batch
        return F.cross_entropy(model(images.to(like)), digits.to(like.device))

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Return the accuracy and the loss on the images that it is not trained on."""
        like = next(model.parameters())
        images, digits = self.val_set.tensors
        logits, digits = model(images.to(like)), digits.to(like.device)
        return {"val_acc": (logits.argmax(1) == digits).float().mean(), "val_loss": F.cross_entropy(logits, digits)}


def _number(fraction: float, total: int) -> int:
    number = round(fraction * total)
    if not 0 < number < total:
        raise OptionError(
            f"train_fraction={fraction} leaves {number} of {total} images to train on; both training and validation "
            "need some."
        )
    return number


def _images() -> tuple[Tensor, Tensor]:
    """Return the images as (N, 1, 8, 8) in 0 … 1, and the digits."""
    try:
        with kept_rng():  # scikit-learn draws random numbers while it is imported
            load_digits = importlib.import_module("sklearn.datasets").load_digits
    except ImportError:
        raise MissingPackageError(
            "The experiment 'digits' takes its images from scikit-learn, which is not installed. Next: "
            "pip install 'hookline[experiments]'."
        ) from None
    images, digits = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits)
