"""Which steps are due."""

from __future__ import annotations

import pytest

import hookline as hl
from hookline.phases import validate_phases
from hookline.when import StepSchedule


def due(schedule: StepSchedule, stop: int = 31) -> list[int]:
    return [step for step in range(stop) if schedule.is_active(step)]


@pytest.mark.parametrize(
    "options", [{"stride": 0}, {"burst_length": 0}, {"warmup": -1}, {"stride": 1.5}, {"stride": True}]
)
def test_numbers_that_make_no_schedule_are_errors(options: dict[str, object]):
    """Named, with the least that is allowed."""
    (name,) = options
    with pytest.raises(hl.errors.OptionError, match=f"{name}= must be a whole number of at least"):
        StepSchedule("burst", **options)  # type: ignore[arg-type]


def test_an_unknown_mode_is_an_error_that_names_the_modes():
    """And the one that was meant."""
    with pytest.raises(ValueError, match=r"Unknown schedule mode 'strid'.*'burst'; did you mean 'stride'\?"):
        StepSchedule("strid")


def test_every_may_be_a_number():
    """Of steps from one that is due to the next."""
    assert due(StepSchedule.of(7), 15) == [0, 7, 14]
    assert StepSchedule.of(1) == StepSchedule()
    schedule = StepSchedule("stride", stride=3)
    assert StepSchedule.of(schedule) is schedule


@pytest.mark.parametrize("every", [0, -1, 2.5, "10", True, None])
def test_every_that_is_no_schedule_is_an_error(every: object):
    """Whatever it is."""
    with pytest.raises(hl.errors.OptionError, match="every= is a number of steps"):
        StepSchedule.of(every)  # type: ignore[arg-type]


def test_phases_are_checked():
    """An unknown one, or none, is an error that lists them."""
    assert validate_phases({"train", "eval"}) == {"train", "eval"}
    assert validate_phases("eval") == {"eval"}
    for wrong in ("trian", [], ["train", "test"]):
        with pytest.raises(hl.errors.OptionError, match="'train', 'eval', 'intervention'"):
            validate_phases(wrong)
