"""Pair the rows of two runs that lie in other places: another padding, packing, order or number of steps.

`align_runs` calls `match_rows` with all values of one site; the result is read as two tensors with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hookline.debug.compare.run_values import RunValue
from hookline.debug.trace.trace_record import RowKey

__all__ = ["RowMatch", "has_other_columns", "has_same_rows", "has_unique_rows", "match_rows", "why_no_rows"]

_MAX_NAMES: Final = 3
"""Requests of each run that a message names."""


@dataclass(slots=True)
class RowMatch:
    """Rows that two runs have in common."""

    a: RunValue
    b: RunValue
    keys: list[RowKey]
    """Whose the rows of both are."""
    left_a: int
    """Rows that only ``a`` has; padding does not count."""
    left_b: int


@dataclass(slots=True)
class _Place:
    value: int
    row: int


def has_unique_rows(values: Sequence[RunValue]) -> bool:
    """Return whether every value says whose its rows are, and none is there twice."""
    if not all(value.rows is not None for value in values):
        return False
    keys = [key for value in values if value.rows is not None for key in value.rows.keys if key is not None]
    return len(keys) == len(set(keys))


def has_same_rows(a: RunValue, b: RunValue) -> bool:
    """Return whether two values have the same rows in the same places, so that they can be laid over each other."""
    return a.rows == b.rows and a.shape == b.shape and (a.rows is None or None not in a.rows.keys)


def has_other_columns(a: Sequence[RunValue], b: Sequence[RunValue]) -> bool:
    """Return whether rows have a column for each token, and these lie in other places in ``a`` than in ``b``."""
    of_a, of_b = ({value.rows.columns for value in values if value.rows is not None} for values in (a, b))
    return of_a != of_b and any(map(any, (of_a, of_b)))


def match_rows(values_a: Sequence[RunValue], values_b: Sequence[RunValue]) -> RowMatch | None:
    """Return the rows that both sides have, in the order of ``a``; None if there are none, or rows of other shapes."""
    if len({_row_shape(value) for value in (*values_a, *values_b)}) != 1:
        return None
    places_a, places_b = _places(values_a), _places(values_b)
    keys = [key for key in places_a if key in places_b]
    if not keys:
        return None
    return RowMatch(
        _gathered(values_a, [places_a[key] for key in keys]),
        _gathered(values_b, [places_b[key] for key in keys]),
        keys,
        len(places_a) - len(keys),
        len(places_b) - len(keys),
    )


def why_no_rows(values_a: Sequence[RunValue], values_b: Sequence[RunValue]) -> str:
    """Return why `match_rows` finds no row that both sides have, with the names of their requests."""
    if len({_row_shape(value) for value in (*values_a, *values_b)}) != 1:
        return f"their shapes differ: {values_a[0].shape} in A, {values_b[0].shape} in B"
    places = _places(values_a), _places(values_b)
    requests = [list(dict.fromkeys(key.request for key in keys)) for keys in places]
    both = [name for name in requests[0] if name in requests[1]]
    if both:
        where = [_positions(keys, both[0]) for keys in places]
        return (
            f"request {both[0]!r} is in both runs, and no position of it is: A has {where[0]}, B has {where[1]}. "
            "Trace the same tokens"
        )
    return (
        f"A and B have no request in common: A has {_some(requests[0])}, B has {_some(requests[1])}. Give both the "
        "same names: set_rows([name, …]) of a trace; X-Request-Id, or the id of the request on a served model"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_MAX_NAMES]))
    return f"{shown}, … ({len(names)} in all)" if len(names) > _MAX_NAMES else shown or "none"


def _positions(keys: Iterable[RowKey], request: str) -> str:
    found = sorted(-1 if key.position is None else key.position for key in keys if key.request == request)
    return "the request as a whole" if found[0] < 0 else f"{found[0]} to {found[-1]}"


def _row_shape(value: RunValue) -> tuple[int, ...]:
    assert value.rows is not None
    return value.shape[value.rows.dims :]


def _places(values: Sequence[RunValue]) -> dict[RowKey, _Place]:
    return {
        key: _Place(number, row)
        for number, value in enumerate(values)
        if value.rows is not None
        for row, key in enumerate(value.rows.keys)
        if key is not None
    }


def _gathered(values: Sequence[RunValue], places: Sequence[_Place]) -> RunValue:
    """Return one value with a row for each place."""
    first = min(values, key=lambda value: value.order)
    can_read = all(value.read is not None for value in values)
    return replace(
        first,
        shape=(len(places), *_row_shape(first)),
        read=(lambda: _read_rows(values, places)) if can_read else None,
        fingerprint=None,
        rows=None,
    )


def _read_rows(values: Sequence[RunValue], places: Sequence[_Place]) -> Tensor:
    used = sorted({place.value for place in places})
    begins, parts, total = {}, [], 0
    for number in used:
        value = values[number]
        assert value.read is not None
        assert value.rows is not None
        tensor = value.read()
        parts.append(tensor.reshape(len(value.rows.keys), *tensor.shape[value.rows.dims :]))
        begins[number] = total
        total += len(value.rows.keys)
    index = torch.tensor([begins[place.value] + place.row for place in places])
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.index_select(0, index.to(whole.device))
