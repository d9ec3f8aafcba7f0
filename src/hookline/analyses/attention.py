"""``attention``: measure the spectra of query, key and value matrices, and how attention is spread over positions.

Spectra are of weights alone. For the patterns, hooks on every `nn.MultiheadAttention` keep the inputs of the last
training forward; a report computes the pattern from them, so the model is not run again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.analyses._base import Analysis
from hookline.analyses._values import FiringValues, effective_rank, values_of
from hookline.analyses.embedding import Modules, matrix_of
from hookline.lifecycle.context import RunDataContext
from hookline.phases import During
from hookline.sites.attach import attach
from hookline.sites.handle import HookHandle
from hookline.sites.site_info import Site
from hookline.sites.wrappers import clean_modules

_PEAKED: Final = "0: all on one position; 1: spread evenly"
_VARIANCE: Final = "mean of var(a) over the batch"
_TOP: Final = 5
_MOST: Final = 1 << 24
"""Probabilities that are computed at most, 64 MiB of them; of a larger batch, the first samples."""
_SEPARATE: Final = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("q", "k", "v"))
"""Names of the three projections of an attention, where they are modules of their own."""
_TOGETHER: Final = ("in_proj", "qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv")
"""Names of a module that makes all three."""


class AttentionHook(Analysis):
    """Measure the rank of attention's projections, and entropy and variance of its patterns on the last training batch.

    Recipe: ``hookline.HookManager(["attention"], sinks=[...])``.

    Projections are found in `nn.MultiheadAttention`, and in modules with ``q_proj``, ``k_proj`` and ``v_proj`` or the
    like. Patterns need the former. They are those of the weights after the step, on the inputs of the layers before
    it, without dropout of the pattern. These inputs stay in memory until the next step.
    """

    name = "attention"
    description = "rank of attention's projections, entropy and variance of its patterns"

    # With σ the singular values; means are over all query, key and value matrices.
    metrics = (
        ("sv_concentration", "weight of the strongest direction", "mean σ₁ / Σσ", "1: rank one"),
        ("effective_rank", "directions used about equally", "mean (Σσ)² / Σσ²"),
        ("top5_explained_var", "share of the strongest five", "mean Σ₁..₅σ² / Σσ²"),
        ("attn_entropy", "spread of attention over positions", "mean H(a) / ln T", _PEAKED),
        ("attn_entropy/{layer}", "the same of one layer", "mean H(a) / ln T", _PEAKED),
        ("attn_variance", "how much the pattern depends on the input", _VARIANCE, "0: the same for every input"),
        ("attn_variance/{layer}", "the same of one layer", _VARIANCE),
    )

    def __init__(self) -> None:
        self._layers: dict[nn.Module, int] = {}
        self._calls: dict[int, _Call] = {}
        self._handle: HookHandle | None = None

    def start(self, model: nn.Module) -> None:
        """Attach a hook to every attention."""
        self.finish()
        found = [module for _, module in clean_modules(model) if isinstance(module, nn.MultiheadAttention)]
        self._layers = {module: number for number, module in enumerate(found)}
        if found:
            self._during = During(frozenset({"train"}), self._calls.clear)
            self._handle = attach(
                model, found, self._remember, on="forward_pre", with_kwargs=True, observe=True, name=self.name
            )

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, site: Site) -> None:
        """Keep the inputs of an attention in a forward that counts as training."""
        if self._during.count_forward(site.training, site.gradients, site.step) and module in self._layers:
            self._calls[self._layers[module]] = _Call.of(module, args, kwargs)

    def finish(self) -> None:
        """Remove the hooks."""
        if self._handle is not None:
            self._handle.remove(quiet=True)
        self._handle = None
        self._calls.clear()

    def compute(self, ctx: RunDataContext) -> Mapping[str, Any] | None:
        """Return the spectra, and metrics of the patterns if a batch was seen."""
        if self.off or ctx.model is None:
            return None
        if self._handle is None and not self._layers:  # in a loop that does not start hooks: from now on
            self.start(ctx.model)
        metrics = {**_spectra(values_of(ctx)), **self._patterns()}
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
            pattern = _pattern(call)  # (B, H, T, S)
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


def _spectra(values: FiringValues) -> dict[str, float]:
    found = values.singular_values(dict(_projections(values.modules)))
    spectra = [sigmas for sigmas in found.values() if sigmas.any()]  # a matrix of zeros has no direction
    if not spectra:
        return {}
    squares = [np.square(sigmas) for sigmas in spectra]
    return {
        "sv_concentration": float(np.mean([sigmas[0] / sigmas.sum() for sigmas in spectra])),
        "effective_rank": float(np.mean([effective_rank(sigmas) for sigmas in spectra])),
        "top5_explained_var": float(np.mean([square[:_TOP].sum() / square.sum() for square in squares])),
    }


# -- projections -----------------------------------------------------------------------------------------------------

_Projection: TypeAlias = tuple[str, Tensor]
"""The name of a query, key or value matrix, with the third that it is if it is one; and the matrix, (out, in)."""


def _projections(modules: Modules) -> Iterator[_Projection]:
    """Yield every query, key and value matrix of a model, by the name of its parameter."""
    for path, module in modules:
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            if module.in_proj_weight is not None:
                yield from _thirds(f"{prefix}in_proj_weight", module.in_proj_weight)
            else:
                yield from ((f"{prefix}{name}", getattr(module, name)) for name in names)
        else:
            yield from _of_children(prefix, module._modules)


def _of_children(prefix: str, children: Mapping[str, nn.Module | None]) -> Iterator[_Projection]:
    for names in _SEPARATE:
        weights = [(f"{prefix}{name}.weight", w) for name in names if (w := matrix_of(children.get(name))) is not None]
        if len(weights) == len(names):
            yield from weights
            return
    for name in _TOGETHER:
        weight = matrix_of(children.get(name))
        if weight is not None and weight.shape[0] == 3 * weight.shape[1]:
            yield from _thirds(f"{prefix}{name}.weight", weight)


def _thirds(name: str, weight: Tensor) -> Iterator[_Projection]:
    for part, third in zip("qkv", weight.chunk(3), strict=True):
        yield (f"{name}[{part}]", third)


# -- patterns --------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Hold the inputs of one attention, without their graph."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    """Where positions may not attend: true there, or added to the scores."""
    padding: Tensor | None
    """Which keys are padding: true there, or added to the scores."""

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Return the inputs from the arguments of a forward."""
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given[name].detach() for name in names[:3])
        return cls(module, query, key, value, given.get("attn_mask"), given.get("key_padding_mask"))


