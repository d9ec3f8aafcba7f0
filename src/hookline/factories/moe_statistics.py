"""``moe_routing``: count how the routers of a mixture of experts spread tokens, while a model answers.

Specs and users make it, on ``"role:router"``. `RoutingCounts` adds up; numbers come to the host when they are read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hookline.factories.factory_hook import ByModule, Observer, checked_options, choice, tried_by, whole, yes_or_no
from hookline.factories.routing_counts import RoutingCounts, routing_metrics
from hookline.factories.served_batch import STAGES, only_in_stage
from hookline.observe.host_values import on_host
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["MoeRouting", "moe_routing"]

_NAME: Final = "moe_routing"
_OPTIONS: Final = {"top_k": None, "every": 1, "phase": "both", "per_expert": False}


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
            attribute ``top_k``. ``every``: look at each n-th call of a router. ``phase``: ``"prefill"`` or
            ``"decode"`` of a served model alone. ``per_expert``: report the share of each expert too.
    """
    options = checked_options(_NAME, config, _OPTIONS)
    top_k = options["top_k"]
    stage = choice(_NAME, "phase", options["phase"], STAGES)
    return only_in_stage(MoeRouting, stage)(
        top_k=None if top_k is None else whole(_NAME, "top_k", top_k),
        every=whole(_NAME, "every", options["every"]),
        per_expert=yes_or_no(_NAME, "per_expert", options["per_expert"]),
    )


class MoeRouting(Observer):
    """Keep the counts of all routers that one ``moe_routing`` is on, also after removal."""

    name = _NAME

    def __init__(self, *, top_k: int | None = None, every: int = 1, per_expert: bool = False) -> None:
        self._every = every
        self._per_expert = per_expert
        self._counts = ByModule(lambda name: RoutingCounts(name, top_k))
        self._lock = threading.Lock()

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Count the choices of a router."""
        if _torch.in_recomputation():  # it was counted the first time
            return
        counts = self._counts.of(module, site)
        with self._lock:
            call = counts.calls
            counts.calls = call + 1
            if call % self._every == 0:
                counts.add(module, output)

    def to_metrics(self) -> dict[str, float]:
        """Return for each router: tokens, load, entropies and dead experts; one transfer from each device."""
        with self._lock:
            seen = [(name, counts.row) for name, counts in self._counts.items() if counts.row is not None]
            rows = [row.tolist() for row in on_host(row for _, row in seen)]
        return {
            f"{name}/{metric}": value
            for (name, _), row in zip(seen, rows, strict=True)
            for metric, value in routing_metrics(row, per_expert=self._per_expert).items()
        }

    def reset(self) -> None:
        """Drop what was counted so far."""
        with self._lock:
            for counts in self._counts.values():
                counts.row = None


# Where plain torch calls it in compiled code, the graph ends there; the code behind the call is not compiled.
_torch.leave_to_python(MoeRouting.__call__)
