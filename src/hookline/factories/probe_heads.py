"""Score activations by a small trained head: make one from captured activations, save it, load it.

Users call `train_probe`; the factory ``probe`` loads what it saved. A head is one matrix (logistic regression), or two
with a ReLU between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.factory_hook import checked
from hookline.files import replace_file

__all__ = ["ProbeHead", "train_probe"]

_Layer: TypeAlias = tuple[Tensor, Tensor]
"""A matrix and a bias."""
_Layers: TypeAlias = Sequence[_Layer]
"""From the activations to the score."""
_IGNORED: Final = -100
"""The label of a token that has none, as in losses of language models."""
_ITERATIONS: Final = 60
_NAMES: Final = ("weight", "bias")
_FACTS: Final = ("rows", "train_accuracy", "held_out_accuracy")


class ProbeHead:
    """Score activations: the probability that a token belongs to the class.

    Recipe::

        head = train_probe(cache["model.layers.8"].output, labels)
        head.scores(hidden)  # (…) of (…, features)
        head.save("probe.safetensors")
    """

    def __init__(self, layers: _Layers, *, threshold: float = 0.5, facts: Mapping[str, float] | None = None) -> None:
        with torch.inference_mode(False):  # what is made in it can be used only there
            self._own = [(weight.detach().cpu().float(), bias.detach().cpu().float()) for weight, bias in layers]
        _check_layers(self._own)
        self._on = {torch.device("cpu"): self._own}
        """The layers by device."""
        self.width: int = self._own[0][0].shape[1]
        """How many features the activations have to have."""
        self.threshold = threshold
        """The score above which a token is flagged."""
        self.facts = dict(facts or {})
        """What is known of its training: ``rows``, ``train_accuracy``, ``held_out_accuracy``."""

    def __repr__(self) -> str:
        return f"<ProbeHead of {self.width} features, {self.facts}; scores(activations) gives probabilities>"

    def scores(self, hidden: Tensor) -> Tensor:
        """Return a probability for each row of ``hidden``, in float32, on its device."""
        return torch.sigmoid(self.logits(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the number behind each probability."""
        if not hidden.dim() or hidden.shape[-1] != self.width:
            raise OptionError(
                f"The probe is for {self.width} features, and the activations are of shape {tuple(hidden.shape)}: "
                "put it on the module that it was trained on."
            )
        device = hidden.device
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = [(weight.to(device), bias.to(device)) for weight, bias in self._own]
        return _logits(hidden.detach().float(), self._on[device])

    def save(self, path: str | Path) -> None:
        """Write the head to a safetensors file, with its threshold and facts."""
        from safetensors.torch import save_file

        tensors = {
            f"{n}.{name}": each for n, pair in enumerate(self._own) for name, each in zip(_NAMES, pair, strict=True)
        }
        about = {name: repr(value) for name, value in {**self.facts, "threshold": self.threshold}.items()}
        replace_file(Path(path), lambda draft: save_file(tensors, draft, metadata=about))

    @classmethod
    def load(cls, path: str | Path) -> ProbeHead:
        """Return the head in a file that `save` has written."""
        from safetensors import SafetensorError, safe_open

        try:
            with torch.inference_mode(False), safe_open(str(path), framework="pt") as file:
                about = dict(file.metadata() or {})
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dictionary
            layers = [(tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in range(max(len(tensors) // 2, 1))]
            facts = {name: float(about[name]) for name in _FACTS if name in about}  # others may have added notes
            return cls(layers, threshold=float(about.get("threshold", 0.5)), facts=facts)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise OptionError(f"{path} holds no probe, as train_probe(…).save(path) writes one ({error}).") from None

    def to_plain(self) -> dict[str, Any]:
        """Return the head as data for a spec: ``{"head": head.to_plain()}`` is a config of ``probe`` without a file."""
        layers = [dict(zip(_NAMES, (weight.tolist(), bias.tolist()), strict=True)) for weight, bias in self._own]
        return {"layers": layers, "threshold": self.threshold}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> ProbeHead:
        """Return the head that `to_plain` has described."""
        try:
            with torch.inference_mode(False):
                pairs = [[torch.tensor(each[name]).float() for name in _NAMES] for each in given["layers"]]
            return cls([(weight, bias) for weight, bias in pairs], threshold=float(given.get("threshold", 0.5)))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise OptionError(
                "A head as data is {'layers': [{'weight': rows of numbers, 'bias': numbers}, …], 'threshold': 0.5}, as "
                f"ProbeHead.to_plain returns it ({type(error).__name__}: {str(error)[:120]})."
            ) from None


def _logits(x: Tensor, layers: _Layers) -> Tensor:
    for number, (weight, bias) in enumerate(layers):
        x = F.linear(x.relu() if number else x, weight, bias)
    return x.squeeze(-1)


def _check_layers(layers: _Layers) -> None:
    shapes = [tuple(weight.shape) for weight, _ in layers]
    fits = bool(layers) and all(len(shape) == 2 for shape in shapes) and shapes[-1][0] == 1
    fits = fits and all(one[0] == other[1] for one, other in pairwise(shapes))
    if not fits or any(bias.shape != weight.shape[:1] for weight, bias in layers):
        raise OptionError(f"The matrices of a probe lead from features to one number, got shapes {shapes}.")
    if not all(bool(each.isfinite().all()) for pair in layers for each in pair):
        raise OptionError("The matrices of a probe have NaN or infinity in them; train it again.")


def train_probe(
    activations: Tensor,
    labels: Any,
    *,
    hidden: int = 0,
    weight_decay: float = 1e-2,
    held_out: float = 0.2,
    groups: Any = None,
    seed: int = 0,
) -> ProbeHead:
    """Return a head that tells the class of each row of ``activations``.

    Recipe::

        with hookline.capture(model, "model.layers.8", detach=True) as cache:
            model(input_ids)
        head = train_probe(cache["model.layers.8"].output, labels)  # (B, T, D), and (B, T) of 0 and 1
        print(head.facts["held_out_accuracy"])
        head.save("probe.safetensors")

    Features are scaled to mean 0 and variance 1 for training, and the scales become part of the matrices. Random
    numbers come from ``seed``: those of the run are not touched.

    Args:
        activations: (rows, features), or with more dimensions before the features, as ``capture`` keeps them.
        labels: 0 or 1 for each row; -100 leaves a row out.
        hidden: How many units the layer in the middle has; 0 is a linear probe.
        weight_decay: How strongly matrices are kept small.
        held_out: The share of rows that accuracy is measured on, and that training does not see.
        groups: A whole number for each row, such as its token id or the number of its text: the rows of a group are all
            held out, or none. Without it, a probe that knows tokens by heart has a good accuracy too.
        seed: For the choice of these rows, and for the first matrices.
    """
    if hidden:
        checked("train_probe: hidden", hidden, int)
    for name, value, most in (("held_out", held_out, 1), ("weight_decay", weight_decay, float("inf"))):
        if not 0 <= checked(f"train_probe: {name}", value, float) < most:
            raise OptionError(f"train_probe: {name} is from 0 to less than {most}, got {value!r}.")
    with torch.inference_mode(False), torch.enable_grad():
        x, y, group = _rows(activations, labels, groups)
        generator = torch.Generator().manual_seed(seed)
        names, group = torch.unique(group, return_inverse=True)
        order = torch.randperm(len(names), generator=generator).to(group.device)
        is_train = order[group] < len(names) - int(len(names) * held_out)
        if bool(y[is_train].min() == y[is_train].max()):
            raise OptionError("train_probe needs rows of both classes, and has one; label 0 and 1.")
        mean, scale = x[is_train].mean(0), x[is_train].std(0).clamp_min(1e-6)
        sizes = [x.shape[1], hidden, 1] if hidden else [x.shape[1], 1]
        layers = [_first_layer(*pair, generator, x.device) for pair in pairwise(sizes)]
        _fit(layers, (x[is_train] - mean) / scale, y[is_train], weight_decay)
        weight, bias = layers[0]
        layers[0] = weight / scale, bias - (weight / scale) @ mean
        head = ProbeHead(layers)
        is_right = (head.scores(x) > 0.5) == y.bool()
        accuracies = [float(is_right[rows].float().mean()) for rows in (is_train, ~is_train)]  # NaN if none is held out
        head.facts = dict(zip(_FACTS, (len(x), *accuracies), strict=True))
    return head


def _rows(activations: Tensor, labels: Any, groups: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return activation, label and group of each row that has a label; without groups, each row is one."""
    if not isinstance(activations, Tensor) or activations.dim() < 2:
        raise OptionError("train_probe: activations are a tensor of (rows, features), or (batch, tokens, features).")
    x = activations.detach().clone().reshape(-1, activations.shape[-1]).float()
    y = _one_for_each(labels, x, "labels")
    group = _one_for_each(torch.arange(len(x)) if groups is None else groups, x, "groups")
    chosen = y != _IGNORED
    x, y, group = x[chosen], y[chosen].float(), group[chosen]
    if not len(y) or not bool(((y == 0) | (y == 1)).all()):
        raise OptionError("train_probe: labels are 0 and 1; -100 leaves a row out.")
    if not bool(x.isfinite().all()):
        raise OptionError("train_probe: the activations have NaN or infinity in them; leave those rows out by -100.")
    return x, y, group


def _one_for_each(given: Any, rows: Tensor, what: str) -> Tensor:
    found = torch.as_tensor(given).detach().clone().reshape(-1).to(rows.device)
    if len(found) != len(rows):
        raise OptionError(f"train_probe: there are {len(rows)} rows and {len(found)} {what}; each row has one.")
    return found


def _first_layer(inputs: int, outputs: int, generator: torch.Generator, device: torch.device) -> _Layer:
    """Return a matrix and a bias with the first numbers of an ``nn.Linear``."""
    numbers = (torch.rand(outputs, inputs + 1, generator=generator) * 2 - 1) * inputs**-0.5
    weight, bias = numbers.to(device).split([inputs, 1], dim=1)
    return weight.clone().requires_grad_(), bias.flatten().clone().requires_grad_()


def _fit(layers: _Layers, x: Tensor, y: Tensor, weight_decay: float) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        small = torch.stack([weight.square().sum() for weight, _ in layers]).sum()
        value = F.binary_cross_entropy_with_logits(_logits(x, layers), y) + weight_decay * 0.5 * small
        value.backward()  # type: ignore[no-untyped-call]
        return value

    # Full batches of a small problem: a second-order method needs a tenth of the passes that Adam does.
    both = [each for pair in layers for each in pair]
    optimizer = torch.optim.LBFGS(both, max_iter=_ITERATIONS, line_search_fn="strong_wolfe")
    optimizer.step(closure)  # type: ignore[no-untyped-call]
