"""``moe_routing``: count how the routers of a mixture of experts spread tokens: load, entropy, dead experts.

Specs and users make it, on ``"role:router"``. Numbers are added up on the device of the tensors; nothing waits for it
before they are read.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline.errors import HooklineWarning
from hookline.factories.factory_hook import ByModule, Observer, read_options, tried_by
from hookline.factories.served_batch import Stage, measurable, only_in_stage, without_padding
from hookline.messages import caller_stacklevel
from hookline.observe.host_values import fetch
from hookline.sites import _torch
from hookline.tree import tensors_of

if TYPE_CHECKING:
    from hookline.sites.site_info import Site

__all__ = ["MoeOptions", "MoeRouting", "moe_routing"]

_WHOLE: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


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


@dataclass(slots=True)
class _Router:
    """What one router has chosen so far."""

    name: str
    row: Tensor | None = None
    """The number of choices of each expert; how many tokens had no finite logits; the sum of the entropies of all other
    tokens (NaN if the router gives no logits); the number of these. None before the first output."""
    has_warned: bool = False

    def warn(self, text: str) -> None:
        """Warn once."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(f"The router {self.name!r} {text}", HooklineWarning, stacklevel=caller_stacklevel())


class MoeRouting(Observer):
    """Keep the counts of all routers that one ``moe_routing`` is on, also after removal."""

    name = "moe_routing"

    def __init__(self, options: MoeOptions) -> None:
        self._options = options
        self._routers = ByModule(_Router)
        self._lock = threading.Lock()

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Count the choices of a router."""
        if _torch.in_recomputation():  # it was counted the first time
            return
        with self._lock, torch.no_grad():
            self._count(self._routers.of(module, site), module, output)

    def _count(self, seen: _Router, router: nn.Module, output: Any) -> None:
        logits, chosen, experts = _routed(router, output)
        if not experts:
            seen.warn(
                f"({type(router).__name__}) returns no logits, and no chosen experts of a known number; nothing is "
                "counted. Choose the module that returns logits, or give the router an attribute num_experts."
            )
            return
        scores, picked = (None if each is None else _real(each) for each in (logits, chosen))
        if (scores is None) != (logits is None) or (picked is None) != (chosen is None):
            return  # no numbers can be read at the moment
        if scores is not None:
            scores = scores.reshape(-1, experts).float()
            if picked is None:
                picked = scores.topk(min(self._top_k(seen, router), experts), dim=-1).indices
        if picked is not None and picked.numel():
            self._add(seen, scores, picked.reshape(-1, picked.shape[-1]), experts)

    def _top_k(self, seen: _Router, router: nn.Module) -> int:
        found = self._options.top_k or _told(router, _TOP_K)
        if found is None:
            seen.warn("does not say how many experts a token goes to; the likeliest is counted. Give top_k=.")
        return found or 1

    def _add(self, seen: _Router, scores: Tensor | None, chosen: Tensor, experts: int) -> None:
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
        parts = (hits * is_known.unsqueeze(-1)).sum(0), len(chosen) - tokens, spread, tokens
        row = torch.cat([part.to(wide) for part in parts])
        if seen.row is None or seen.row.shape != row.shape:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside of it
                seen.row = torch.zeros(row.shape, dtype=wide, device=row.device)
        seen.row.add_(row.to(seen.row.device))

    def to_metrics(self) -> dict[str, float]:
        """Return for each router: tokens, load, entropies and dead experts; one transfer from each device."""
        with self._lock:
            rows = {name: seen.row for name, seen in self._routers.items() if seen.row is not None}
            numbers = dict(zip(rows, fetch(rows.values()), strict=True))
        return {
            f"{name}/{metric}": value
            for name, row in numbers.items()
            for metric, value in _metrics_of(row, per_expert=self._options.per_expert).items()
        }

    def reset(self) -> None:
        """Drop what was counted so far."""
        with self._lock:
            self._routers = ByModule(_Router)


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(MoeRouting.__call__)


_TOP_K: Final = ("top_k", "num_experts_per_tok", "num_selected_experts", "moe_top_k")
"""Attributes by which routers say how many experts each token goes to."""
_EXPERTS: Final = ("num_experts", "n_routed_experts")
"""Attributes by which routers say how many experts there are."""


def _real(tensor: Tensor) -> Tensor | None:
    local = measurable(tensor)
    return None if local is None else without_padding(local)


def _routed(router: nn.Module, output: Any) -> tuple[Tensor | None, Tensor | None, int]:
    """Return the logits and the chosen experts in an output, and how many experts there are; 0 if nobody says.

    A router may choose others than the likeliest. Beside chosen experts, floats of their shape are the weights of
    these, and no logits.
    """
    given = [tensor for tensor in tensors_of(output) if tensor.dim() >= 2]
    floats = [each for each in given if each.is_floating_point() and each.shape[-1] > 1]
    ids = [each for each in given if each.dtype in _WHOLE]
    told = _told(router, _EXPERTS)
    weight = getattr(router, "weight", None)
    if told is None and isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) > 1:
        told = len(weight)
    for chosen in ids:
        beside = [each for each in floats if each.shape[:-1] == chosen.shape[:-1] and each.shape != chosen.shape]
        logits = next((each for each in beside if told in (None, each.shape[-1])), None)
        experts = told if logits is None else logits.shape[-1]
        if experts is not None:
            return logits, chosen, experts
    logits = next((each for each in floats if all(each.shape != chosen.shape for chosen in ids)), None)
    return logits, None, 0 if logits is None else logits.shape[-1]


def _told(router: nn.Module, names: tuple[str, ...]) -> int | None:
    found = (getattr(router, each, None) for each in names)
    return next((each for each in found if type(each) is int and each > 0), None)


def _metrics_of(row: list[float], *, per_expert: bool) -> dict[str, float]:
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
