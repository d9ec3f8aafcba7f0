"""Run the model for a batch of rows, and keep their key-value cache and padding.

The engine's loop and `ServedModel` call it. Sequences of different lengths end in the same column, so that the padding
is on the left:

    columns   0 1 2 3 4 5
    row a     . . . a a a      pads 3
    row b     b b b b b b      pads 0
    row c     . c c c c c      pads 1

The cache is a ``transformers.DynamicCache`` that keeps every column, also for layers whose attention looks back through
a window: what such a layer may see is in its mask. Rows that finish are taken out, new ones are put in after a forward
of their own, and columns that are padding in all rows are cut off: the cache is as long as the longest row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.observe.tokens import Tokens
from hookline.sites import _torch
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor, nn

    from hookline.engines.session import Session
    from hookline.serve.generation_request import GenerationRequest
    from hookline.serve.request_row import RequestRow


class BatchForward:
    """Call a causal language model of ``transformers`` with the arguments that its signature allows."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        inner: Any = unwrap(model)
        takes = inspect.signature(inner.forward).parameters
        needed = ("input_ids", "attention_mask", "past_key_values", "use_cache")
        missing = [name for name in needed if name not in takes]
        if missing or not hasattr(inner, "get_input_embeddings"):
            raise OptionError(
                f"A causal language model of transformers can be served, got {type_name(inner)}"
                f"{f', whose forward takes no {missing[0]}' if missing else ''}."
            )
        self.model = model
        self.session = session
        """What hooks and hidden states of a forward go through."""
        embedding = inner.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        self.device: torch.device = embedding.weight.device
        head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        self._ends = [module for module in (inner, head) if module is not None]
        """The modules that see logits; all columns are computed only if one of them has hooks."""
        self._takes_positions = "position_ids" in takes
        self._may_keep_last = "logits_to_keep" in takes

    def run(
        self, table: Tokens, ids: list[list[int]], positions: list[list[int]], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Return the logits of the last column, (rows, vocabulary)."""
        options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if self._takes_positions:
            options["position_ids"] = torch.tensor(positions, device=self.device)
        if self._may_keep_last and not any(hook for module in self._ends for hook in _torch.hooks_of(module)):
            options["logits_to_keep"] = 1  # of a prompt of 8,000 tokens and a vocabulary of 128,000, 4 GB less
        with torch.inference_mode(), self.session.step(table):
            logits: Tensor = self.model(input_ids=torch.tensor(ids, device=self.device), **options).logits[:, -1]
        return logits


class RowBatch:
    """Hold the rows that run together, with their cache.

    Recipe: ``batch = RowBatch(forward, rows); logits = batch.prefill()``, then `decode` for each further token.
    """

    def __init__(self, forward: BatchForward, rows: Sequence[RequestRow] = ()) -> None:
        self._forward = forward
        self.rows = list(rows)
        self.pads: list[int] = []
        """For each row, how many columns of padding it begins with."""
        self.width = 0
        """Columns in the cache."""
        self._cache: Any = None

    def prefill(self) -> Tensor:
        """Run the prompts of all rows, once; return logits (rows, vocabulary)."""
        prompts = [row.request.prompt_ids for row in self.rows]
        self.width = max(map(len, prompts))
        self.pads = [self.width - len(prompt) for prompt in prompts]
        self._cache = DynamicCache()
        table = Tokens.padded([row.request.id for row in self.rows], prompts, [0] * len(prompts), "prefill")
        ids = [[0] * left + list(prompt) for left, prompt in zip(self.pads, prompts, strict=True)]
        # Padding has position 0, which every model has; nothing looks at it.
        positions = [[0] * left + list(range(len(prompt))) for left, prompt in zip(self.pads, prompts, strict=True)]
        return self._forward.run(table, ids, positions, self._mask(), self._cache)

    def decode(self) -> Tensor:
        """Run the last token of every row; return logits (rows, vocabulary)."""
        ids, firsts = [[row.answer[-1]] for row in self.rows], [row.position for row in self.rows]
        table = Tokens.padded([row.request.id for row in self.rows], ids, firsts, "decode")
        self.width += 1
        return self._forward.run(table, ids, [[position] for position in firsts], self._mask(), self._cache)

    def _mask(self) -> Tensor | None:
        """Return (rows, width), 1 where there is a token; None if that is everywhere."""
        if not any(self.pads):
            return None
        device = self._forward.device
        return (torch.arange(self.width, device=device) >= torch.tensor(self.pads, device=device).unsqueeze(1)).long()

    @torch.inference_mode()
    def join(self, other: RowBatch) -> None:
        """Add the rows of another batch; if there is no memory for that, leave this one as it was."""
        if not self.rows:
            self.rows, self.pads, self.width, self._cache = other.rows, other.pads, other.width, other._cache
            return
        width = max(self.width, other.width)
        try:
            for mine, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
                if mine.is_initialized:  # a layer that shares the cache of another has none of its own
                    mine.keys = _stacked(mine.keys, theirs.keys, width)
                    mine.values = _stacked(mine.values, theirs.values, width)
        except BaseException:
            self._undo_join()
            raise
        self.pads = [left + width - self.width for left in self.pads]
        self.pads += [left + width - other.width for left in other.pads]
        self.rows += other.rows
        self.width = width

    def _undo_join(self) -> None:
        """Undo a join that failed in some layers; needs no memory."""
        rows, width = len(self.rows), self.width
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys = layer.keys[:rows, :, -width:]
                layer.values = layer.values[:rows, :, -width:]

    @torch.inference_mode()
    def keep(self, kept: Sequence[int]) -> None:
        """Remove all rows but those at the indices `kept`."""
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in kept]
        if not self.rows:
            self.clear()
            return
        pads = [self.pads[place] for place in kept]
        cut = min(pads)
        chosen = torch.tensor(kept, device=self._forward.device)
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys = _selected(layer.keys, chosen, cut)
                layer.values = _selected(layer.values, chosen, cut)
        self.pads = [left - cut for left in pads]
        self.width -= cut

    def clear(self) -> None:
        """Remove all rows and the cache."""
        self.rows, self.pads, self.width, self._cache = [], [], 0, None


def _stacked(first: Tensor, second: Tensor, width: int) -> Tensor:
    """Return two caches (rows, heads, columns, features) as one, the shorter padded on the left."""
    return torch.cat([pad(each, (0, 0, width - each.shape[-2], 0)) for each in (first, second)])


def _selected(cache: Tensor, rows: Tensor, cut: int) -> Tensor:
    return cache.narrow(-2, cut, cache.shape[-2] - cut).index_select(0, rows.to(cache.device))


# -- the next token of each row: ids come to the host in one transfer, however many rows there are ----------------

NO_TOKEN: Final = -1
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
