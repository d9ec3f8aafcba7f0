"""Turn ``@pytest.mark.product(...)`` into test cases: every pair of values by default, every combination on request.

`conftest` calls `cases`. A product of five options has hundreds of cases and finds hardly more than its pairs do, so
``make test`` runs pairs, and ``make test ARGS=--full-products`` all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

import pytest


def cases(axes: Mapping[str, Collection[Any]], strength: int, *, full: bool) -> list[Any]:
    """Return the parameter sets of ``axes``, each axis a list of values or a dict from id to value.

    ``strength=1`` has every value at least once, 2 every pair of values; ``full`` every combination.
    """
    named = [
        list(axis.items()) if isinstance(axis, Mapping) else [(None, value) for value in axis] for axis in axes.values()
    ]
    places = [range(len(axis)) for axis in named]
    rows = list(product(*places)) if full or len(places) <= strength else _covering(places, strength)
    return [_case([axis[place] for axis, place in zip(named, row, strict=True)]) for row in rows]


def _covering(places: list[range], strength: int) -> list[tuple[int, ...]]:
    """Return rows that cover every value (1) or every pair of values (2)."""
    if strength == 1:
        return [tuple(row % len(axis) for axis in places) for row in range(max(map(len, places)))]
    try:
        from allpairspy import AllPairs  # type: ignore[import-untyped,unused-ignore]
    except ImportError:  # a machine without it, where nothing can be installed, runs everything
        return list(product(*places))
    return [tuple(row) for row in AllPairs([list(axis) for axis in places])]


def _case(chosen: list[tuple[str | None, Any]]) -> Any:
    """Return one parameter set, with an id where every value has one."""
    ids = [_id(name, value) for name, value in chosen]
    values = [value for _, value in chosen]
    return pytest.param(*values, id="-".join(ids)) if all(ids) else pytest.param(*values)


def _id(name: str | None, value: Any) -> str:
    """Return the id of one value: its name, or itself where it is a word or a number."""
    if name is not None:
        return name
    return (
        str(value) if isinstance(value, str | int | float | bool) or value is None else getattr(value, "__name__", "")
    )
