"""``attention``: the spectra of query, key and value matrices, and how attention is spread over positions.

Spectra are of weights alone. For the patterns, hooks on every `nn.MultiheadAttention` remember what the last training
forward handed in; at a report the pattern is worked out from that, so the model is not run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hookline.analyses._analysis import AT_REPORTS, Analysis
from hookline.analyses._parts import projections_of
from hookline.analyses._patterns import Call, pattern_of
from hookline.analyses._shared import Work, work_of
from hookline.analyses._spectrum import effective_rank
from hookline.lifecycle.points import HookPoint
from hookline.lifecycle.run_phase import During
from hookline.sites.attach import attach
from hookline.sites.wrappers import clean_modules
from hookline.training.training_hook import MetricInfo

if TYPE_CHECKING:
    from hookline.lifecycle.run_context import RunDataContext
    from hookline.sites.handle import HookHandle
    from hookline.sites.site_info import Site

__all__ = ["AttentionHook"]

_TOP: Final = 5


class AttentionHook(Analysis):
    """Rank of the projections of attention; entropy and variance of its patterns on the last training batch.

    Recipe: ``hookline.HookManager(["attention"], sinks=[...])``.

    Projections are found in `nn.MultiheadAttention`, and in modules with ``q_proj``, ``k_proj`` and ``v_proj`` or the
    like. Patterns need the former. They are those of the weights after the step, on what the layers were given before
    it, without dropout of the pattern. What was given stays in memory until the next step.
    """

    name = "attention"
    description = "rank of attention's projections, entropy and variance of its patterns"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    loop_points = AT_REPORTS

    def __init__(self) -> None:
        self._layers: dict[nn.Module, int] = {}
        self._calls: dict[int, Call] = {}
        self._handle: HookHandle | None = None

    def describe_metrics(self) -> list[MetricInfo]:
        """What its metrics mean; σ are singular values, means are over all query, key and value matrices."""
        peaked = "0: all on one position; 1: spread evenly"
        return [
            MetricInfo("sv_concentration", "weight of the strongest direction", "mean σ₁ / Σσ", "1: rank one"),
            MetricInfo("effective_rank", "directions used about equally", "mean (Σσ)² / Σσ²"),
            MetricInfo("top5_explained_var", "share of the strongest five", "mean Σ₁..₅σ² / Σσ²"),
            MetricInfo("attn_entropy", "spread of attention over positions", "mean H(a) / ln T", peaked),
            MetricInfo("attn_entropy/{layer}", "the same of one layer", "mean H(a) / ln T", peaked),
            MetricInfo(
                "attn_variance",
                "how much the pattern depends on the input",
                "mean of var(a) over the batch",
                "0: the same for every input",
            ),
            MetricInfo("attn_variance/{layer}", "the same of one layer", "mean of var(a) over the batch"),
        ]

    def start(self, model: nn.Module) -> None:
        """Have an eye on every attention."""
        self.finish()
        found = [module for _, module in clean_modules(model) if isinstance(module, nn.MultiheadAttention)]
        self._layers = {module: number for number, module in enumerate(found)}
        if found:
            remember = self._remember_by(During(frozenset({"train"}), self._calls.clear))
            self._handle = attach(
                model, found, remember, on="forward_pre", with_kwargs=True, observe=True, name=self.name
            )

    def _remember_by(self, during: During) -> Callable[..., None]:
        """Return a hook that keeps what an attention is given last in a forward that counts as training."""

        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, site: Site) -> None:
            takes = during.count_forward(site.training, site.gradients, site.step)
            if takes and module in self._layers:
                self._calls[self._layers[module]] = Call.of(module, args, kwargs)

        return remember

    def finish(self) -> None:
        """Take the hooks off."""
        if self._handle is not None:
            self._handle.remove(quiet=True)
        self._handle = None
        self._calls.clear()

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """The spectra, and patterns if a batch was seen."""
        if self.off or ctx.model is None:
            return None
        if self._handle is None and not self._layers:  # in a loop that does not start hooks: from now on
            self.start(ctx.model)
        metrics = {**_spectra(work_of(ctx)), **self._patterns()}
        if not metrics and not self._layers:
            self.turn_off(
                "looked for nn.MultiheadAttention, or modules with q_proj, k_proj and v_proj (or query, key and "
                "value; or qkv) in them, and found none"
            )
        return metrics

    @torch.no_grad()
    def _patterns(self) -> dict[str, Any]:
        entropies, variances = {}, {}
        for layer, call in sorted(self._calls.items()):
            pattern = pattern_of(call)  # (B, H, T, S)
            if pattern is None:
                continue
            spread = torch.special.entr(pattern).sum(dim=-1).mean()
            entropies[f"attn_entropy/{layer}"] = (
                spread / math.log(pattern.shape[-1]) if pattern.shape[-1] > 1 else spread
            )
            if pattern.shape[0] > 1:
                variances[f"attn_variance/{layer}"] = pattern.var(dim=0).mean()
        self._calls.clear()
        means = {"attn_entropy": _mean(entropies.values()), "attn_variance": _mean(variances.values())}
        return {**{name: mean for name, mean in means.items() if mean is not None}, **entropies, **variances}


def _mean(values: Any) -> Tensor | None:
    found = [value.cpu() for value in values]
    return torch.stack(found).mean() if found else None


def _spectra(work: Work) -> dict[str, float]:
    found = work.singular_values(dict(projections_of(work.modules)))
    spectra = [values for values in found.values() if values.any()]  # a matrix of zeros has no direction
    if not spectra:
        return {}
    squares = [np.square(values) for values in spectra]
    return {
        "sv_concentration": float(np.mean([values[0] / values.sum() for values in spectra])),
        "effective_rank": float(np.mean([effective_rank(values) for values in spectra])),
        "top5_explained_var": float(np.mean([square[:_TOP].sum() / square.sum() for square in squares])),
    }
