"""Count how a router spreads tokens over experts: load, entropy, dead experts.

The factory ``moe_routing`` and the analysis of that name keep one `RoutingCounts` for each router. Numbers are added up
on the device of the tensors; nothing waits for it before they are read.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.factories.served_batch import measurable, without_padding
from hookline.messages import caller_stacklevel
from hookline.sites.tree import leaves

__all__ = ["RoutingCounts", "routing_metrics"]

_TOP_K: Final = ("top_k", "num_experts_per_tok", "num_selected_experts", "moe_top_k")
"""Attributes by which routers say how many experts each token goes to."""


class RoutingCounts:
    """Add up what one router has chosen.

    Recipe::

        counts = RoutingCounts("layers.0.gate", top_k=2)
        counts.add(gate, gate(hidden))
        routing_metrics(counts.row.tolist(), per_expert=False)

    ``row`` has the number of choices of each expert, then the sum of the entropies of all tokens, then their number.
    """

    def __init__(self, name: str, top_k: int | None = None) -> None:
        self.name = name
        self.calls = 0
        self.row: Tensor | None = None
        """None before the first output."""
        self._top_k = top_k

    def add(self, router: nn.Module, output: Any) -> None:
        """Add the output of a router: logits, or a tuple with logits and the chosen experts."""
        found = _tensors(output)
        if found is None:
            return
        logits, chosen = found
        with torch.no_grad():
            scores = without_padding(logits)
            if scores is None or not scores.numel():
                return
            scores = scores.reshape(-1, logits.shape[-1]).float()
            picked = None if chosen is None else without_padding(chosen)
            if picked is None:
                picked = scores.topk(self._count_of(router, scores.shape[-1]), dim=-1).indices
            self._add(scores, picked.reshape(len(scores), -1))

    def _add(self, scores: Tensor, chosen: Tensor) -> None:
        experts = scores.shape[-1]
        wide = torch.float32 if scores.device.type == "mps" else torch.float64  # which has no float64
        # By comparison: counting by scattering is not deterministic on a GPU, or waits to learn the largest index.
        hits = (chosen.unsqueeze(-1) == torch.arange(experts, device=scores.device)).sum((0, 1)).to(wide)
        spread = torch.special.entr(scores.softmax(-1)).sum(dtype=wide).reshape(1)
        tokens = torch.full((1,), len(scores), dtype=wide, device=scores.device)
        row = torch.cat([hits, spread, tokens])
        if self.row is None or self.row.shape != row.shape:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside of it
                self.row = torch.zeros(row.shape, dtype=wide, device=row.device)
        self.row.add_(row.to(self.row.device))

    def _count_of(self, router: nn.Module, experts: int) -> int:
        if self._top_k is None:
            told = [getattr(router, key, None) for key in _TOP_K]
            self._top_k = next((each for each in told if isinstance(each, int)), None)
        if self._top_k is None:
            self._top_k = 1
            warnings.warn(
                f"The router {self.name!r} does not say how many experts a token goes to; the likeliest one is "
                "counted. Give top_k=.",
                HooklineWarning,
                stacklevel=caller_stacklevel(),
            )
        return min(self._top_k, experts)


def _tensors(output: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return the logits in an output, and the experts that the router itself has chosen, if it says so."""
    given = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.dim() >= 2]
    logits = next((each for each in given if each.is_floating_point() and each.shape[-1] > 1), None)
    local = measurable(logits)
    if logits is None or local is None:
        return None
    whole = [each for each in given if not each.is_floating_point() and not each.is_complex()]
    chosen = next(
        (each for each in whole if each.dtype is not torch.bool and each.shape[:-1] == logits.shape[:-1]), None
    )
    return local, measurable(chosen)


def routing_metrics(row: list[float], *, per_expert: bool) -> dict[str, float]:
    """Return the metrics of the ``row`` of a router; nothing if it has counted nothing."""
    *hits, spread, tokens = row
    total = sum(hits)
    if not tokens or not total:
        return {}
    shares = [each / total for each in hits]
    most = math.log(len(shares))
    found = {
        "tokens": tokens,
        "load_max": max(shares) * len(shares),
        "load_entropy": -sum(share * math.log(share) for share in shares if share) / most,
        "router_entropy": spread / tokens / most,
        "dead_experts": float(sum(not each for each in hits)),
    }
    return found | ({f"load/{expert}": share for expert, share in enumerate(shares)} if per_expert else {})
