"""Say whose the rows of tensors are, so that padded, packed and continuously batched runs can be compared row by row.

Users give what these functions return, or plain keys, to ``compare(rows=)``; `run_values` asks for the rows of each
value, and `row_matching` pairs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookline.debug.trace.trace_record import RowKey, RowKeys, RowTable
from hookline.errors import OptionError
from hookline.messages import type_name

__all__ = ["as_row_keys", "packed_rows", "padded_rows"]


def padded_rows(mask: Tensor, requests: Sequence[Any] | None = None) -> RowTable:
    """Return whose the rows of (batch, sequence, …) tensors are, of an attention mask.

    Recipe: ``compare(a, b, rows=(padded_rows(mask), packed_rows([5, 7])))``.

    Args:
        mask: Of shape (batch, sequence), not zero where there is a token; padding may be left or right.
        requests: A name for each sample; their numbers by default.
    """
    if mask.dim() != 2:
        raise OptionError(f"padded_rows() takes a mask of shape (batch, sequence), got {tuple(mask.shape)}.")
    real = mask.bool()
    lengths = [int(row.sum()) for row in real]
    starts = [int(row.nonzero()[0]) if length else 0 for row, length in zip(real, lengths, strict=True)]
    for number, (row, start, length) in enumerate(zip(real, starts, lengths, strict=True)):
        if not bool(row[start : start + length].all()):
            raise OptionError(f"padded_rows(): row {number} of the mask has padding between its tokens.")
    return RowTable("padded", _names(requests, len(lengths)), tuple(starts), tuple(lengths), (0,) * len(lengths))


def packed_rows(
    lengths: Sequence[int], requests: Sequence[Any] | None = None, positions: Sequence[int] | None = None
) -> RowTable:
    """Return whose the rows of (tokens, …) tensors are, of sequences that follow each other without padding.

    Recipe: ``packed_rows([5, 1], requests=["a", "b"], positions=[0, 12])`` is a prefill of five tokens beside the
    decode of the thirteenth token of another request.

    Args:
        lengths: How many tokens each request has.
        requests: A name for each; their numbers by default.
        positions: The position of the first token of each; 0 by default.
    """
    names = _names(requests, len(lengths))
    begins = (0,) * len(lengths) if positions is None else tuple(positions)
    if len(begins) != len(lengths):
        raise OptionError(f"packed_rows() was given {len(lengths)} lengths and {len(begins)} positions.")
    return RowTable("packed", names, (), tuple(lengths), begins)


def _names(requests: Sequence[Any] | None, count: int) -> tuple[str, ...]:
    names = tuple(map(str, range(count) if requests is None else requests))
    if len(names) != count or len(set(names)) != count:
        raise OptionError(f"There are {count} samples, and {len(set(names))} names for them in {list(names)!r}.")
    return names


def as_row_keys(rows: Any, shape: tuple[int, ...]) -> RowKeys | None:
    """Return the keys of the rows of a tensor of that shape; None if it has no such rows.

    ``rows`` is a `RowTable`, or a key for each row: ``(request, position)``, None for padding. What all requests share,
    as rotary embeddings are, has a batch of one, and is of no request.
    """
    if isinstance(rows, RowTable):
        is_shared = rows.layout == "padded" and len(rows.requests) > 1 and shape[:1] == (1,)
        return None if is_shared else rows.keys_for(shape)
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise OptionError(f"rows= takes a pair, for A and for B, of padded_rows(), packed_rows() or keys; got "
                          f"{type_name(rows)}.")  # fmt: skip
    keys = tuple(None if key is None else _key(key) for key in rows)
    of_tokens = any(key is not None and key.position is not None for key in keys)
    for dims in (1, 2) if of_tokens or shape[:1] != (1,) else (1,):
        if len(shape) >= dims and math.prod(shape[:dims]) == len(keys):
            return RowKeys(dims, keys)
    return None


def _key(key: Any) -> RowKey:
    request, position = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
    return RowKey(str(request), position)
