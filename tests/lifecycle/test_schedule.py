"""Which steps are due."""

from __future__ import annotations

import pytest

import hookline as hl
from hookline.phases import in_phase, phase, validate_phases
from hookline.when import StepSchedule


def due(schedule: StepSchedule, stop: int = 31) -> list[int]:
    return [step for step in range(stop) if schedule.is_active(step)]


def test_without_options_every_step_is_due():
    """Continual is the default."""
    assert due(StepSchedule(), 5) == [0, 1, 2, 3, 4]


def test_a_stride_takes_every_nth_step_from_the_first():
    """Step 0 is one of them."""
    assert due(StepSchedule("stride", stride=10)) == [0, 10, 20, 30]


def test_a_burst_takes_several_in_a_row():
    """At the start of each stride."""
    assert due(StepSchedule("burst", stride=10, burst_length=3)) == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30]


@pytest.mark.parametrize(
    ("warmup", "first"), [(5, [10, 11, 12, 20, 21, 22, 30]), (11, [11, 12, 20, 21, 22, 30]), (0, [0, 1, 2, 10, 11])]
)
def test_warmup_is_a_floor_and_shifts_nothing(warmup: int, first: list[int]):
    """The phase stays anchored at step 0."""
    assert due(StepSchedule("burst", stride=10, burst_length=3, warmup=warmup))[: len(first)] == first


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


def test_a_run_trains_unless_somebody_says_otherwise():
    """Phases nest, and come back after an error."""
    assert phase() == "train"
    with in_phase("eval"):
        with in_phase("intervention"):
            assert phase() == "intervention"
        with pytest.raises(KeyError), in_phase("intervention"):
            raise KeyError
        assert phase() == "eval"
    assert phase() == "train"


def test_phases_are_checked():
    """An unknown one, or none, is an error that lists them."""
    assert validate_phases({"train", "eval"}) == {"train", "eval"}
    assert validate_phases("eval") == {"eval"}
    for wrong in ("trian", [], ["train", "test"]):
        with pytest.raises(hl.errors.OptionError, match="'train', 'eval', 'intervention'"):
            validate_phases(wrong)
