"""The rows that run together: their key-value cache, padding, and the forwards they go through.

Takes rows from ``loop``, runs the model, hands back the logits of the last token of each row. Sequences of different
lengths end in the same column, so that the padding is on the left:

    columns   0 1 2 3 4 5
    row a     . . . a a a      pads 3
    row b     b b b b b b      pads 0
    row c     . c c c c c      pads 1

The cache is a ``transformers.DynamicCache`` that keeps every column, also for layers whose attention looks back through
a window: what such a layer may see is in its mask. Rows that finish are taken out, new ones are put in after a forward
of their own, and columns that are padding in all rows are cut off: the cache is as long as the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from hookline.factories.batch_rows import BatchRows

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.serve.generation.batch_forward import Forward
    from hookline.serve.generation.request_row import Row

__all__ = ["Batch"]


class Batch:
    """Rows with a cache; empty at first."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.rows: list[Row] = []
        self.pads: list[int] = []
        """For each row, how many columns of padding it begins with."""
        self.width = 0
        """Columns in the cache."""
        self._cache: Any = None

    def __len__(self) -> int:
        return len(self.rows)

    def prefill(self, rows: Sequence[Row]) -> Tensor:
        """Run the prompts of these rows, which become the batch; (rows, vocabulary)."""
        prompts = [row.request.prompt_ids for row in rows]
        width = max(map(len, prompts))
        pads = [width - len(prompt) for prompt in prompts]
        table = BatchRows(
            tuple(row.request.id for row in rows), tuple(pads), (0,) * len(rows), tuple(prompts), "prefill"
        )
        ids = [[0] * left + list(prompt) for left, prompt in zip(pads, prompts, strict=True)]
        # Padding has position 0, which every model has; nothing looks at it.
        positions = [[0] * left + list(range(len(prompt))) for left, prompt in zip(pads, prompts, strict=True)]
        cache = self._forward.new_cache()
        logits = self._forward.run(rows, table, ids, positions, self._mask(pads, width), cache)
        self.rows, self.pads, self.width, self._cache = list(rows), pads, width, cache
        return logits

    def decode(self) -> Tensor:
        """Run the last token of every row; (rows, vocabulary)."""
        rows = self.rows
        positions = tuple(row.position for row in rows)
        table = BatchRows(
            tuple(row.request.id for row in rows),
            (0,) * len(rows),
            positions,
            tuple((row.last,) for row in rows),
            "decode",
        )
        self.width += 1
        ids = [[row.last] for row in rows]
        mask = self._mask(self.pads, self.width, always=self._forward.is_compiled)
        return self._forward.run(rows, table, ids, [[position] for position in positions], mask, self._cache)

    def _mask(self, pads: Sequence[int], width: int, *, always: bool = False) -> Tensor | None:
        """(rows, width), 1 where there is a token; None, unless always wanted, if that is everywhere."""
        if not always and not any(pads):  # without one there would be twice as many cases to compile
            return None
        device = self._forward.device
        return (torch.arange(width, device=device) >= torch.tensor(pads, device=device).unsqueeze(1)).long()

    def join(self, other: Batch) -> None:
        """Take in the rows of another batch; if that fails, there being no memory for it, this one is as it was."""
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
            self._part()
            raise
        self.pads = [left + width - self.width for left in self.pads]
        self.pads += [left + width - other.width for left in other.pads]
        self.rows += other.rows
        self.width = width

    def _part(self) -> None:
        """Take from layers that were joined already what is not theirs, which needs no memory."""
        rows, width = len(self.rows), self.width
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys = layer.keys[:rows, :, -width:]
                layer.values = layer.values[:rows, :, -width:]

    def keep(self, kept: Sequence[int]) -> None:
        """Let all rows go but these, given by their places."""
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
        """Let everything go."""
        self.rows, self.pads, self.width, self._cache = [], [], 0, None


def _stacked(first: Tensor, second: Tensor, width: int) -> Tensor:
    """Two caches (rows, heads, columns, features) as one, the shorter filled up on the left."""
    return torch.cat([pad(each, (0, 0, width - each.shape[-2], 0)) for each in (first, second)])


def _selected(cache: Tensor, rows: Tensor, cut: int) -> Tensor:
    return cache.narrow(-2, cut, cache.shape[-2] - cut).index_select(0, rows.to(cache.device))