def _pattern(call: _Call) -> Tensor | None:
    """Return the probabilities (batch, heads, queries, keys); None with added keys, or for nested tensors."""
    module, query = call.module, call.query
    if module.bias_k is not None or module.add_zero_attn or query.is_nested or query.numel() == 0:
        return None
    inputs = (call.query, call.key, call.value)
    rows = [x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if module.batch_first else x for x in inputs]
    samples = max(2, _MOST // (module.num_heads * len(rows[0]) * len(rows[1])))
    q, k, v = (x[:, :samples].to(module.out_proj.weight.dtype) for x in rows)  # (T, B, D)
    mask, padding = call.mask, call.padding
    if mask is not None and mask.dim() == 3:  # one for each sample and head
        mask = mask[: samples * module.num_heads]
    if padding is not None:
        padding = padding.reshape(-1, padding.shape[-1])[:samples]
    _, pattern = F.multi_head_attention_forward(
        q, k, v, module.embed_dim, module.num_heads, module.in_proj_weight, module.in_proj_bias, None, None, False,
        0.0, module.out_proj.weight, module.out_proj.bias, training=False, attn_mask=mask, key_padding_mask=padding,
        use_separate_proj_weight=module.in_proj_weight is None, q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight, v_proj_weight=module.v_proj_weight, average_attn_weights=False,
    )  # fmt: skip
    # A position that may attend to nothing has no pattern: torch gives NaN, here it is 0.
    return None if pattern is None else pattern.float().nan_to_num(0.0)
