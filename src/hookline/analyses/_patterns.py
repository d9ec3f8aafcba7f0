"""The attention pattern of an `nn.MultiheadAttention`, from what it was given; the module itself is not called.

Takes a `Call` that ``attention`` has remembered, hands back probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Call", "pattern_of"]

_MOST: Final = 1 << 24
"""Probabilities that are looked at, at most, 64 MiB of them; of a larger batch, the first samples."""


@dataclass(frozen=True)
class Call:
    """What one attention was given, without its graph."""

    module: Any
    query: Tensor
    key: Tensor
    mask: Tensor | None
    """What positions may not attend to: true there, or added to the scores."""
    padding: Tensor | None
    """Which keys are padding: true there, or added to the scores."""

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """From the arguments of a forward."""
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
        return cls(module, given["query"].detach(), given["key"].detach(), mask, padding)


def pattern_of(call: Call) -> Tensor | None:
    """(batch, heads, queries, keys); None of a module that adds keys of its own, or was given nested tensors."""
    module, query, key = call.module, call.query, call.key
    if module.bias_k is not None or module.add_zero_attn or query.is_nested or query.numel() == 0:
        return None
    if query.dim() == 2:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    samples = max(2, _MOST // (module.num_heads * query.shape[1] * key.shape[1]))
    query, key = query[:samples], key[:samples]
    (wq, bq), (wk, bk) = _projections(module)
    q, k = (_heads(F.linear(x.to(w.dtype), w, b), module.num_heads) for x, w, b in ((query, wq, bq), (key, wk, bk)))
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
    # A position that may attend to nothing has no pattern: torch gives NaN, here it counts as none.
    return torch.softmax(_masked(scores, call, module.num_heads), dim=-1).nan_to_num(0.0)


def _projections(module: Any) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    if module.in_proj_weight is not None:
        wq, wk, _ = module.in_proj_weight.detach().chunk(3)
    else:
        wq, wk = module.q_proj_weight.detach(), module.k_proj_weight.detach()
    if module.in_proj_bias is None:
        return (wq, None), (wk, None)
    bq, bk, _ = module.in_proj_bias.detach().chunk(3)
    return (wq, bq), (wk, bk)


def _heads(x: Tensor, heads: int) -> Tensor:  # (B, T, D) to (B, H, T, D/H)
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def _masked(scores: Tensor, call: Call, heads: int) -> Tensor:
    mask, padding = call.mask, call.padding
    if mask is not None:
        if mask.dim() == 3:  # one for each sample and head
            mask = mask.reshape(-1, heads, *mask.shape[1:])[: scores.shape[0]]
        scores = _added(scores, mask)
    if padding is not None:
        padding = padding.unsqueeze(0) if padding.dim() == 1 else padding[: scores.shape[0]]
        scores = _added(scores, padding[:, None, None, :])
    return scores


def _added(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
