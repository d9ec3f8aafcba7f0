"""Run the engine's batch on its thread: remove rows that ended, prefill new rows, decode one token for all rows.

`Engine` calls `EngineLoop` in each turn; the loop drives `RowBatch`, `choose` and the `Session`, and each row reports
its tokens and its end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hookline.serve.row_batch import RowBatch
from hookline.serve.sampling import ChosenToken, choose

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.serve.request_row import RequestRow, Ticket
    from hookline.serve.row_batch import BatchForward

__all__ = ["EngineLoop"]

logger = logging.getLogger("hookline.serve.serving_engine")

_PREFILL_TOKENS = 16_384
"""Prompts that are run together have at most so many tokens, padding included; a longer one is run alone."""


class EngineLoop:
    """Hold the batch that runs, and move rows into and out of it."""

    def __init__(self, forward: BatchForward, *, max_batch: int) -> None:
        self._forward = forward
        self._session = forward.session
        self._batch = RowBatch(forward)
        self._max_batch = max_batch
        self._entering: list[RequestRow] = []
        """Rows with a prompt that is being run."""
        self.ended: Counter[str] = Counter()
        """Requests by how they ended."""
        self.answered = 0
        """Tokens of all answers."""

    @property
    def rows(self) -> list[RequestRow]:
        """Return the rows that run."""
        return self._batch.rows

    def select_fitting(self, waiting: Sequence[RequestRow], bytes_left: int) -> list[RequestRow]:
        """Return the first rows of `waiting` that can be taken in together.

        A row that waits for room for its hidden states is passed by rows that want none, and by no other: it is still
        the first for the next place.
        """
        found: list[RequestRow] = []
        fitting: set[Ticket] = set()
        width = 0
        for row in waiting:
            ticket = row.ticket
            if ticket.nbytes and not ticket.has_room and ticket not in fitting:
                bytes_left -= ticket.nbytes
                if bytes_left < 0:
                    continue
                fitting.add(ticket)
            width = max(width, len(row.request.prompt_ids))
            if len(self.rows) + len(found) >= self._max_batch or (found and width * (len(found) + 1) > _PREFILL_TOKENS):
                break
            found.append(row)
        return found

    def enter(self, rows: Sequence[RequestRow]) -> None:
        """Run the prompts of new rows, and put those that go on into the batch."""
        self._entering = [row for row in rows if self._open(row)]
        if self._entering:
            joining = RowBatch(self._forward)
            try:
                logits = joining.prefill(self._entering)
            except Exception as error:
                self._fail(self._entering, error)
            else:
                self._advance(joining, logits)
                self._join(joining)
        self._entering = []

    def _open(self, row: RequestRow) -> bool:
        """Attach the observers and hooks of `row`; return False, and fail the row, if that raises."""
        try:
            if row.states is not None:
                self._session.states.open(row.states)
        except Exception as error:
            row.states = None  # there is nothing to close
            self._fail([row], error)
            return False
        try:
            if row.hooks is not None:
                row.hooks.open()
        except Exception as error:
            self._fail([row], error)
            return False
        return True

    def _join(self, joining: RowBatch) -> None:
        if not len(joining):
            return
        try:
            with torch.inference_mode():
                self._batch.join(joining)
        except Exception as error:  # no memory, most likely; the running rows are unchanged
            self._fail(joining.rows, error)

    def run_round(self) -> None:
        """Run one more token for every row of the batch."""
        try:
            logits = self._batch.decode()
        except Exception as error:
            rows = self.rows
            self._batch.clear()
            self._fail(rows, error)
            return
        self._advance(self._batch, logits)

    def _advance(self, batch: RowBatch, logits: Tensor) -> None:
        """Choose the next token of each row, report it, and release the rows that end with it."""
        try:
            with torch.inference_mode():
                chosen = choose(logits, [row.request for row in batch.rows], [row.draws for row in batch.rows])
            flags = self._session.collect()
        except Exception as error:
            rows = batch.rows
            batch.clear()
            self._fail(rows, error)
            return
        for row, choice in zip(batch.rows, chosen, strict=True):
            if flags:
                row.flag(flags.get(row.request.id, []))
            self._take(row, choice)
        self._let_go(batch)

    def _take(self, row: RequestRow, choice: ChosenToken) -> None:
        before = len(row.answer)
        try:
            row.take(choice)
        except Exception as error:  # the tokenizer's, of whom a model's larger vocabulary may ask too much
            logger.exception("Token %d of request %r has no text", choice.id, row.request.id)
            row.fail(f"Token {choice.id} has no text: {type(error).__name__}: {error}")
        self.answered += len(row.answer) - before
        if row.states is not None and row.states.error is not None:
            row.fail(f"Its hidden states cannot be had: {str(row.states.error).rstrip('.')}.")

    def leave_cancelled(self) -> None:
        """Release the rows that were cancelled."""
        if any(row.cancelled for row in self.rows):
            self._let_go(self._batch)

    def _let_go(self, batch: RowBatch) -> None:
        rows = batch.rows
        going = [row.is_over or row.cancelled for row in rows]  # read once: any thread may cancel
        kept = [place for place, goes in enumerate(going) if not goes]
        try:
            with torch.inference_mode():
                batch.keep(kept)
        except Exception as error:
            batch.clear()
            self._fail([rows[place] for place in kept], error)
        for row, goes in zip(rows, going, strict=True):
            if goes:
                self.end(row)

    def end(self, row: RequestRow, error: str | None = None, *, entered: bool = True) -> None:
        """End a row: with `error`, as finished, or as cancelled."""
        if row.hooks is not None:  # first: their metrics are part of the answer
            row.hook_results = tuple(row.hooks.close())
        if error is not None:
            row.fail(error)
        elif row.is_over:
            row.finish()
        else:
            row.cancel()
        if entered and row.states is not None:
            self._session.states.close(row.states)
        assert row.finished is not None
        self.ended[row.finished.reason] += 1

    def abandon(self, error: str | None) -> None:
        """End all rows that run: with an error, or as cancelled."""
        entering = [row for row in self._entering if row.finished is None and row not in self.rows]
        rows = self.rows + entering
        self._batch.clear()
        self._entering = []
        for row in rows:
            self.end(row, error)

    def _fail(self, rows: Sequence[RequestRow], error: Exception) -> None:
        logger.error("A forward failed, and with it %d requests", len(rows), exc_info=error)
        for row in rows:
            self.end(row, f"{type(error).__name__}: {error}")
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
