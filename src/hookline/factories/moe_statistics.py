"""``moe_routing``: count how the routers of a mixture of experts spread tokens: load, entropy, dead experts.

Specs and users make it, on ``"role:router"``; the analysis of that name keeps one `RoutingCounts` for each router too.
Numbers are added up on the device of the tensors; nothing waits for it before they are read.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import Stage, measurable, only_in_stage, without_padding
from hookline.messages import caller_stacklevel
from hookline.observe.host_values import on_host
from hookline.sites import _torch
from hookline.tree import tensors_of

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["MoeOptions", "MoeRouting", "RoutingCounts", "moe_routing", "routing_metrics"]


@dataclass(frozen=True)
class MoeOptions:
    """The config of ``moe_routing``."""

    top_k: int | None = None
    phase: Stage = "both"
    per_expert: bool = False


@tried_by()
def moe_routing(config: Mapping[str, Any] | None = None) -> MoeRouting:
    """Make a hook that counts how routers spread tokens over experts.

    Recipe::

        hook = moe_routing({"per_expert": True})
        with hookline.attach(model, "role:router", hook):
            model(input_ids)
        hook.to_metrics()  # {"model.layers.0.mlp.gate/load_max": 1.4, "…/dead_experts": 0.0, …}

    Args:
        config: ``top_k``: how many experts each token goes to, for a router that neither returns its choice nor has an
            attribute ``top_k``. ``phase``: ``"prefill"`` or ``"decode"`` of a served model alone. ``per_expert``:
            report the share of each expert too.
    """
    options = read_options("moe_routing", MoeOptions, config)
    return only_in_stage(MoeRouting, options.phase)(options)


class MoeRouting(Observer):
    """Keep the counts of all routers that one ``moe_routing`` is on, also after removal."""

    name = "moe_routing"

    def __init__(self, options: MoeOptions) -> None:
        self._options = options
        self._counts = ByModule(lambda name: RoutingCounts(name, options.top_k))
        self._lock = threading.Lock()

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Count the choices of a router."""
        if _torch.in_recomputation():  # it was counted the first time
            return
        counts = self._counts.of(module, site)
        with self._lock:
            counts.add(module, output)

    def to_metrics(self) -> dict[str, float]:
        """Return for each router: tokens, load, entropies and dead experts; one transfer from each device."""
        with self._lock:
            seen = [(name, counts.row) for name, counts in self._counts.items() if counts.row is not None]
            rows = [row.tolist() for row in on_host(row for _, row in seen)]
        return {
            f"{name}/{metric}": value
            for (name, _), row in zip(seen, rows, strict=True)
            for metric, value in routing_metrics(row, per_expert=self._options.per_expert).items()
        }

    def reset(self) -> None:
        """Drop what was counted so far."""
        with self._lock:
            for counts in self._counts.values():
                counts.row = None


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(MoeRouting.__call__)


# -- the counts of one router --------------------------------------------------------------------------------------

_TOP_K: Final = ("top_k", "num_experts_per_tok", "num_selected_experts", "moe_top_k")
"""Attributes by which routers say how many experts each token goes to."""
_EXPERTS: Final = ("num_experts", "n_routed_experts")
"""Attributes by which routers say how many experts there are."""


