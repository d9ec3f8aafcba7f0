"""Turn ``@pytest.mark.product(...)`` into test cases: every combination, of which those that make every pair are quick.

`conftest` calls `cases`. A product of five options has hundreds of cases and finds hardly more than its pairs do, so
``make test`` runs pairs, and ``pytest -m full`` the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

import pytest


def cases(axes: Mapping[str, Collection[Any]], strength: int) -> list[Any]:
    """Return the parameter sets of ``axes``, each axis a list of values or a dict from id to value.

    Unmarked are as many as have every value at least once (``strength=1``), or every pair of values (2).
    """
    named = [
        list(axis.items()) if isinstance(axis, Mapping) else [(None, value) for value in axis] for axis in axes.values()
    ]
    places = [range(len(axis)) for axis in named]
    rows = list(product(*places))
    quick = rows if len(places) <= strength else _covering(places, strength)
    return [
        _case([axis[place] for axis, place in zip(named, row, strict=True)], () if row in quick else pytest.mark.full)
        for row in rows
    ]


def _covering(places: list[range], strength: int) -> list[tuple[int, ...]]:
    """Return rows that cover every value (1) or every pair of values (2)."""
    if strength == 1:
        return [tuple(row % len(axis) for axis in places) for row in range(max(map(len, places)))]
    try:
        from allpairspy import AllPairs  # type: ignore[import-untyped,unused-ignore]
    except ImportError:  # a machine without it, where nothing can be installed, runs everything
        return list(product(*places))
    return [tuple(row) for row in AllPairs([list(axis) for axis in places])]


def _case(chosen: list[tuple[str | None, Any]], marks: Any) -> Any:
    """Return one parameter set, with an id where every value has one."""
    ids = [_id(name, value) for name, value in chosen]
    values = [value for _, value in chosen]
    return pytest.param(*values, id="-".join(ids) if all(ids) else None, marks=marks)


def _id(name: str | None, value: Any) -> str:
    """Return the id of one value: its name, or itself where it is a word or a number."""
    if name is not None:
        return name
    return (
        str(value) if isinstance(value, str | int | float | bool) or value is None else getattr(value, "__name__", "")
    )
