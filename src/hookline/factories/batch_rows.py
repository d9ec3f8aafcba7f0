"""Tell hooks which requests are in the rows of the running batch.

A serving engine wraps each forward in ``serving``; hooks call ``current_rows``, which is None without an engine.

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
from typing import Final

__all__ = ["BatchRows", "current_rows", "serving"]


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


# Of the context, not of the process: two engines in two threads each run forwards of their own.
_ROWS: Final[ContextVar[BatchRows | None]] = ContextVar("hookline_batch_rows", default=None)


def current_rows() -> BatchRows | None:
    """Return the table of the forward that this thread is running; None without an engine."""
    return _ROWS.get()


@contextmanager
def serving(rows: BatchRows | None) -> Iterator[None]:
    """Make ``rows`` the current ones for as long as the block lasts."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)
