"""The ``product`` marker: pairs by default, everything on request."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from helpers_products import cases

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": {"yes": True, "no": False}, "d": [1, 2, 3, 4]}


def rows(strength: int, *, full: bool) -> list[tuple[object, ...]]:
    """Return the values of the cases of `AXES`."""
    return [tuple(case.values) for case in cases(AXES, strength, full=full)]


def test_every_pair_of_values_is_there_in_far_fewer_cases():
    """And with ``--full-products`` every combination."""
    values = [list(axis.values()) if isinstance(axis, dict) else axis for axis in AXES.values()]
    everything = rows(2, full=True)
    assert sorted(everything, key=repr) == sorted(product(*values), key=repr)
    pairs = rows(2, full=False)
    for first, second in combinations(range(4), 2):
        assert {(row[first], row[second]) for row in pairs} == set(product(values[first], values[second]))
    assert len(pairs) < len(everything) / 2
    assert all({row[place] for row in rows(1, full=False)} == set(values[place]) for place in range(4))


@pytest.mark.product(first=["a", "b"], second={"small": 1, "large": 10**6})
def test_the_marker_gives_each_axis_as_an_argument(first, second, request):
    """With an id that says which case it is."""
    assert request.node.name.endswith(f"[{first}-{'small' if second == 1 else 'large'}]")
