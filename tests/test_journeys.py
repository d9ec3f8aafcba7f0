"""No datum passes more files of hookline than `journeys.BOUNDS` allows."""

from __future__ import annotations

import pytest
from journeys import BOUNDS, JOURNEYS, Passed, count_all


def test_every_journey_has_a_bound() -> None:
    """Require one bound for each journey."""
    assert BOUNDS.keys() == JOURNEYS.keys()


@pytest.mark.slow
def test_journeys_keep_their_bounds() -> None:
    """Count all journeys in one process; name every one that is over its bound, with its files."""
    over = [excess for name, passed in count_all().items() for excess in excesses(name, passed)]
    assert not over, "\n".join(over)


def excesses(name: str, passed: Passed) -> list[str]:
    """Return a sentence for each number by which the journey `name` is over its bound."""
    bound = BOUNDS[name]
    found = []
    if len(passed.files) > bound.files:
        found.append(f"{name}: {len(passed.files)} files, at most {bound.files}: {', '.join(passed.files)}")
    if passed.changes > bound.changes:
        found.append(f"{name}: {passed.changes} changes of file, at most {bound.changes}")
    return found
