"""Take the rows of one request out of what a module takes and returns, and put edited rows back.

`request_hooks` calls it at each firing. An engine has a batch of padded rows (`PaddedRow`) or a flat one (`FlatRows`).
Only tensors with a row for each token are shown, cut to the rows of the request; a hook of a request never gets a
number of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.batch_rows import BatchRows, TokenBatch
from hookline.messages import type_name
from hookline.tree import children, map_tensors, rebuilt

__all__ = ["NO_ROWS", "FlatRows", "PaddedRow", "RowsOfRequest", "part_of", "row_in_padded", "with_part"]


class RowsOfRequest(Protocol):
    """The rows of one request in the running forward."""

    @property
    def table(self) -> BatchRows | TokenBatch:
        """Return the table of these rows alone."""

    @property
    def count(self) -> int:
        """Return how many tokens they are."""

    def cut(self, tensor: Tensor) -> Tensor | None:
        """Return the rows as a view of `tensor`; None if it has no row for each token."""


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of a flat batch, behind whose tokens padding may follow."""

    begin: int
    end: int
    total: int
    """How many rows the step has for all requests."""
    length: int
    """How many rows the batch has, with its padding."""
    table: TokenBatch

    @property
    def count(self) -> int:
        """Return how many tokens they are."""
        return self.end - self.begin

    def cut(self, tensor: Tensor) -> Tensor | None:
        """Return the rows as a view of `tensor`; None if it has no row for each token."""
        has_rows = tensor.dim() > 0 and tensor.shape[0] in (self.total, self.length)
        return tensor[self.begin : self.end] if has_rows else None


@dataclass(frozen=True, slots=True)
class PaddedRow:
    """One row of a batch that is padded on the left."""

    row: int
    rows: int
    columns: int
    start: int
    """The first column that is no padding."""
    table: BatchRows

    @property
    def count(self) -> int:
        """Return how many tokens they are."""
        return self.columns - self.start

    def cut(self, tensor: Tensor) -> Tensor | None:
        """Return the rows as a view of `tensor`; None if it has no row for each token."""
        shape = tuple(tensor.shape)
        if shape[:2] == (self.rows, self.columns) and len(shape) in (2, 3):
            return tensor[self.row : self.row + 1, self.start :]
        if len(shape) == 2 and shape[0] == self.rows * self.columns:  # as experts see their tokens
            first = self.row * self.columns
            return tensor[first + self.start : first + self.columns]
        return None


class _NoRows:
    """Stands for the rows of a request in what is not in the order of the batch."""

    def cut(self, tensor: Tensor) -> None:
        """Return None: there are none."""


NO_ROWS: Final = _NoRows()


def row_in_padded(batch: Any, request: str) -> PaddedRow | None:
    """Return the row of a request in the padded batch of a forward; None if it has none."""
    if not isinstance(batch, BatchRows) or request not in batch.request_ids:
        return None
    row = batch.request_ids.index(request)
    start, tokens = batch.starts[row], batch.tokens[row]
    own = BatchRows((request,), (0,), (batch.positions[row],), (tokens,), batch.phase)
    return PaddedRow(row, len(batch.request_ids), start + len(tokens), start, own)


def part_of(value: Any, rows: RowsOfRequest | _NoRows) -> Any:
    """Return `value` with the rows of the request alone; None stands for what has no such rows, a cache for example.

    The rows are a copy: a view has the whole batch in its storage.
    """

    def cut(path: str, tensor: Tensor) -> Tensor | None:
        own = rows.cut(tensor)
        return None if own is None else own.clone()

    return map_tensors(value, cut, lambda leaf: leaf if isinstance(leaf, bool | int | float | str) else None)


def with_part(value: Any, edited: Any, rows: RowsOfRequest) -> Any:
    """Return `value` with the rows of the request from `edited`, which has the structure that `part_of` gave."""
    if isinstance(value, Tensor):
        return _with_rows(value, edited, rows)
    parts = children(value)
    if parts is None:
        return value
    new = dict(children(edited) or ())
    if len(new) != len(parts):
        raise OptionError(f"A hook of a request returned {type_name(edited)} in place of {type_name(value)}.")
    return rebuilt(value, {key: with_part(child, new[key], rows) for key, child in parts})


def _with_rows(value: Tensor, edited: Any, rows: RowsOfRequest) -> Tensor:
    own = rows.cut(value)
    if own is None:
        return value
    if not isinstance(edited, Tensor) or edited.shape != own.shape:
        found = tuple(edited.shape) if isinstance(edited, Tensor) else type_name(edited)
        raise OptionError(f"A hook of a request returned {found} in place of rows of shape {tuple(own.shape)}.")
    changed = value.clone()
    place = rows.cut(changed)
    assert place is not None
    place.copy_(edited)
    return changed
