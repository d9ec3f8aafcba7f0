"""An exported output taken apart by request: whose tokens are in which rows of it.

Takes an item of the export queue and its tensor in the memory of the host, hands tensors with keys and index lines to
the shards. Runs in the writing thread, so that a forward pays for none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hookline.factories.batch_rows import BatchRows
from hookline.factories.engine_batch import TokenBatch
from hookline.factories.output_rows import by_token

if TYPE_CHECKING:
    from hookline.factories.export_queue import Item

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """A tensor of an export, its key, and what the index says of it."""

    key: str
    tensor: Tensor
    line: dict[str, Any]


def pieces_of(item: Item, tensor: Tensor) -> Iterator[Piece]:
    """The pieces of an output."""
    rows = item.rows
    if isinstance(rows, BatchRows):
        yield from _by_row(item, tensor, rows)
    elif isinstance(rows, TokenBatch):
        yield from _by_token(item, tensor, rows)
    else:
        yield _piece(item, 0, tensor)


def _by_row(item: Item, tensor: Tensor, rows: BatchRows) -> Iterator[Piece]:
    """Of a batch that may be padded, each request's own tokens; its last, if that is all there is; else its row."""
    batch = len(rows.request_ids)
    tokens_of = None if item.is_last else by_token(tensor, rows)
    if tokens_of is None and (tensor.dim() < 2 or tensor.shape[0] != batch):
        yield _piece(item, 0, tensor, phase=rows.phase)
        return
    is_last = tensor.dim() == 3 and tensor.shape[1] == 1
    for row, request in enumerate(rows.request_ids):
        tokens = rows.tokens[row]
        positions = range(rows.positions[row], rows.positions[row] + len(tokens))
        if tokens_of is not None:
            real = tokens_of[row, rows.starts[row] :]
            first = max(len(tokens) - 1, 0) if item.wants_last else 0
            yield _piece(item, row, real[first:], request, tokens[first:], positions[first:], rows.phase)
        elif is_last:
            yield _piece(item, row, tensor[row], request, tokens[-1:], positions[-1:], rows.phase)
        else:  # something of each request that is not by token, as a pooled vector or attention weights
            yield _piece(item, row, tensor[row], request, phase=rows.phase)


def _by_token(item: Item, tensor: Tensor, rows: TokenBatch) -> Iterator[Piece]:
    tokens, positions = _numbers(rows.input_ids), _numbers(rows.positions)
    requests = _requests(rows.request_ids)
    lengths = [1] * len(requests) if rows.lengths is None else _numbers(rows.lengths)
    unclear = rows.lengths is None and len(tokens) != len(requests)  # several tokens each, or padded: nobody says
    if unclear or not requests or len(lengths) != len(requests) or not tensor.dim() or sum(lengths) > len(tensor):
        yield _piece(item, 0, tensor, None, tokens, positions, rows.phase)
        return
    begin = 0
    for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        end = begin + length
        first = max(end - 1, begin) if item.wants_last else begin
        yield _piece(item, row, tensor[first:end], request, tokens[first:end], positions[first:end], rows.phase)
        begin = end


def _requests(ids: Sequence[str] | Tensor | None) -> list[str]:
    if isinstance(ids, Tensor):
        return [f"pool-{number}" for number in ids.tolist()]
    return list(ids or ())


def _numbers(values: Tensor | Sequence[int] | None) -> list[int]:
    if isinstance(values, Tensor):
        return [int(value) for value in values.flatten().tolist()]
    return list(values or ())


def _piece(
    item: Item,
    row: int,
    tensor: Tensor,
    request: str | None = None,
    tokens: Sequence[int] = (),
    positions: Sequence[int] = (),
    phase: str | None = None,
) -> Piece:
    line = {
        "module": item.module,
        "call": item.call,
        "request": request,
        "tokens": list(tokens),
        "positions": list(positions),
        "phase": phase,
    }
    return Piece(f"{item.module}#{item.call}#{row}", tensor, line)
