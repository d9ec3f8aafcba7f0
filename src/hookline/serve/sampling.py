"""Choose the next token of every row of a batch by the row's own options.

The engine's loop calls `choose` after each forward; ids come to the host in one transfer, however many rows there are.
Draws come from a random stream that each row brings, one number a token, so that a request with a seed gets the same
answer whatever shares its batch, and torch's own streams are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor

    from hookline.serve.generation_request import GenerationRequest

__all__ = ["NO_TOKEN", "ChosenToken", "choose"]

NO_TOKEN = -1
"""Stands for a row whose logits hold NaN, or nothing that can be chosen."""


class ChosenToken(NamedTuple):
    """The next token of one row."""

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def choose(logits: Tensor, requests: Sequence[GenerationRequest], draws: Sequence[Random]) -> list[ChosenToken]:
    """Return the next token of each row; ``logits`` are (rows, vocabulary)."""
    logits = logits.float()
    ids = logits.argmax(-1)
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        picked = _draw(logits.index_select(0, rows), [requests[row] for row in drawn], [draws[row] for row in drawn])
        ids = ids.index_copy(0, rows, picked)
    ids = torch.where(logits.amax(-1).isfinite(), ids, NO_TOKEN)  # the largest of a row with a NaN is NaN
    chosen = [ChosenToken(token) for token in ids.tolist()]
    counts = [request.logprobs if chosen[row].id != NO_TOKEN else None for row, request in enumerate(requests)]
    asked = [row for row, count in enumerate(counts) if count is not None]
    if asked:
        rows = torch.tensor(asked, device=logits.device)
        most = max(count for count in counts if count is not None)
        found = _with_logprobs(logits.index_select(0, rows), ids.index_select(0, rows), most)
        for row, token in zip(asked, found, strict=True):
            chosen[row] = token._replace(top_logprobs=token.top_logprobs[: counts[row]])
    return chosen


def _draw(logits: Tensor, requests: Sequence[GenerationRequest], draws: Sequence[Random]) -> Tensor:
    """Draw one token for each row, by its temperature, ``top_k`` and ``top_p``.

    Where on the line from 0 to 1 the row's number falls, with the likeliest token first. In double precision: a sum
    over 100,000 tokens in single ends before or behind 1, and what is rarer than 1 in 16 million would never be drawn.
    """
    size, device = logits.shape[-1], logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float64).unsqueeze(1)

    # A temperature so low that only the likeliest is left is low enough, and divides without overflow.
    temperature = column([max(request.temperature, 1e-5) for request in requests])
    ordered, ids = (logits - logits.amax(-1, keepdim=True)).sort(-1, descending=True)
    chances = ordered.div(temperature).softmax(-1)
    before = chances.cumsum(-1) - chances
    top_k = column([float(request.top_k or size) for request in requests])
    kept = torch.arange(size, device=device) < top_k
    kept &= before < column([request.top_p for request in requests])
    kept[:, 0] = True
    chances = chances * kept
    summed = chances.cumsum(-1)
    point = column([draw.random() for draw in draws]) * summed[:, -1:]
    # Rounding must not lead to a token of no chance at the end of the line.
    place = torch.searchsorted(summed, point, right=True).minimum(kept.sum(-1, keepdim=True) - 1)
    return ids.gather(1, place).squeeze(1)


def _with_logprobs(logits: Tensor, ids: Tensor, count: int) -> list[ChosenToken]:
    """Return the tokens of all rows with log-probs, of the likeliest too; a row by itself waits for a GPU thrice."""
    scores = logits.log_softmax(-1)
    best = scores.topk(min(count, scores.shape[-1]))
    own = scores.gather(1, ids[:, None])[:, 0]
    each = zip(ids.tolist(), own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [ChosenToken(id, score, tuple(zip(likeliest, values, strict=True))) for id, score, likeliest, values in each]
