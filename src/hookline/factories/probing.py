"""``probe``: score every token of outputs by a small trained head, while a model answers.

Users call `train_probe` on captured activations: a head is one matrix (logistic regression), or two with a ReLU between
them. Specs and users make the hook with it. Scores are added up by the engine of ``watch``; what is over the threshold
goes to the answer of its request by `request_notes`, where an engine reads these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.factories.factory_hook import checked, read_options, tried_by
from hookline.factories.request_notes import RequestFlag, note_scores
from hookline.factories.served_batch import TokenOptions, measurable, running
from hookline.factories.streaming_stats import ActivationStats
from hookline.files import replace_file
from hookline.observe.tokens import current_tokens, serving
from hookline.observe.watch.row import Layout, as_metrics
from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.factories.streaming_stats import Gathered, StreamedModule
    from hookline.sites.hook_at_site import Site


# -- heads ---------------------------------------------------------------------------------------------------------

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

    Args:
        layers: Matrices and biases that lead from the features to one number, with a ReLU between two.
        threshold: The score above which a token is flagged.
        facts: What is known of its training: ``rows``, ``train_accuracy``, ``held_out_accuracy``.
    """

    def __init__(
        self,
        layers: Iterable[tuple[Tensor, Tensor]],
        *,
        threshold: float = 0.5,
        facts: Mapping[str, float] | None = None,
    ) -> None:
        with torch.inference_mode(False):  # what is made in it can be used only there
            own = _network([(weight.detach().cpu().float(), bias.detach().cpu().float()) for weight, bias in layers])
        self._on = {torch.device("cpu"): own.requires_grad_(False)}
        """The layers by device."""
        self.width = _width_of(own)
        """How many features the activations have to have."""
        self.threshold, self.facts = threshold, dict(facts or {})

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
        if hidden.device not in self._on:
            with torch.inference_mode(False):
                self._on[hidden.device] = copy.deepcopy(self._own).to(hidden.device)
        found: Tensor = self._on[hidden.device](hidden.detach().float())
        return found.squeeze(-1)

    @property
    def _own(self) -> nn.Sequential:
        return self._on[torch.device("cpu")]

    def save(self, path: str | Path) -> None:
        """Write the head to a safetensors file, with its threshold and facts."""
        from safetensors.torch import save_file

        about = {name: repr(value) for name, value in {**self.facts, "threshold": self.threshold}.items()}
        replace_file(Path(path), lambda draft: save_file(self._own.state_dict(), draft, metadata=about))

    @classmethod
    def load(cls, path: str | Path) -> ProbeHead:
        """Return the head in a file that `save` has written."""
        from safetensors import SafetensorError, safe_open

        try:
            with torch.inference_mode(False), safe_open(str(path), framework="pt") as file:
                about = dict(file.metadata() or {})
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dictionary
            layers = [(tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in range(0, max(len(tensors), 1), 2)]
            facts = {name: float(about[name]) for name in _FACTS if name in about}  # others may have added notes
            return cls(layers, threshold=float(about.get("threshold", 0.5)), facts=facts)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise OptionError(f"{path} holds no probe, as train_probe(…).save(path) writes one ({error}).") from None

    def to_plain(self) -> dict[str, Any]:
        """Return the head as data for a spec: ``{"head": head.to_plain()}`` is a config of ``probe`` without a file."""
        layers = [{"weight": weight.tolist(), "bias": bias.tolist()} for weight, bias in _layers_of(self._own)]
        return {"layers": layers, "threshold": self.threshold}

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> ProbeHead:
        """Return the head that `to_plain` has described."""
        try:
            with torch.inference_mode(False):
                layers = [(torch.tensor(each["weight"]), torch.tensor(each["bias"])) for each in given["layers"]]
            return cls(layers, threshold=float(given.get("threshold", 0.5)))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise OptionError(
                "A head as data is {'layers': [{'weight': rows of numbers, 'bias': numbers}, …], 'threshold': 0.5}, as "
                f"ProbeHead.to_plain returns it ({type(error).__name__}: {str(error)[:120]})."
            ) from None


def _network(layers: Iterable[tuple[Tensor, Tensor]]) -> nn.Sequential:
    """Return linear layers of these matrices and biases, with a ReLU between two."""
    found: list[nn.Module] = []
    for weight, bias in layers:
        linear = nn.Linear(1, 1, device="meta")
        linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
        found += [nn.ReLU(), linear] if found else [linear]
    return nn.Sequential(*found)


def _layers_of(network: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    """Return matrix and bias of each linear layer."""
    return [(each.weight, each.bias) for each in network if isinstance(each, nn.Linear)]


def _width_of(network: nn.Sequential) -> int:
    """Return how many features a network takes that returns one number."""
    shapes = [tuple(each.shape) for each in network.parameters()]
    try:
        width = shapes[0][1]
        with torch.inference_mode(False):
            fits = network(torch.zeros(1, width)).shape == (1, 1)
    except (IndexError, RuntimeError):
        fits = False
    if not fits:
        raise OptionError(f"The matrices of a probe lead from features to one number, got shapes {shapes}.")
    if not all(bool(each.isfinite().all()) for each in network.parameters()):
        raise OptionError("The matrices of a probe have NaN or infinity in them; train it again.")
    return width


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
        network = _network([_first_layer(*pair, generator) for pair in pairwise(sizes)]).to(x.device)
        _fit(network, (x[is_train] - mean) / scale, y[is_train], weight_decay)
        layers = _layers_of(network)
        weight, bias = layers[0]
        layers[0] = weight / scale, bias - (weight / scale) @ mean
        head = ProbeHead(layers)
        is_right = (head.scores(x) > 0.5) == y.bool()
        accuracies = [float(is_right[rows].float().mean()) for rows in (is_train, ~is_train)]  # NaN if none is held out
        head.facts = dict(zip(_FACTS, (len(x), *accuracies), strict=True))
    return head


def _rows(activations: Tensor, labels: Any, groups: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return activation, label and group of each row that has a label; without groups, each row is one."""
    x = activations.detach().clone().reshape(-1, activations.shape[-1]).float()
    both = labels, torch.arange(len(x)) if groups is None else groups
    y, group = (torch.as_tensor(each).detach().clone().reshape(-1).to(x.device) for each in both)
    chosen = y != _IGNORED
    x, y, group = x[chosen], y[chosen].float(), group[chosen]
    if not len(y) or not bool(((y == 0) | (y == 1)).all()):
        raise OptionError("train_probe: labels are 0 and 1; -100 leaves a row out.")
    if not bool(x.isfinite().all()):
        raise OptionError("train_probe: the activations have NaN or infinity in them; leave those rows out by -100.")
    return x, y, group


def _first_layer(inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a matrix and a bias with the first numbers of an ``nn.Linear``."""
    numbers = (torch.rand(outputs, inputs + 1, generator=generator) * 2 - 1) * inputs**-0.5
    return numbers[:, :-1].clone(), numbers[:, -1].clone()


def _fit(network: nn.Sequential, x: Tensor, y: Tensor, weight_decay: float) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        small = torch.stack([each.square().sum() for each in network.parameters() if each.dim() == 2]).sum()
        value = F.binary_cross_entropy_with_logits(network(x).squeeze(-1), y) + weight_decay * 0.5 * small
        value.backward()  # type: ignore[no-untyped-call]
        return value

    # Full batches of a small problem: a second-order method needs a tenth of the passes that Adam does.
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=_ITERATIONS, line_search_fn="strong_wolfe")
    optimizer.step(closure)  # type: ignore[no-untyped-call]


# -- the factory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeOptions(TokenOptions):
    """The config of ``probe``."""

    file: Path | None = None
    head: Any = None
    name: str = "probe"
    threshold: float | None = None
    action: Literal["metric", "flag", "stop"] = "metric"
    add_residual: bool = False

    def __post_init__(self) -> None:
        if (self.file is None) == (self.head is None):
            what = "neither" if self.file is None else "both"
            raise OptionError(f"probe takes a file that train_probe(…).save has written, or a head, got {what}.")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise OptionError(f"probe: threshold is a probability between 0 and 1, got {self.threshold!r}.")

    def read_head(self) -> ProbeHead:
        """Return the head, from the config or the file."""
        if self.file is not None:
            return ProbeHead.load(self.file)
        if isinstance(self.head, Mapping):
            with torch.inference_mode(False):
                return ProbeHead.from_plain(self.head)
        if not isinstance(self.head, ProbeHead):
            raise OptionError(f"probe: head is what train_probe(…).to_plain returns, got {str(self.head)[:80]!r}.")
        return self.head


@tried_by()
def probe(config: Mapping[str, Any] | None = None) -> Probe:
    """Make a hook that scores each token of outputs by a trained head.

    Recipe::

        hook = probe({"file": "probe.safetensors", "threshold": 0.9})
        with hookline.attach(model, "model.layers.8", hook):
            model(input_ids)
        hook.to_metrics()  # {"model.layers.8/score": …, "model.layers.8/flagged": …, …}

    Args:
        config: ``file``: what ``train_probe(…).save`` has written; or ``head``: what its ``to_plain`` returns, or the
            `ProbeHead` itself. ``name``: for answers and logs. ``threshold``: the score above which a token is
            flagged, if not that of the head. ``action``: ``"metric"`` counts flagged tokens; ``"flag"`` also says so in
            the answer of their request; ``"stop"`` also ends that answer. ``positions``: ``"all"``, or ``"last"``,
            the last token of each request in each forward. ``requests``: names of requests, or patterns; others are
            not scored. ``phase``: ``"prefill"`` or ``"decode"`` alone. ``add_residual``: of an output that is a pair
            of tensors of one shape, as layers of SGLang and vLLM give, score the sum.

    An output that the head does not fit is an error in the forward. A token with NaN or infinity in its score counts as
    one of score 1.
    """
    return Probe(read_options("probe", ProbeOptions, config))


class Probe(ActivationStats):
    """Score the outputs of all modules that one ``probe`` is on."""

    name = "probe"

    def __init__(self, options: ProbeOptions) -> None:
        self.head = options.read_head()
        self.width = self.head.width
        self.threshold = self.head.threshold if options.threshold is None else options.threshold
        super().__init__(Layout.of(("mean", "max", f"over:{self.threshold!r}")), add_residual=options.add_residual)
        self._options = options

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Score the output of a module."""
        with serving(running(inputs)):
            super().__call__(module, inputs, output, site=site)

    def _take(self, seen: StreamedModule, tensor: Tensor, gathered: Gathered | None) -> None:
        """Score ``tensor``; raise if that fails: a probe that looks at nothing must not seem to find nothing."""
        local, options, tokens = measurable(tensor), self._options, current_tokens()
        if local is None:
            return
        logits = self.head.logits(local)
        scores = logits.sigmoid().masked_fill(~logits.isfinite(), 1.0)  # what has no score is flagged
        if tokens is None and not options.needs_tokens:
            is_last = options.positions == "last" and scores.dim() > 1
            self._add(seen, scores[..., -1:] if is_last else scores)
            return
        chosen = options.choose(tokens)
        picked = None if chosen is None else chosen.pick(scores.unsqueeze(-1))
        if chosen is None or picked is None:
            self.log_unknown("requests or tokens")
        elif len(chosen):
            self._add(seen, picked.squeeze(-1))
            if options.action != "metric":
                flag = RequestFlag(options.name, seen.name, stops=options.action == "stop")
                note_scores(flag, chosen, picked, self.threshold)

    def to_metrics(self) -> dict[str, float]:
        """Return for each module: mean and highest score, tokens that were scored, and those that were flagged."""
        found: dict[str, float] = {}
        layout = self.engine.layout
        (over,) = layout.over
        for name, cells in self.read().items():
            if cells["count"]:
                stats = as_metrics(cells, layout)
                found |= {f"{name}/score": stats["mean"], f"{name}/highest": stats["max"]}
            if cells["count"] or name in self._expected:
                found |= {f"{name}/flagged": cells[over], f"{name}/tokens": cells["count"]}
        return found


_torch.leave_to_python(Probe.__call__)
