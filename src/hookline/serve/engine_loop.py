"""Run the engine's batch on its thread: remove rows that ended, prefill new rows, decode one token for all rows.

`Engine` calls `EngineLoop` in each turn; the loop drives `RowBatch`, `choose` and the `Session`, and hands each row its
token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from hookline.serve.row_batch import RowBatch
from hookline.serve.sampling import choose

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.serve.request_row import RequestRow
    from hookline.serve.row_batch import BatchForward

__all__ = ["EngineLoop"]

logger = logging.getLogger("hookline.serve.serving_engine")

_PREFILL_TOKENS: Final = 16_384
"""Prompts that are run together have at most so many tokens, padding included; a longer one is run alone."""

_COUNTS: Final = (
    *(f"requests_{reason}" for reason in ("stop", "length", "cancelled", "error")),
    *("prompt_tokens", "answer_tokens", "prefill_forwards", "decode_forwards", "forward_seconds"),
)


class EngineLoop:
    """Hold the batch that runs, and move rows into and out of it."""

    def __init__(self, forward: BatchForward, *, max_batch: int) -> None:
        self._forward = forward
        self._session = forward.session
        self._batch = RowBatch(forward)
        self._max_batch = max_batch
        self.counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        """Requests by how they ended, forwards with the choice of tokens, and tokens, since the start."""

    @property
    def rows(self) -> list[RequestRow]:
        """Return the rows that run."""
        return self._batch.rows

    def fitting(self, waiting: Sequence[RequestRow]) -> Sequence[RequestRow]:
        """Return the first rows of `waiting`, as many as can be taken in together."""
        width = count = 0
        for row in waiting[: self._max_batch - len(self.rows)]:
            width = max(width, len(row.request.prompt_ids))
            if count and width * (count + 1) > _PREFILL_TOKENS:
                break
            count += 1
        return waiting[:count]

    def enter(self, rows: Sequence[RequestRow]) -> None:
        """Run the prompts of new rows, and put those that go on into the batch."""
        joining = RowBatch(self._forward, [row for row in rows if self._open(row)])
        if joining.rows:
            self.counts["prompt_tokens"] += sum(len(row.request.prompt_ids) for row in joining.rows)
            self._advance(joining, joining.prefill, "prefill_forwards")
        if joining.rows:
            try:
                self._batch.join(joining)
            except Exception as error:  # no memory, most likely; the running rows are unchanged
                self._fail(joining, error)

    def _open(self, row: RequestRow) -> bool:
        """Attach what `row` asks for; return False, and fail the row, if that raises."""
        try:
            row.open(self._session)
        except Exception as error:
            self._fail(RowBatch(self._forward, [row]), error)
            return False
        return True

    def run_round(self) -> None:
        """Run one more token for every row of the batch."""
        self._advance(self._batch, self._batch.decode, "decode_forwards")

    def _advance(self, batch: RowBatch, forward: Callable[[], Tensor], counted: str) -> None:
        """Run a forward, give each row its next token, and release the rows that end with it."""
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                chosen = choose(forward(), [row.request for row in batch.rows], [row.draws for row in batch.rows])
            flags = self._session.collect()
        except Exception as error:
            self._fail(batch, error)
            return
        self.counts["forward_seconds"] += time.perf_counter() - start
        self.counts[counted] += 1
        for row, choice in zip(batch.rows, chosen, strict=True):
            before = len(row.answer)
            row.take(choice, flags.get(row.request.id, ()))
            self.counts["answer_tokens"] += len(row.answer) - before
        self._let_go(batch)

    def leave_cancelled(self) -> None:
        """Release the rows that were cancelled."""
        self._let_go(self._batch)

    def _let_go(self, batch: RowBatch) -> None:
        """Release the rows that are over or cancelled."""
        rows = batch.rows
        goes = [row.is_over or row.cancelled for row in rows]  # read once: any thread may cancel
        try:
            batch.keep([place for place, is_going in enumerate(goes) if not is_going])
        except Exception as error:
            self._fail(batch, error)
        for row, is_going in zip(rows, goes, strict=True):
            if is_going:
                self.end(row)

    def end(self, row: RequestRow, error: str | None = None) -> None:
        """End a row that is out of the batch: with `error`, as complete, or as cancelled."""
        if row.finished is None:
            row.error = row.error or error
            row.end(self._session)
            self.counts[f"requests_{row.finished}"] += 1

    def abandon(self, rows: Sequence[RequestRow], error: str) -> None:
        """Empty the batch, and end `rows` with an error."""
        self._batch.clear()
        for row in rows:
            self.end(row, error)

    def _fail(self, batch: RowBatch, error: Exception) -> None:
        rows = batch.rows
        logger.error("A forward failed, and with it %d requests", len(rows), exc_info=error)
        batch.clear()
        for row in rows:
            self.end(row, f"{type(error).__name__}: {error}")
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
