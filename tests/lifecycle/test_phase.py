"""What the run is doing, when several say so at once."""

from __future__ import annotations

import pytest

import hookline as hl
from hookline.phases import in_phase, phase


def test_one_may_be_entered_inside_itself():
    """As firings inside of firings do."""
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


def test_an_unknown_phase_is_refused_before_it_is_entered():
    """And nothing is left behind."""
    with pytest.raises(hl.errors.OptionError, match="'train', 'eval', 'intervention'; got 'test'"):
        in_phase("test")
    assert phase() == "train"
