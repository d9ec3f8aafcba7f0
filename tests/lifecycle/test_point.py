"""The moments of a run: their names, and how one is meant."""

from __future__ import annotations

import pytest

from hookline.errors import OptionError
from hookline.when import HookPoint, validate_points


def test_there_are_five_points_and_their_values_are_their_names():
    """Sinks write the value; nobody has to remember another spelling."""
    assert [point.name for point in HookPoint] == ["PRE_EPOCH", "PRE_STEP", "POST_STEP", "POST_EPOCH", "SNAPSHOT"]
    assert all(point.value == point.name for point in HookPoint)


@pytest.mark.parametrize(("given", "point"), [("POST_EPOCH", HookPoint.POST_EPOCH), ("snapshot", HookPoint.SNAPSHOT)])
def test_a_point_may_be_given_by_name(given, point):
    """In either case, as configuration files have it."""
    assert HookPoint.of(given) is point
    assert validate_points(given) == {point}
    assert validate_points([given, HookPoint.PRE_STEP]) == {point, HookPoint.PRE_STEP}


@pytest.mark.parametrize(
    ("given", "words"), [("POST_EPOC", "Did you mean 'POST_EPOCH'"), ("noon", "There are PRE_EPOCH, "), (7, "point 7")]
)
def test_an_unknown_point_is_named_with_those_there_are(given, words):
    """Asked, found, next."""
    with pytest.raises(OptionError, match=words):
        HookPoint.of(given)
