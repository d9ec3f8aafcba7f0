"""The names that error messages show."""

from __future__ import annotations

import pytest

from hookline.messages import nearest_names

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
    assert nearest_names(text, NAMES, n) == expected
    assert nearest_names(text, ()) == []


LAYERS = ("embedding", "layers", "layers.0", "layers.0.attention", "layers.0.mlp", "layers.0.mlp.0", "decoder")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*.mpl.*", ["layers.0.mlp", "layers.0.mlp.0"]),
        ("*.mpl", ["layers.0.mlp", "layers.0.mlp.0"]),
        ("layers.#.mpl", ["layers.0.mlp", "layers.0.mlp.0"]),
        (r"layers\..*\.mpl", ["layers.0.mlp", "layers.0.mlp.0"]),
        ("mpl", ["layers.0.mlp", "layers.0.mlp.0"]),
        ("*embeding*", ["embedding"]),
        ("*.atention", ["layers.0.attention"]),
        ("#.#", ["embedding", "layers", "layers.0", "layers.0.attention"]),
    ],
)
def test_what_stands_between_wildcards_is_held_against_the_parts_of_names(text, expected):
    """A pattern with a slip in one part brings the modules that have this part, the shortest name first."""
    assert nearest_names(text, LAYERS) == expected
