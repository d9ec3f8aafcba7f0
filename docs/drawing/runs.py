"""The training runs that the pictures of the analyses are drawn from.

Each function trains something small on the CPU, with a seed, and hands the metrics of its hooks to the files beside it.
A run is made when the first picture asks for it; all of them together take three minutes on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.training.mod_arithmetic import Config, ModArithmetic

SEED = 199
EPOCHS = 100
"""Of `mod_arithmetic`: it knows the training pairs after about 40, and the rule after about 60."""

OBSERVERS = [
    *("training_metrics", "norms", "consecutive", "variance", "batch_dynamics", "weight_tracking", "parameter_delta"),
    *("path_length", "gradient_projection", "subspace_gradient_info", "fourier", "phases", "training_diagnostics"),
]

Settings = Mapping[str, Mapping[str, Any]]
LAGS: Settings = {"batch_dynamics": {"lags": range(1, 31)}}
"""Over more than three epochs, which are nine steps each."""


class Run:
    """What the hooks of one run have said."""

    def __init__(self, sink: hl.sinks.MemorySink, model: nn.Module) -> None:
        self.sink, self.model = sink, model

    def __getitem__(self, name: str) -> tuple[list[int], list[Any]]:
        """A metric as epochs (or steps) and values; several of one epoch, as interventions give, are averaged."""
        times, values = zip(*self.sink.series(name), strict=True)
        return list(times), [_mean(value) if name.count("/losses") == 0 else value[0] for value in values]

    def at_end(self, name: str) -> Any:
        """Its last value."""
        return self[name][1][-1]

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """All metrics that begin and end so, in the order in which they came."""
        return [name for name in self.sink.latest if name.startswith(prefix) and name.endswith(suffix)]


def _mean(value: Any) -> Any:
    return sum(value) / len(value) if isinstance(value, list) and value else value


def train(
    experiment: hl.Experiment,
    hooks: Sequence[str],
    config: Settings | None = None,
    *,
    reference: Mapping[str, Tensor] | None = None,
    **loop: Any,
) -> Run:
    """Train it in the loop that ``epochs=`` or ``steps=`` says."""
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks, hook_config=config, sinks=[sink], reference_weights=reference)
    (hl.epoch_loop if "epochs" in loop else hl.step_loop)(experiment, manager=manager, **loop)
    return Run(sink, experiment.model)


# -- modular addition ------------------------------------------------------------------------------------------


def addition(strategy: str = "random", seed: int = SEED) -> ModArithmetic:
    """The experiment, from its first weights."""
    torch.manual_seed(seed)
    return ModArithmetic(Config(), strategy)


@cache
def final_weights() -> dict[str, Tensor]:
    """Where the run of `grokking` ends."""
    experiment = addition()
    hl.epoch_loop(experiment, epochs=EPOCHS, eval_every=0, snapshot_every=0)
    return {name: p.detach().clone() for name, p in experiment.model.named_parameters()}


@cache
def grokking() -> Run:
    """The whole of it with the observers, compared with where it ends."""
    config = {**ModArithmetic.hook_config, **LAGS}
    end = final_weights()  # before the seed is set again
    return train(addition(), OBSERVERS, config, reference=end, epochs=EPOCHS, snapshot_every=1)


@cache
def ordered(strategy: str) -> Run:
    """The same with the data in another order."""
    if strategy == "random":
        return grokking()
    hooks = ["training_metrics", "consecutive", "variance", "batch_dynamics", "path_length"]
    return train(addition(strategy), hooks, LAGS, epochs=EPOCHS, eval_every=10, snapshot_every=0)


@cache
def adam() -> Run:
    """Adam looked at for five steps of every fifth epoch, by the loss on pairs that are not trained on."""
    config = {"adam_dynamics": {"every_n_steps": 45, "burst_length": 5}}
    return train(addition(), ["training_metrics", "adam_dynamics"], config, epochs=EPOCHS, snapshot_every=0)


@cache
def counterfactual(strategy: str) -> Run:
    """The first epochs trained again in other orders."""
    return train(addition(strategy), ["counterfactual"], {}, epochs=16, eval_every=0, snapshot_every=0)


@cache
def validator(k: int) -> Run:
    """How well k shuffled epochs agree with k + 1."""
    config = {"counterfactual_validator": {"k": k}}
    return train(addition(), ["counterfactual_validator"], config, epochs=6, eval_every=0, snapshot_every=0)


# -- digits ----------------------------------------------------------------------------------------------------


def images(count: int | None = None) -> tuple[Tensor, Tensor]:
    """The digits as rows of 64 pixels of mean 0 and variance 1."""
    torch.manual_seed(SEED)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    chosen = torch.randperm(len(labels))[: round(0.8 * len(labels))][:count]
    flat = pixels[chosen].float() / 16
    return (flat - flat.mean()) / flat.std(), labels[chosen]


def layers(activation: Callable[[], nn.Module], depth: int, width: int = 64, gain: float = 1.0) -> nn.Sequential:
    """A plain net; weights have a variance of gain² / inputs."""
    torch.manual_seed(SEED)
    parts: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(64 if not parts else width, width)
        nn.init.normal_(linear.weight, std=gain / linear.in_features**0.5)
        nn.init.zeros_(linear.bias)
        parts += [linear, activation()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def plain(model: nn.Module, hooks: Sequence[str], *, lr: float, epochs: int, config: Settings | None = None) -> Run:
    """A plain net on the digits, by gradient descent on batches of 64."""
    torch.manual_seed(SEED)
    loader = DataLoader(TensorDataset(*images()), batch_size=64, shuffle=True, drop_last=True)
    experiment = hl.Experiment(model, torch.optim.SGD(model.parameters(), lr=lr), loader)
    return train(experiment, ["training_metrics", *hooks], config, epochs=epochs, snapshot_every=0)


@cache
def deep(activation: type[nn.Module], gain: float) -> Run:
    """Ten layers that begin too small, too large, or right."""
    config: Settings = {"stats": {"every": 1, "stats": "std"}}
    return plain(layers(activation, 10, gain=gain), ["stats"], lr=1e-3, epochs=1, config=config)


@cache
def full_batch(lr: float, every: int = 20, steps: int = 500) -> Run:
    """Gradient descent on 256 images at once, on squared errors: the setting in which sharpness rises to 2/lr."""
    inputs, labels = images(256)
    batch = (inputs, F.one_hot(labels, 10).float())
    model = layers(nn.Tanh, 2, width=32)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs: Tensor = model(batch[0])
        return (outputs - batch[1]).square().sum(1).mean() / 2

    experiment = hl.Experiment(model, torch.optim.SGD(model.parameters(), lr=lr), [batch], loss)
    config = {"hessian": {"every_n_steps": every, "method": "exact", "burst_length": 3}}
    return train(experiment, ["training_metrics", "hessian"], config, steps=steps, snapshot_every=every)


# -- tokens ----------------------------------------------------------------------------------------------------


class Finder(nn.Module):
    """One attention that has to find the one marked token among sixteen, and say which it is."""

    def __init__(self, tokens: int = 20, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.mark = nn.Embedding(tokens, width), nn.Embedding(2, width)
        self.query = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.decoder = nn.Linear(width, tokens)

    def forward(self, batch: Tensor) -> Tensor:  # (B, 2, T) to (B, tokens)
        """Look at all places once."""
        x = self.embedding(batch[:, 0]) + self.mark(batch[:, 1])
        found, _ = self.attention(self.query.expand(len(x), -1, -1), x, x, need_weights=False)
        logits: Tensor = self.decoder(found[:, 0])
        return logits


@cache
def finder() -> Run:
    """1,024 sequences; the marked place is another in each."""
    torch.manual_seed(SEED)
    tokens, place = torch.randint(20, (1024, 16)), torch.randint(16, (1024,))
    pairs = torch.stack((tokens, F.one_hot(place, 16)), 1)
    answers = tokens.gather(1, place[:, None])[:, 0]
    model = Finder()
    loader = DataLoader(TensorDataset(pairs, answers), batch_size=128, shuffle=True)
    experiment = hl.Experiment(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    return train(experiment, ["training_metrics", "attention"], epochs=30, snapshot_every=0)


@cache
def next_tokens(skew: float) -> Run:
    """The next token by the one before, of 64; the k-th most frequent comes k^-skew times as often as the first."""
    torch.manual_seed(SEED)
    shares = torch.arange(1, 65, dtype=torch.float).pow(-skew)
    before = torch.multinomial(shares, 8192, replacement=True)
    after = (before * 5 + torch.randint(4, before.shape)) % 64
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    loader = DataLoader(TensorDataset(before, after), batch_size=256, shuffle=True)
    experiment = hl.Experiment(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    return train(experiment, ["training_metrics", "token_gradient"], epochs=30, snapshot_every=0)
