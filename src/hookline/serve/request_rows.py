"""Take the rows of one request out of what a module takes and returns, and put edited rows back.

`request_hooks` calls it at each firing. Only tensors with a row for each token are shown, cut to the rows of the
request; a hook of a request never gets a number of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.observe.tokens import Tokens
from hookline.tree import children, map_tensors, rebuilt

__all__ = ["NO_ROWS", "RowsOfRequest", "part_of", "rows_of_request", "with_part"]


@dataclass(frozen=True, slots=True)
class RowsOfRequest:
    """The rows of one request in the running forward."""

    batch: Tokens
    row: int
    own: Tokens
    """The table of these rows alone."""

    def cut(self, tensor: Tensor) -> Tensor | None:
        """Return the rows as a view of `tensor`; None if it has no row for each token."""
        batch, shape = self.batch, tuple(tensor.shape)
        begin, length = batch.begins[self.row], batch.lengths[self.row]
        if batch.width is not None and shape[:2] == (len(batch.requests), batch.width) and len(shape) in (2, 3):
            return tensor[self.row : self.row + 1, batch.width - length :]
        has_rows = shape[:1] in ((batch.count,), (batch.room,)) and (batch.width is None or len(shape) == 2)
        return tensor[begin : begin + length] if has_rows else None


class _NoRows:
    """Stands for the rows of a request in what is not in the order of the batch."""

    def cut(self, tensor: Tensor) -> None:
        """Return None: there are none."""


NO_ROWS: Final = _NoRows()


def rows_of_request(batch: Tokens | None, key: str) -> RowsOfRequest | None:
    """Return the rows of the request with that key in the batch of a forward; None if it has none."""
    keys = () if batch is None else batch.keys or batch.requests
    if batch is None or key not in keys:
        return None
    row = keys.index(key)
    return RowsOfRequest(batch, row, batch.of_request(row))


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
