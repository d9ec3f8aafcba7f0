"""``--hook-config``: text by the hook's signature."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from hookline.errors import ConfigError
from hookline.runs.flags import from_text


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("500", int, 500),
        ("1e-3", float, 0.001),
        ("inf", float, math.inf),
        ("true", bool, True),
        ("OFF", bool, False),
        ("true", str, "true"),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("7", int | str, 7),
        ("2,5,10", list[int], [2, 5, 10]),
        ("", list[int], []),
        ("2,5", tuple[int, ...], (2, 5)),
        ("a,b", list[str] | None, ["a", "b"]),
        ("slow", Literal["fast", "slow"], "slow"),
        ("3", Any, 3),
        ("true", Any, True),
    ],
)
def test_a_text_becomes_what_is_declared(text, hint, value):
    """To the type."""
    found = from_text(text, hint)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "said"),
    [
        ("1.5", int, "valid integer"),
        ("x", float, "valid number"),
        ("maybe", bool, "valid boolean"),
        ("quick", Literal["fast", "slow"], "'fast' or 'slow'"),
        ("1,2,3", tuple[int, int], "expected"),
    ],
)
def test_a_misfit_says_what_was_expected(text, hint, said):
    """In words."""
    with pytest.raises(ConfigError, match=said):
        from_text(text, hint)
