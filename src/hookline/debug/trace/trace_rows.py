"""Say whose rows are in a forward: from the engine that runs it, or from a batch object among the inputs of a module.

The hooks of a trace call `rows_of`; `factories.served_batch` knows both sources.
"""

from __future__ import annotations

from typing import Any

from hookline.debug.trace.trace_record import RowTable
from hookline.factories.served_batch import running

__all__ = ["rows_of"]


def rows_of(inputs: Any) -> RowTable | None:
    """Return whose rows the running forward has; None if nobody says, or only a device knows."""
    tokens = running(inputs)
    if tokens is None or not tokens.has_names:
        return None
    firsts = tuple(first for first in tokens.firsts if first is not None)
    if len(firsts) < len(tokens.firsts):
        return None
    if tokens.width is None:
        return RowTable("packed", tokens.requests, (), tokens.lengths, firsts)
    starts = tuple(tokens.width - length for length in tokens.lengths)
    return RowTable("padded", tokens.requests, starts, tokens.lengths, firsts)
