"""The names that error messages show."""

from __future__ import annotations

import pytest

from hookline.sites.nearest import nearest

NAMES = ("actor_mlp", "actor_head", "critic", "embed", "norm")


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("actor_mpl", 1, ["actor_mlp"]),
        ("actor", 2, ["actor_mlp", "actor_head"]),
        ("xyz", 4, ["actor_mlp", "actor_head", "critic", "embed"]),
        ("", 1, ["actor_mlp", "actor_head", "critic", "embed"]),
    ],
)
def test_the_nearest_names_come_first_and_some_names_in_any_case(text, n, expected):
    """The best ones; where none is like it, the first four."""
    assert nearest(text, NAMES, n) == expected
    assert nearest(text, ()) == []
