"""Say whose rows are in a forward: from the engine that runs it, or from a batch object among the inputs of a module.

The hooks of a trace call `rows_of`; `factories.served_batch` knows both sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookline.debug.trace.trace_record import RowTable
from hookline.factories.batch_rows import BatchRows
from hookline.factories.served_batch import TokenBatch, running

__all__ = ["rows_of"]


def rows_of(inputs: Any) -> RowTable | None:
    """Return whose rows the running forward has; None if nobody says."""
    served = running(inputs)
    if isinstance(served, BatchRows):
        lengths = tuple(len(each) for each in served.tokens)
        return RowTable("padded", served.request_ids, served.starts, lengths, served.positions)
    return None if served is None else _packed(served)


def _packed(batch: TokenBatch) -> RowTable | None:
    """Return the table of a flat batch whose numbers are on the host; those of a device would have to be waited for."""
    requests = _request_names(batch.request_ids)
    positions = _numbers(batch.positions)
    lengths = [1] * len(requests) if batch.lengths is None else _numbers(batch.lengths)
    if not requests or positions is None or lengths is None or len(lengths) != len(requests):
        return None
    if sum(lengths) > len(positions):
        return None
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    firsts = tuple(positions[begin] for begin in begins)
    return RowTable("packed", requests, (), tuple(lengths), firsts)


def _request_names(ids: tuple[str, ...] | Tensor | None) -> tuple[str, ...]:
    if not isinstance(ids, Tensor):
        return ids or ()
    return tuple(f"pool-{number}" for number in _numbers(ids) or ())


def _numbers(values: Tensor | Sequence[int] | None) -> list[int] | None:
    if isinstance(values, Tensor):
        return None if values.device.type != "cpu" else [int(each) for each in values.flatten().tolist()]
    return None if values is None else list(values)
