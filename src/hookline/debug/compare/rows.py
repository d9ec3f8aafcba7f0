"""Say whose the rows of tensors are, and pair rows that lie in other places in two runs.

Traces store a `RowTable` for each forward; users give one to ``compare(rows=)`` by `padded_rows` or `packed_rows`.
`rules` calls `by_rows`, which puts values in place of others that have the same rows in both runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hookline.debug.compare.key import RowKey, RowKeys, Value, ValueKey, Values
from hookline.errors import OptionError

_COLUMNS: Final = "it has a column for each token, and those are padded in another way"


@dataclass(frozen=True, slots=True)
class RowTable:
    """Whose tokens are in one forward; the values of that forward share it.

    ``layout`` is ``"padded"``: tensors are (batch, sequence, …), real tokens of row b begin at column ``starts[b]``;
    ``"packed"``: tensors are (tokens, …), one request after the other; ``"samples"``: tensors are (batch, …), and
    nothing is known of tokens.
    """

    layout: str
    requests: tuple[str, ...]
    starts: tuple[int, ...] = ()
    """Of ``"padded"``: the first real column of each row."""
    lengths: tuple[int, ...] = ()
    """How many tokens each request has in this forward."""
    positions: tuple[int, ...] = ()
    """The position of the first of them in its sequence, from 0."""
    width: int = 0
    """Of ``"padded"``: how many columns there are; 0 if the longest row has none to spare."""

    def keys_for(self, shape: tuple[int, ...]) -> RowKeys | None:
        """Return the keys of the rows of a tensor of that shape; None if it has no row for each request or token."""
        batch = len(self.requests)
        if not shape or not batch:
            return None
        if self.layout == "packed":
            return self._packed_keys(shape, sum(self.lengths))
        if self.layout == "padded":
            ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
            width = max(self.width, *ends)
            return self._padded_keys(shape, batch, width)
        return self._by_request(shape)

    def _packed_keys(self, shape: tuple[int, ...], tokens: int) -> RowKeys | None:
        if shape[0] == tokens:
            return RowKeys(1, self._packed())
        if shape[:2] == (1, tokens):  # a batch of one, as transformers has it
            return RowKeys(2, self._packed())
        return self._by_request(shape)

    def _padded_keys(self, shape: tuple[int, ...], batch: int, width: int) -> RowKeys | None:
        if shape[:2] == (batch, width):
            return RowKeys(2, self._padded(width))
        if len(shape) == 2 and shape[0] == batch * width:
            return RowKeys(1, self._padded(width))
        is_alike = all(len(set(each)) == 1 for each in (self.starts, self.lengths, self.positions))
        if shape[:2] == (1, width) and is_alike:  # one row for all requests, as rotary embeddings and positions have
            return RowKeys(2, self._padded(width)[:width])
        found = self._by_request(shape)
        if found is not None and width > 1 and width in shape[1:]:
            return RowKeys(1, found.keys, tuple(zip(self.starts, self.lengths, strict=True)))
        return found

    def _by_request(self, shape: tuple[int, ...]) -> RowKeys | None:
        if shape[0] != len(self.requests):
            return None
        return RowKeys(1, tuple(RowKey(request, None) for request in self.requests))

    def _packed(self) -> tuple[RowKey | None, ...]:
        return tuple(
            RowKey(request, first + place)
            for request, first, length in zip(self.requests, self.positions, self.lengths, strict=True)
            for place in range(length)
        )

    def _padded(self, width: int) -> tuple[RowKey | None, ...]:
        found: list[RowKey | None] = []
        for request, start, first, length in zip(self.requests, self.starts, self.positions, self.lengths, strict=True):
            real = [RowKey(request, first + place) for place in range(length)]
            found += [None] * start + real + [None] * (width - start - length)
        return tuple(found)


# -- what users say of rows ----------------------------------------------------------------------------------------


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
    names, firsts = _names(requests, len(lengths)), (0,) * len(lengths)
    return RowTable("padded", names, tuple(starts), tuple(lengths), firsts, mask.shape[1])


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


def as_row_keys(rows: RowTable, shape: tuple[int, ...]) -> RowKeys | None:
    """Return the keys of the rows of a tensor of that shape; None if it has no such rows.

    What all requests share, as rotary embeddings are, has a batch of one, and is of no request.
    """
    is_shared = rows.layout == "padded" and len(rows.requests) > 1 and shape[:1] == (1,)
    return None if is_shared else rows.keys_for(shape)


# -- rows that lie in other places ---------------------------------------------------------------------------------


def by_rows(a: Values, b: Values) -> tuple[Values, Values, dict[ValueKey, str]]:
    """Return both runs with the same rows in the same places, and what was moved: why it cannot be, if it cannot.

    Where rows of a site are unique in a run, those of all its calls become one value with the rows that both runs have.
    Where they are not, as in training, that is done call by call.
    """
    new_a, new_b = dict(a), dict(b)
    moved: dict[ValueKey, str] = {}
    slots_a, slots_b = _by_slot(a), _by_slot(b)
    for slot, keys_a in slots_a.items():
        keys_b = slots_b.get(slot, [])
        of_a, of_b = [a[key] for key in keys_a], [b[key] for key in keys_b]
        if not keys_b or _is_laid_alike(dict(zip(keys_a, of_a, strict=True)), dict(zip(keys_b, of_b, strict=True))):
            continue
        has_columns = _has_other_columns(of_a, of_b)
        if not has_columns and not (_has_unique_rows(of_a) and _has_unique_rows(of_b)):
            for key in keys_a:
                if key in b and (pair := _with_same_rows([a[key]], [b[key]])) is not None:
                    new_a[key], new_b[key], moved[key] = *pair, ""
            continue
        pair = None if has_columns else _with_same_rows(of_a, of_b)
        moved[keys_a[0]] = "" if pair else _COLUMNS if has_columns else _why_no_rows(of_a, of_b)
        for keys, new in ((keys_a, new_a), (keys_b, new_b)):
            for key in keys:
                del new[key]
        new_a[keys_a[0]], new_b[keys_a[0]] = pair or (of_a[0], of_b[0])
    return new_a, new_b, moved


def _by_slot(values: Values) -> dict[ValueKey, list[ValueKey]]:
    """Return the keys of values that say whose their rows are, by site, kind and leaf."""
    found = defaultdict(list)
    for key, value in values.items():
        if value.rows is not None:
            found[key.slot].append(key)
    return found


def _is_laid_alike(a: Values, b: Values) -> bool:
    """Return whether all values have the same rows in the same places, so that they can be laid over each other."""
    return a.keys() == b.keys() and all(_has_same_rows(a[key], b[key]) for key in a)


def _has_same_rows(a: Value, b: Value) -> bool:
    return a.rows == b.rows and a.shape == b.shape and None not in _keys_of(a)


def _keys_of(value: Value) -> tuple[RowKey | None, ...]:
    return () if value.rows is None else value.rows.keys


def _has_unique_rows(values: Sequence[Value]) -> bool:
    keys = [key for value in values for key in _keys_of(value) if key is not None]
    return len(keys) == len(set(keys))


def _has_other_columns(a: Sequence[Value], b: Sequence[Value]) -> bool:
    """Return whether rows have a column for each token, and these lie in other places in ``a`` than in ``b``."""
    of_a, of_b = ({value.rows.columns for value in values if value.rows is not None} for values in (a, b))
    return of_a != of_b and any(map(any, (of_a, of_b)))


def _with_same_rows(a: Sequence[Value], b: Sequence[Value]) -> tuple[Value, Value] | None:
    """Return a value of each side with the rows that both have, in the order of ``a``; None if there are none."""
    if len({_row_shape(value) for value in (*a, *b)}) != 1:
        return None
    places_a, places_b = _places(a), _places(b)
    keys = [key for key in places_a if key in places_b]
    if not keys:
        return None
    left = [
        f"{len(places) - len(keys)} only in {side}"
        for side, places in (("A", places_a), ("B", places_b))
        if len(places) > len(keys)
    ]
    rest = f" ({', '.join(left)})" if left else ""
    note = f"{len(keys)} rows by request and position{rest}"
    return _gathered(a, places_a, keys, note), _gathered(b, places_b, keys, note)


def _why_no_rows(a: Sequence[Value], b: Sequence[Value]) -> str:
    """Return why both sides have no row in common, with the first of each."""
    if len({_row_shape(value) for value in (*a, *b)}) != 1:
        return f"their shapes differ: {a[0].shape} in A, {b[0].shape} in B"
    first, second = (next((key.label for key in _places(side)), "none") for side in (a, b))
    return (
        f"A and B have no row in common: A has {first}, …, B has {second}, …. Trace the same tokens, and give both the "
        "same names: set_rows([name, …]) of a trace; X-Request-Id, or the id of the request on a served model"
    )


def _row_shape(value: Value) -> tuple[int, ...]:
    return value.shape[0 if value.rows is None else value.rows.dims :]


def _places(values: Sequence[Value]) -> dict[RowKey, int]:
    """Return where the row of each key is in all values, one after the other; padding counts."""
    keys = [key for value in values for key in _keys_of(value)]
    return {key: place for place, key in enumerate(keys) if key is not None}


def _gathered(values: Sequence[Value], places: dict[RowKey, int], keys: Sequence[RowKey], note: str) -> Value:
    """Return one value with the row of each key."""
    first = min(values, key=lambda value: value.order)

    def read() -> Tensor:
        parts = [value.tensor().reshape(len(_keys_of(value)), *_row_shape(value)) for value in values]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.index_select(0, torch.tensor([places[key] for key in keys], device=whole.device))

    return replace(
        first,
        shape=(len(keys), *_row_shape(first)),
        read=read if all(value.read is not None for value in values) else None,
        fingerprint=None,
        rows=RowKeys(1, tuple(keys)),
        note="; ".join(filter(None, (first.note, note))),
    )
