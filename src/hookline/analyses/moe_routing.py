"""``moe_routing``: measure how the routers of a mixture of experts spread tokens while the model trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn

from hookline.analyses._base import CountingAnalysis, mean_of
from hookline.factories.moe_statistics import RoutingCounts, routing_metrics
from hookline.observe.host_values import on_host
from hookline.phases import During
from hookline.sites.attach import attach
from hookline.sites.roles import find_roles
from hookline.sites.site_info import Site
from hookline.sites.targets import select


class MoeRoutingHook(CountingAnalysis):
    """Measure the load of experts, the entropy of routers and dead experts, since the last report.

    Recipe: ``hookline.HookManager(["moe_routing"], sinks=[...])``.

    Args:
        top_k: How many experts each token goes to, for a router that neither returns its choice nor has an attribute
            ``top_k``.
        targets: Which routers, by name or glob, with commas; if left out, every module in the role ``router``.
        exclude: Routers to leave out.
        per_expert: Report the share of every expert too.
    """

    name = "moe_routing"
    description = "load of experts, entropy of routers, dead experts"
    metrics = (
        ("load_max", "the busiest expert of all layers, as a multiple of an even share", "max E·load", "1: even"),
        ("load_entropy", "how evenly tokens are spread over experts, mean of layers", "H(load) / ln E", "1: even"),
        ("router_entropy", "how undecided routers are, mean of layers", "mean H(p) / ln E", "0: sure; 1: no opinion"),
        ("dead_experts", "experts that got no token, of all layers", "count of load 0", "0 is healthy"),
        ("{layer}/tokens", "tokens that the router has seen"),
        ("{layer}/load_max", "the busiest expert of one layer", "max E·load", "E: all tokens go to one"),
        ("{layer}/load_entropy", "how evenly tokens are spread in one layer", "H(load) / ln E", "1: even"),
        ("{layer}/router_entropy", "how undecided one router is", "mean H(p) / ln E"),
        ("{layer}/dead_experts", "experts of one layer that got no token", "count of load 0"),
        ("{layer}/nonfinite", "tokens whose logits had NaN or infinity, which are not counted; left out if 0"),
        ("{layer}/load/{expert}", "the share of choices that one expert got", "choices / all", "1/E is even"),
    )
    reduce = MappingProxyType(
        {
            "dead_experts": "min",
            "*/dead_experts": "min",
            "load_max": "max",
            "*/load_max": "max",
            "*/tokens": "sum",
            "*/nonfinite": "sum",
        }
    )

    def __init__(
        self,
        top_k: int | None = None,
        targets: str | None = None,
        exclude: str | None = None,
        per_expert: bool = True,
    ) -> None:
        self.top_k = None if top_k is None else self.whole_number("top_k", top_k, 1)
        self.targets, self.exclude, self.per_expert = targets, exclude, per_expert
        self._counts: dict[str, RoutingCounts] = {}
        super().__init__()

    def start(self, model: nn.Module) -> None:
        """Attach a hook to every router."""
        self.finish()
        names = find_roles(model).get("router", []) if self.targets is None else self.targets.split(",")
        if not names:
            self.turn_off("looked for routers of experts (name others by targets='layers.*.gate') and found none")
            return
        routers = [module for _, module in select(model, names, exclude=self.exclude)]
        during = During(frozenset({"train"}), self._count_from_zero)

        def count(module: nn.Module, args: Any, output: Any, *, site: Site) -> None:
            if not site.recompute and during.count_forward(site.training, site.gradients, site.step):
                self._of(site.name).add(module, output)

        self._handles.add(attach(model, routers, count, observe=True, name=self.name))
        self._is_on = True

    def _of(self, name: str) -> RoutingCounts:
        return self._counts.setdefault(name, RoutingCounts(name, self.top_k))

    def _count_from_zero(self) -> None:
        for counts in self._counts.values():  # which know what they have warned of
            counts.row = None

    def report(self) -> Mapping[str, Any] | None:
        """Return what was counted, and count from zero."""
        seen = [(name, counts.row) for name, counts in self._counts.items() if counts.row is not None]
        rows = [row.tolist() for row in on_host(row for _, row in seen)]
        self._count_from_zero()
        layers = {
            name: found
            for (name, _), row in zip(seen, rows, strict=True)
            if (found := routing_metrics(row, per_expert=self.per_expert))
        }
        if not layers:
            return None
        by_layer = {f"{name}/{metric}": value for name, found in layers.items() for metric, value in found.items()}
        return {**_summary(list(layers.values())), **by_layer}

    def reset(self) -> None:
        """Begin another run."""
        super().reset()
        self._counts.clear()

    def get_state_tensors(self) -> dict[str, Any]:
        """Return what was counted since the last report."""
        found = {name: counts.row for name, counts in self._counts.items() if counts.row is not None}
        return {"counts": found} if found else {}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        """Take back what ``get_state_tensors`` gave."""
        self._counts.clear()
        kept: Mapping[str, Tensor] = tensors.get("counts", {})
        for name, row in kept.items():
            self._of(name).row = row.clone()


def _summary(layers: list[dict[str, float]]) -> dict[str, float]:
    """Return the figures of all layers; one that no layer has is left out."""
    read = {key: [found[key] for found in layers if key in found] for key in _READ}
    return {key: _READ[key](values) for key, values in read.items() if values}


_READ: Final[Mapping[str, Callable[[list[float]], float]]] = MappingProxyType(
    {"load_max": max, "load_entropy": mean_of, "router_entropy": mean_of, "dead_experts": sum}
)
