"""Run the model for a batch of rows, and keep their key-value cache and padding.

The engine's loop and the model probe call it. Sequences of different lengths end in the same column, so that the
padding is on the left:

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
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from hookline.errors import MissingPackageError, OptionError
from hookline.messages import type_name
from hookline.observe.tokens import Tokens
from hookline.sites.modules.module_hooks import existing_hooks
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.engines.session import Session
    from hookline.serve.request_row import RequestRow

__all__ = ["BatchForward", "RowBatch"]


class BatchForward:
    """Call a causal language model of ``transformers`` with the arguments that its signature allows."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        inner: Any = unwrap(model)
        takes = inspect.signature(inner.forward).parameters
        missing = [
            name for name in ("input_ids", "attention_mask", "past_key_values", "use_cache") if name not in takes
        ]
        if missing or not hasattr(inner, "get_input_embeddings"):
            raise OptionError(
                f"A causal language model of transformers can be served, got {type_name(inner)}"
                f"{f', whose forward takes no {missing[0]}' if missing else ''}."
            )
        self.model = model
        self.session = session
        """What hooks and hidden states of a forward go through."""
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        embedding = inner.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        self.device: torch.device = embedding.weight.device
        head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        self._ends = [module for module in (inner, head) if module is not None]
        """The modules that see logits; all columns are computed only if one of them has hooks."""
        self._takes_positions = "position_ids" in takes
        self._may_keep_last = "logits_to_keep" in takes
        self._new_cache = _cache_class()
        self._is_probed = True
        """Whether the model is being probed, which needs the logits of every column."""

    def end_probe(self) -> None:
        """Reset the counts after the probe."""
        self._is_probed = False
        self.counts.clear()
        self.seconds = 0.0

    def new_cache(self) -> Any:
        """Return an empty cache that keeps every column."""
        return self._new_cache()

    def run(
        self, table: Tokens, ids: list[list[int]], positions: list[list[int]], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Return the logits of the last column, (rows, vocabulary)."""
        options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if self._takes_positions:
            options["position_ids"] = torch.tensor(positions, device=self.device)
        if self._may_keep_last and not self._has_hooks_at_end():
            options["logits_to_keep"] = 1  # of a prompt of 8,000 tokens and a vocabulary of 128,000, 4 GB less
        start = time.perf_counter()
        with torch.inference_mode(), self.session.step(table):
            logits: Tensor = self.model(input_ids=torch.tensor(ids, device=self.device), **options).logits[:, -1]
        self.counts[f"{table.phase}_forwards"] += 1
        self.counts[f"{table.phase}_tokens"] += sum(table.lengths)
        self.seconds += time.perf_counter() - start
        return logits

    def _has_hooks_at_end(self) -> bool:
        if self._is_probed:
            return True
        tables = (existing_hooks(module) for module in self._ends)
        return any(table is not None and any(True for _ in table.entries()) for table in tables)


def _cache_class() -> Any:
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise MissingPackageError(
            "Serving a model needs the transformers package: pip install 'hookline[serve]'."
        ) from error
    return DynamicCache


class RowBatch:
    """Hold the rows that run together, with their cache; empty at first."""

    def __init__(self, forward: BatchForward) -> None:
        self._forward = forward
        self.rows: list[RequestRow] = []
        self.pads: list[int] = []
        """For each row, how many columns of padding it begins with."""
        self.width = 0
        """Columns in the cache."""
        self._cache: Any = None

    def __len__(self) -> int:
        return len(self.rows)

    def prefill(self, rows: Sequence[RequestRow]) -> Tensor:
        """Run the prompts of `rows`, which become the batch; return logits (rows, vocabulary)."""
        prompts = [row.request.prompt_ids for row in rows]
        width = max(map(len, prompts))
        pads = [width - len(prompt) for prompt in prompts]
        table = Tokens.padded([row.request.id for row in rows], prompts, [0] * len(rows), "prefill")
        ids = [[0] * left + list(prompt) for left, prompt in zip(pads, prompts, strict=True)]
        # Padding has position 0, which every model has; nothing looks at it.
        positions = [[0] * left + list(range(len(prompt))) for left, prompt in zip(pads, prompts, strict=True)]
        cache = self._forward.new_cache()
        logits = self._forward.run(table, ids, positions, self._mask(pads, width), cache)
        self.rows, self.pads, self.width, self._cache = list(rows), pads, width, cache
        return logits

    def decode(self) -> Tensor:
        """Run the last token of every row; return logits (rows, vocabulary)."""
        rows = self.rows
        positions = tuple(row.position for row in rows)
        table = Tokens.padded([row.request.id for row in rows], [(row.last,) for row in rows], positions, "decode")
        self.width += 1
        ids = [[row.last] for row in rows]
        mask = self._mask(self.pads, self.width)
        return self._forward.run(table, ids, [[position] for position in positions], mask, self._cache)

    def _mask(self, pads: Sequence[int], width: int) -> Tensor | None:
        """Return (rows, width), 1 where there is a token; None if that is everywhere."""
        if not any(pads):
            return None
        device = self._forward.device
        return (torch.arange(width, device=device) >= torch.tensor(pads, device=device).unsqueeze(1)).long()

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
