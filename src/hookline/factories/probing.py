"""``probe``: score every token of outputs by a trained head, while a model answers.

Specs and users make it, with a head that ``train_probe`` has made. Scores are added up by the engine of ``watch``; what
is over the threshold goes to the answer of its request by `request_notes`, where an engine reads these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.factory_hook import read_options, tried_by
from hookline.factories.probe_heads import ProbeHead
from hookline.factories.request_notes import RequestFlag, note_scores
from hookline.factories.served_batch import TokenOptions, measurable, only_in_stage, running
from hookline.factories.streaming_stats import ActivationStats
from hookline.observe.tokens import current_tokens, serving
from hookline.observe.watch.row import Layout, as_metrics
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.factories.streaming_stats import Gathered, StreamedModule
    from hookline.sites.site_info import Site

__all__ = ["Probe", "ProbeOptions", "probe"]


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
    options = read_options("probe", ProbeOptions, config)
    return only_in_stage(Probe, options.phase)(options)


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
            self._streaming.take(seen, scores[..., -1:] if is_last else scores)
            return
        chosen = options.choose(tokens)
        picked = None if chosen is None else chosen.pick(scores.unsqueeze(-1))
        if chosen is None or picked is None:
            self.log_unknown("requests or tokens")
        elif len(chosen):
            self._streaming.take(seen, picked.squeeze(-1))
            if options.action != "metric":
                flag = RequestFlag(options.name, seen.name, stops=options.action == "stop", hook=id(self))
                note_scores(flag, chosen, picked, self.threshold)

    def to_metrics(self) -> dict[str, float]:
        """Return for each module: mean and highest score, tokens that were scored, and those that were flagged."""
        found: dict[str, float] = {}
        layout = self._streaming.engine.layout
        (over,) = layout.over
        for name, cells in self.read().items():
            if cells["count"]:
                stats = as_metrics(cells, layout)
                found |= {f"{name}/score": stats["mean"], f"{name}/highest": stats["max"]}
            if cells["count"] or name in self._expected:
                found |= {f"{name}/flagged": cells[over], f"{name}/tokens": cells["count"]}
        return found


_torch.leave_to_python(Probe.__call__)