class RoutingCounts:
    """Add up what one router has chosen.

    Recipe::

        counts = RoutingCounts("layers.0.gate", top_k=2)
        counts.add(gate, gate(hidden))
        routing_metrics(counts.row.tolist(), per_expert=False)

    ``row`` has the number of choices of each expert, then how many tokens had no finite logits, then the sum of the
    entropies of all other tokens (NaN if the router gives no logits), then the number of these.
    """

    def __init__(self, name: str, top_k: int | None = None) -> None:
        self.name = name
        self.row: Tensor | None = None
        """None before the first output."""
        self._top_k = top_k
        self._has_warned = False

    def add(self, router: nn.Module, output: Any) -> None:
        """Add the output of a router: logits, chosen experts, or both."""
        routed = _routed(router, output)
        if routed is None:
            self._warn_unread(router)
            return
        logits, chosen = measurable(routed.logits), measurable(routed.chosen)
        if (logits is None) != (routed.logits is None):  # no numbers can be read at the moment
            return
        with torch.no_grad():
            scores = None if logits is None else without_padding(logits)
            picked = None if chosen is None else without_padding(chosen)
            if scores is not None:
                scores = scores.reshape(-1, routed.experts).float()
                if picked is None and len(scores):
                    picked = scores.topk(self._count_of(router, routed.experts), dim=-1).indices
            if picked is not None and picked.numel():
                self._add(scores, picked.reshape(-1, picked.shape[-1]), routed.experts)

    def _add(self, scores: Tensor | None, chosen: Tensor, experts: int) -> None:
        wide = torch.float32 if chosen.device.type == "mps" else torch.float64  # which has no float64
        # By comparison: counting by scattering is not deterministic on a GPU, or waits to learn the largest index.
        hits = (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).sum(1)
        if scores is None:
            is_known = torch.ones(len(chosen), dtype=torch.bool, device=chosen.device)
            spread = torch.full((1,), math.nan, dtype=wide, device=chosen.device)
        else:  # -inf is an expert that is left out; NaN, inf and -inf alone are no choice
            likely = scores.softmax(-1)
            is_known = ~likely.isnan().any(-1)
            spread = torch.special.entr(likely).sum(-1).where(is_known, 0).sum(dtype=wide).reshape(1)
        tokens = is_known.sum().reshape(1)
        row = torch.cat(
            [(hits * is_known.unsqueeze(-1)).sum(0).to(wide), (len(chosen) - tokens).to(wide), spread, tokens.to(wide)]
        )
        if self.row is None or self.row.shape != row.shape:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside of it
                self.row = torch.zeros(row.shape, dtype=wide, device=row.device)
        self.row.add_(row.to(self.row.device))

    def _count_of(self, router: nn.Module, experts: int) -> int:
        if self._top_k is None:
            self._top_k = _told(router, _TOP_K)
        if self._top_k is None:
            self._top_k = 1
            self._warn("does not say how many experts a token goes to; the likeliest one is counted. Give top_k=.")
        return min(self._top_k, experts)

    def _warn_unread(self, router: nn.Module) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"({type(router).__name__}) returns no logits, and no chosen experts of a known number; nothing is "
                "counted. Choose the module that returns logits, or give the router an attribute num_experts."
            )

    def _warn(self, text: str) -> None:
        warnings.warn(f"The router {self.name!r} {text}", HooklineWarning, stacklevel=caller_stacklevel())


class _Routed(NamedTuple):
    """What the output of a router has in it."""

    logits: Tensor | None
    chosen: Tensor | None
    """The experts that the router itself has chosen for each token; it may choose others than the likeliest."""
    experts: int


def _routed(router: nn.Module, output: Any) -> _Routed | None:
    """Return the logits and the chosen experts in an output; None if neither says which experts tokens go to.

    Beside chosen experts, floats of their shape are the weights of these, and no logits.
    """
    given = [tensor for tensor in tensors_of(output) if tensor.dim() >= 2]
    floats = [each for each in given if each.is_floating_point() and each.shape[-1] > 1]
    whole = [each for each in given if not each.is_floating_point() and not each.is_complex()]
    ids = [each for each in whole if each.dtype is not torch.bool]
    told = _experts_of(router)
    for chosen in ids:
        beside = [each for each in floats if each.shape[:-1] == chosen.shape[:-1] and each.shape != chosen.shape]
        logits = next((each for each in beside if told in (None, each.shape[-1])), None)
        experts = told if logits is None else logits.shape[-1]
        if experts is not None:
            return _Routed(logits, chosen, experts)
    alone = [each for each in floats if all(each.shape != chosen.shape for chosen in ids)]
    return _Routed(alone[0], None, alone[0].shape[-1]) if alone else None


def _experts_of(router: nn.Module) -> int | None:
    """Return how many experts a router says there are: by an attribute, or by the rows of its weight."""
    told = _told(router, _EXPERTS)
    weight = getattr(router, "weight", None)
    has_rows = told is None and isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) > 1
    return len(weight) if has_rows and isinstance(weight, Tensor) else told


def _told(router: nn.Module, names: tuple[str, ...]) -> int | None:
    found = (getattr(router, each, None) for each in names)
    return next((each for each in found if type(each) is int and each > 0), None)


def routing_metrics(row: list[float], *, per_expert: bool) -> dict[str, float]:
    """Return the metrics of the ``row`` of a router; nothing if it has counted nothing.

    ``nonfinite`` is there if tokens had NaN for logits, ``router_entropy`` if the router gives logits.
    """
    *hits, lost, spread, tokens = row
    total = sum(hits)
    unread = {"nonfinite": lost} if lost else {}
    if not tokens or not total or len(hits) < 2:
        return unread
    shares = [each / total for each in hits]
    most = math.log(len(shares))
    found = {
        "tokens": tokens,
        "load_max": max(shares) * len(shares),
        "load_entropy": -sum(share * math.log(share) for share in shares if share) / most,
        **({} if math.isnan(spread) else {"router_entropy": spread / tokens / most}),
        "dead_experts": float(sum(not each for each in hits)),
        **unread,
    }
    return found | ({f"load/{expert}": share for expert, share in enumerate(shares)} if per_expert else {})
