"""When something happens in a run: its points, which steps are due, and its phases."""

from __future__ import annotations

import pytest

from hookline.errors import OptionError
from hookline.phases import in_phase, phase, validate_phases
from hookline.when import HookPoint, StepSchedule, validate_points


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


def test_every_may_be_a_number():
    """Of steps from one that is due to the next."""
    assert [step for step in range(15) if StepSchedule.of(7).is_active(step)] == [0, 7, 14]
    assert StepSchedule.of(1) == StepSchedule()
    schedule = StepSchedule("stride", stride=3)
    assert StepSchedule.of(schedule) is schedule


def test_phases_may_be_one_or_several():
    assert validate_phases({"train", "eval"}) == {"train", "eval"}
    assert validate_phases("eval") == {"eval"}


def test_one_may_be_entered_inside_itself():
    same = in_phase("intervention")
    with in_phase("eval"):
        with same:
            with same:
                assert phase() == "intervention"
            assert phase() == "intervention"
        assert phase() == "eval"
    assert phase() == "train"


def test_whoever_leaves_first_takes_only_its_own_away():
    """Two threads need not leave in the order they entered."""
    first, second = in_phase("eval"), in_phase("intervention")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert phase() == "intervention"
    second.__exit__(None, None, None)
    assert phase() == "train"


PHASES = "'train', 'eval', 'intervention'"


@pytest.mark.parametrize(
    ("ask", "given", "words"),
    [
        (HookPoint.of, "POST_EPOC", "Did you mean 'POST_EPOCH'"),
        (HookPoint.of, "noon", "There are PRE_EPOCH, "),
        (HookPoint.of, 7, "point 7"),
        (StepSchedule, "strid", r"Unknown schedule mode 'strid'.*'burst'; did you mean 'stride'\?"),
        *((StepSchedule.of, every, "every= is a number of steps") for every in (0, -1, 2.5, "10", True, None)),
        *((validate_phases, wrong, PHASES) for wrong in ("trian", [], ["train", "test"])),
        (in_phase, "test", f"{PHASES}; got 'test'"),
    ],
)
def test_what_is_none_is_refused_with_those_there_are(ask, given, words):
    """Asked, found, next; and no phase has been entered."""
    with pytest.raises(OptionError, match=words):
        ask(given)
    assert phase() == "train"


@pytest.mark.parametrize("number", [{"stride": 0}, {"burst_length": 0}, {"warmup": -1}, {"stride": 1.5}])
def test_numbers_that_make_no_schedule_are_errors(number):
    """Named, with the least that is allowed; True is no number."""
    (name,) = number
    for wrong in (number, {name: True}):
        with pytest.raises(OptionError, match=f"{name}= must be a whole number of at least"):
            StepSchedule("burst", **wrong)
