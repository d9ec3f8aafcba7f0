"""Tell hooks which requests are in the rows of the running batch.

A serving engine wraps each forward in ``serving``, with a table of a padded batch (`BatchRows`) or of a flat one
(`TokenBatch`). Hooks call ``current_rows`` or ``current_batch``, which are None without an engine.

    >>> rows = BatchRows(("a", "b"), (0, 2), (0, 0), ((5, 6, 7), (8,)), "prefill")
    >>> with serving(rows):
    ...     current_rows().request_ids
    ('a', 'b')
    >>> current_rows() is None
    True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["BatchRows", "TokenBatch", "current_batch", "current_rows", "sent_to_host", "serving", "set_batch"]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Map the rows of one forward to requests; every tuple has one entry for each row of the batch.

    Recipe: ``with serving(BatchRows(("a",), (0,), (0,), ((5, 6),), "prefill")): model(input_ids)``.
    """

    request_ids: tuple[str, ...]
    """Row b of the batch belongs to ``request_ids[b]``."""
    starts: tuple[int, ...]
    """First real column of row b in this forward's input; what lies before it is padding."""
    positions: tuple[int, ...]
    """Position of that column in the sequence of prompt and answer, from 0."""
    tokens: tuple[tuple[int, ...], ...]
    """The real tokens of row b in this forward."""
    phase: str
    """``"prefill"`` or ``"decode"``."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Say whose tokens are in a flat batch; tensors may be on a device. Padding may follow the last token."""

    input_ids: Tensor | None
    positions: Tensor | None
    lengths: Tensor | tuple[int, ...] | None
    """How many tokens each request has in this forward; None if each has one."""
    request_ids: tuple[str, ...] | Tensor | None
    phase: str
    """``"prefill"``, ``"decode"``, or ``"mixed"`` where ``phases`` has both."""
    phases: tuple[str, ...] | None = None
    """The stage of each request; None if all are in ``phase``."""

    def copied(self) -> TokenBatch:
        """Return a copy with its own tensors: the system reuses its buffers for the next forward."""
        return self._with_tensors(_copy)

    def on_host(self) -> TokenBatch:
        """Return a copy on the host, sent by the current stream."""
        return self._with_tensors(sent_to_host)

    def _with_tensors(self, change: Any) -> TokenBatch:
        return TokenBatch(
            change(self.input_ids),
            change(self.positions),
            change(self.lengths),
            change(self.request_ids),
            self.phase,
            self.phases,
        )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def sent_to_host(value: Any) -> Any:
    """Return a tensor on the host, whose copy the current stream of its device makes; other values as they are."""
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


# Of the context, not of the process: two engines in two threads each run forwards of their own.
_ROWS: Final[ContextVar[BatchRows | TokenBatch | None]] = ContextVar("hookline_batch_rows", default=None)


def current_batch() -> BatchRows | TokenBatch | None:
    """Return the table of the forward that this thread is running, padded or flat; None without an engine."""
    return _ROWS.get()


def current_rows() -> BatchRows | None:
    """Return the table of the forward that this thread is running; None without an engine, or in a flat batch."""
    rows = _ROWS.get()
    return rows if isinstance(rows, BatchRows) else None


def set_batch(rows: BatchRows | TokenBatch | None) -> None:
    """Make ``rows`` the current ones from now on, for an engine that tells of begin and end of a step separately."""
    _ROWS.set(rows)


@contextmanager
def serving(rows: BatchRows | TokenBatch | None) -> Iterator[None]:
    """Make ``rows`` the current ones for as long as the block lasts."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)
