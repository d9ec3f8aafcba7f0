"""Score activations by a small trained head: make one from captured activations, save it, load it.

Users call `train_probe`; the factory ``probe`` loads what it saved. A head is one matrix (logistic regression), or two
with a ReLU between them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.factories.factory_hook import checked
from hookline.files import replace_file
from hookline.tables import number_text

__all__ = ["ProbeHead", "train_probe"]

_Layers: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Matrices and biases, from the activations to the score."""
_IGNORED: Final = -100
"""The label of a token that has none, as in losses of language models."""
_ITERATIONS: Final = 60
_FACTS: Final = ("rows", "train_accuracy", "held_out_accuracy")


class ProbeHead:
    """Score activations: the probability that a token belongs to the class.

    Recipe::

        head = train_probe(cache["model.layers.8"].output, labels)
        head.scores(hidden)  # (…) of (…, features)
        head.save("probe.safetensors")
    """

    def __init__(self, layers: _Layers, *, threshold: float = 0.5, facts: Mapping[str, float] | None = None) -> None:
        _check_layers(layers)
        self.net = _network([layers[0][0].shape[1], *(len(bias) for _, bias in layers)])
        """Leads from activations to the number behind a probability."""
        with torch.no_grad():
            for linear, (weight, bias) in zip(_linear(self.net), layers, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
        self.net.requires_grad_(False)
        self._on: dict[torch.device, nn.Sequential] = {torch.device("cpu"): self.net}
        self.threshold = threshold
        """The score above which a token is flagged."""
        self.facts = dict(facts or {})
        """What is known of its training: ``rows``, ``train_accuracy``, ``held_out_accuracy``."""

    @property
    def width(self) -> int:
        """Return how many features the activations have to have."""
        return _linear(self.net)[0].in_features

    def __repr__(self) -> str:
        facts = "".join(f", {name} {number_text(value)}" for name, value in self.facts.items())
        return f"<ProbeHead of {self.width} features{facts}; scores(activations) gives probabilities>"

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
        net = self._on.get(hidden.device)
        if net is None:
            with torch.inference_mode(False):
                net = self._on[hidden.device] = copy.deepcopy(self.net).to(hidden.device)
        found: Tensor = net(hidden.detach().float()).squeeze(-1)
        return found

    def save(self, path: str | Path) -> None:
        """Write the head to a safetensors file, with its threshold and facts."""
        from safetensors.torch import save_file

        about = {name: repr(value) for name, value in {**self.facts, "threshold": self.threshold}.items()}
        replace_file(Path(path), lambda draft: save_file(self.net.state_dict(), draft, metadata=about))

    @classmethod
    def load(cls, path: str | Path) -> ProbeHead:
        """Return the head in a file that `save` has written."""
        from safetensors import SafetensorError, safe_open

        try:
            with torch.inference_mode(False), safe_open(str(path), framework="pt") as file:
                about = dict(file.metadata() or {})
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dictionary
            # Every second module of the network is a ReLU, which has none.
            layers = [(tensors[f"{i}.weight"], tensors[f"{i}.bias"]) for i in range(0, len(tensors), 2)]
            facts = {name: float(about[name]) for name in _FACTS if name in about}  # others may have added notes
            return cls(layers, threshold=float(about.get("threshold", 0.5)), facts=facts)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise OptionError(
                f"{path} holds no probe ({error}); write one by hookline.factories.train_probe(…).save(path)."
            ) from None

    def to_plain(self) -> dict[str, Any]:
        """Return the head as data for a spec: ``{"head": head.to_plain()}`` is a config of ``probe`` without a file."""
        layers = [{"weight": each.weight.tolist(), "bias": each.bias.tolist()} for each in _linear(self.net)]
        return {"layers": layers, "threshold": self.threshold}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> ProbeHead:
        """Return the head that `to_plain` has described."""
        try:
            pairs = [(each["weight"], each["bias"]) for each in given["layers"]]
            layers = [(torch.tensor(weight).float(), torch.tensor(bias).float()) for weight, bias in pairs]
            return cls(layers, threshold=float(given.get("threshold", 0.5)))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise OptionError(
                "A head as data is {'layers': [{'weight': rows of numbers, 'bias': numbers}, …], 'threshold': 0.5}, as "
                f"ProbeHead.to_plain returns it ({type(error).__name__}: {str(error)[:120]})."
            ) from None


def _network(sizes: Sequence[int]) -> nn.Sequential:
    """Return linear layers of these sizes with a ReLU between two of them; their numbers are not set."""
    make: Any = nn.utils.skip_init  # leaves random streams alone
    layers = [layer for pair in pairwise(sizes) for layer in (nn.ReLU(), make(nn.Linear, *pair, device="cpu"))]
    return nn.Sequential(*layers[1:])


def _set_first_numbers(net: nn.Sequential, seed: int) -> None:
    """Set all matrices and biases as ``nn.Linear`` does, from a random stream of their own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in _linear(net):
            bound = each.in_features**-0.5
            each.weight.uniform_(-bound, bound, generator=generator)
            each.bias.uniform_(-bound, bound, generator=generator)


def _linear(net: nn.Sequential) -> list[nn.Linear]:
    return [each for each in net if isinstance(each, nn.Linear)]


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
    threshold: float = 0.5,
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
        threshold: The score above which a token is flagged.
        seed: For the choice of these rows, and for the first matrices.
    """
    if hidden:
        checked("train_probe: hidden", hidden, int)
    if not 0 <= checked("train_probe: held_out", held_out, float) < 1:
        raise OptionError(f"train_probe: held_out is a share of the rows, from 0 to less than 1, got {held_out!r}.")
    if checked("train_probe: weight_decay", weight_decay, float) < 0:
        raise OptionError(f"train_probe: weight_decay is 0 or more, got {weight_decay!r}.")
    if not 0 < checked("train_probe: threshold", threshold, float) < 1:
        raise OptionError(f"train_probe: threshold is a probability between 0 and 1, got {threshold!r}.")
    with torch.inference_mode(False), torch.enable_grad():
        x, y, group = _rows(activations, labels, groups)
        train, test = _split(group, held_out, seed)
        if bool(y[train].min() == y[train].max()):
            raise OptionError("train_probe needs rows of both classes, and has one; label 0 and 1.")
        mean, scale = x[train].mean(0), x[train].std(0).clamp_min(1e-6)
        net = _network([x.shape[1], hidden, 1] if hidden else [x.shape[1], 1])
        _set_first_numbers(net, seed)
        net.to(x.device)
        _fit(net, (x[train] - mean) / scale, y[train], weight_decay)
        layers = [(each.weight.detach(), each.bias.detach()) for each in _linear(net)]
        weight, bias = layers[0]
        layers[0] = weight / scale, bias - (weight / scale) @ mean
        head = ProbeHead(layers, threshold=threshold)
        right = (head.scores(x) > 0.5) == y.bool()
        accuracies = [float(right[rows].float().mean()) for rows in (train, test)]  # NaN if none is held out
        head.facts = dict(zip(_FACTS, (len(x), *accuracies), strict=True))
    return head


def _split(groups: Tensor, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows to train on and the rows to hold out, whole groups of each."""
    names, group = torch.unique(groups, return_inverse=True)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).to(group.device)
    is_train = order[group] < len(names) - int(len(names) * held_out)
    return is_train.nonzero().flatten(), (~is_train).nonzero().flatten()


def _rows(activations: Tensor, labels: Any, groups: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return activation, label and group of each row that has a label; without groups, each row is one."""
    if not isinstance(activations, Tensor) or activations.dim() < 2:
        raise OptionError(
            "train_probe takes activations as a tensor of (rows, features), or (batch, tokens, features)."
        )
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
    try:
        found = torch.as_tensor(given).detach().clone().reshape(-1).to(rows.device)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"train_probe: {what} are whole numbers, one for each row.") from None
    if len(found) != len(rows):
        raise OptionError(f"train_probe: there are {len(rows)} rows and {len(found)} {what}.")
    return found


def _fit(net: nn.Sequential, x: Tensor, y: Tensor, weight_decay: float) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        small = torch.stack([each.weight.square().sum() for each in _linear(net)]).sum()
        value = F.binary_cross_entropy_with_logits(net(x).squeeze(-1), y) + weight_decay * 0.5 * small
        value.backward()  # type: ignore[no-untyped-call]
        return value

    # Full batches of a small problem: a second-order method needs a tenth of the passes that Adam does.
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=_ITERATIONS, line_search_fn="strong_wolfe")
    optimizer.step(closure)  # type: ignore[no-untyped-call]
