"""``probe``: score every token of outputs by a trained head, while a model answers.

Specs and users make it, with a head that ``train_probe`` has made. Scores are added up by the engine of ``watch``; what
is over the threshold goes to the answer of its request by `request_notes`, where an engine reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.activation_statistics import ActivationStats
from hookline.factories.factory_hook import read_options, tried_by
from hookline.factories.probe_heads import ProbeHead
from hookline.factories.request_notes import RequestFlag, current_notes
from hookline.factories.served_batch import Positions, Stage, log_unknown, measurable, only_in_stage, running
from hookline.observe.tokens import Tokens
from hookline.observe.watch.row import Layout, as_metrics
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.factories.streaming_stats import Gathered, StreamedModule
    from hookline.sites.site_info import Site

__all__ = ["Probe", "ProbeOptions", "probe"]


@dataclass(frozen=True)
class ProbeOptions:
    """The config of ``probe``."""

    file: Path | None = None
    head: Any = None
    name: str = "probe"
    threshold: float | None = None
    action: Literal["metric", "flag", "stop"] = "metric"
    positions: Positions = "all"
    requests: tuple[str, ...] | None = None
    phase: Stage = "both"
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
    options = read_options("probe", ProbeOptions, config)
    return only_in_stage(Probe, options.phase)(options)


class Probe(ActivationStats):
    """Score the outputs of all modules that one ``probe`` is on."""

    name = "probe"

    def __init__(self, options: ProbeOptions) -> None:
        self.head = options.read_head()
        self.width = self.head.width
        self.label = options.name
        self.threshold = self.head.threshold if options.threshold is None else options.threshold
        super().__init__(Layout.of(("mean", "max", f"over:{self.threshold!r}")), add_residual=options.add_residual)
        self._action = options.action
        self._requests = options.requests
        self._only_last = options.positions == "last"
        self._running = threading.local()
        self._has_logged = False

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Score the output of a module."""
        self._running.tokens = running(inputs)
        super().__call__(module, inputs, output, site=site)

    def _take(self, seen: StreamedModule, tensor: Tensor, gathered: Gathered | None) -> None:
        """Score ``tensor``; raise if that fails: a probe that looks at nothing must not seem to find nothing."""
        local = measurable(tensor)
        if local is not None:
            self._score(seen, local)

    def _score(self, seen: StreamedModule, tensor: Tensor) -> None:
        tokens: Tokens | None = self._running.tokens
        logits = self.head.logits(tensor)
        scores = logits.sigmoid().masked_fill(~logits.isfinite(), 1.0)  # what has no score is flagged
        if tokens is None:
            self._add_unserved(seen, scores)
            return
        chosen = tokens.choose(self._requests, last=self._only_last)
        picked = None if self._requests is not None and not tokens.has_names else chosen.pick(scores.unsqueeze(-1))
        if picked is None:
            self._log_unknown(seen, "requests or tokens")
        elif len(chosen):
            self._streaming.take(seen, picked.squeeze(-1))
            notes = current_notes() if self._action != "metric" else None
            if notes is not None:
                flag = RequestFlag(self.label, seen.name, stops=self._action == "stop", hook=id(self))
                notes.add(flag, chosen, picked, self.threshold)

    def _add_unserved(self, seen: StreamedModule, scores: Tensor) -> None:
        """Add scores of a forward without requests."""
        if self._requests is not None:
            self._log_unknown(seen, "requests")
        else:
            self._streaming.take(seen, scores[..., -1:] if self._only_last and scores.dim() > 1 else scores)

    def _log_unknown(self, seen: StreamedModule, what: str) -> None:
        seen.watched.unread = "nobody says whose tokens are in it"
        if not self._has_logged:
            self._has_logged = True
            log_unknown(self.name, what)

    def to_metrics(self) -> dict[str, float]:
        """Return for each module: mean and highest score, tokens that were scored, and those that were flagged."""
        found: dict[str, float] = {}
        (over,) = self._streaming.layout.over
        for name, cells in self.read().items():
            if cells["count"]:
                stats = as_metrics(cells, self._streaming.layout)
                found[f"{name}/score"] = stats["mean"]
                found[f"{name}/highest"] = stats["max"]
            if cells["count"] or name in self._expected:
                found[f"{name}/flagged"] = cells[over]
                found[f"{name}/tokens"] = cells["count"]
        return found


_torch.leave_to_python(Probe.__call__)
