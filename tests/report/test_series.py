"""What is read out of records."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hookline.records.sink import Record, StepSeries
from hookline.report.metric_series import MISSING, Collector, LayerPlace, RunSeries, layer_places


def _collected(*records: Record) -> RunSeries:
    found = Collector()
    for record in records:
        found.take(record)
    return found.series()


def _record(
    metrics: dict[str, Any], step: int | None, point: str = "POST_EPOCH", epoch: int | None = 0, **more: Any
) -> Record:
    return Record(metrics, epoch, point, step, **more)


def test_numbers_become_curves_over_the_steps_they_belong_to() -> None:
    """Of single steps by their own, of other moments by the record's; before the first step is -1."""
    series = _collected(
        _record({"a/x": 1}, None, "PRE_EPOCH"),
        _record({"b/y": StepSeries([0.5, 0.25], [3, 7])}, 7, "POST_STEP"),
        _record({"a/x": True}, 9, "PRE_EPOCH"),
    )
    x, y = series.curves
    assert (x.name, x.steps.tolist(), x.values.tolist()) == ("a/x", [-1, 9], [1.0, 1.0])
    assert (y.name, y.steps.tolist(), y.values.tolist()) == ("b/y", [3, 7], [0.5, 0.25])


def test_what_is_not_finite_stays_and_what_is_missing_does_not() -> None:
    """NaN is a value; None is none."""
    series = _collected(_record({"a/x": math.nan, "a/y": None}, 0), _record({"a/x": 10**400}, 1))
    (curve,) = series.curves
    assert math.isnan(curve.values[0])
    assert curve.values[1] == math.inf


def test_one_name_at_two_moments_or_ranks_is_two_curves() -> None:
    """The name says which, where it has to."""
    series = _collected(
        _record({"h/m": 1.0, "h/only": 1.0}, 0, "PRE_EPOCH"),
        _record({"h/m": 2.0}, 0, "POST_EPOCH"),
        _record({"h/m": 3.0}, 0, "POST_EPOCH", rank=1),
    )
    assert [curve.name for curve in series.curves] == [
        "h/m @ PRE_EPOCH (rank 0)", "h/only", "h/m @ POST_EPOCH (rank 0)", "h/m @ POST_EPOCH (rank 1)",
    ]  # fmt: skip


def test_a_step_that_was_told_twice_counts_as_it_was_told_last() -> None:
    """So that a curve never runs back on itself."""
    series = _collected(*(_record({"a/x": float(n)}, step) for n, step in enumerate([0, 1, 2, 1, 2, 3])))
    (curve,) = series.curves
    assert curve.steps.tolist() == [0, 1, 2, 3]
    assert curve.values.tolist() == [0.0, 3.0, 4.0, 5.0]


def test_lists_and_counts_become_grids_and_other_dictionaries_curves() -> None:
    """Bins in their order, zeros first; shorter lists leave gaps; names of parts are joined."""
    counts = [{"zero": 4, "-3": 2, "10": 1}, {"-3": 5, "nonfinite": 1}]
    series = _collected(
        _record({"h/hist": counts[0], "h/list": [1, 2, 3], "h/parts": {"p": 1.0, "q": {"r": 2.0}}}, 0),
        _record({"h/hist": counts[1], "h/list": [4, math.nan], "h/word": "ok"}, 1),
    )
    hist, plain = series.grids
    assert hist.counts
    assert hist.bins == ["zero", "-3", "10", "nonfinite"]
    assert hist.values.tolist() == [[4, 0], [2, 5], [1, 0], [0, 1]]
    assert not plain.counts
    assert plain.values[0].tolist() == [1, 4]
    assert math.isnan(plain.values[1, 1])
    assert plain.values[2, 1] == MISSING
    assert {curve.name for curve in series.curves} == {"h/parts/p", "h/parts/q/r"}
    assert series.words == {"h/word": "ok"}


@pytest.mark.parametrize("by_steps", [False, True])
def test_the_clock_knows_epochs_and_seconds_unless_the_run_counted_steps(by_steps: bool) -> None:
    """In the step loop a record has no epoch."""

    records = [_record({"a": 1.0}, 10 * n + 9, epoch=None if by_steps else n, time=100.0 + 5 * n) for n in range(3)]
    clock = _collected(*records).clock
    assert clock.steps == [-1, 9, 19, 29]
    assert clock.seconds == [0.0, 0.0, 5.0, 10.0]
    assert clock.epochs == (None if by_steps else [0.0, 1.0, 2.0, 3.0])


# -- which metrics stand side by side on a map ----------------------------------------------------------------


def test_the_statistics_of_a_watch_are_placed_by_layer_and_kind() -> None:
    """Whatever the layers are called; a summary of the whole model has no layer."""
    found = layer_places(
        ["stats/encoder/forward/mean", "stats/a/b.0/param_grad/norm", "stats/forward/mean", "train/loss"]
    )
    assert found == {
        "stats/encoder/forward/mean": LayerPlace("stats/forward", "mean", "encoder"),
        "stats/a/b.0/param_grad/norm": LayerPlace("stats/param_grad", "norm", "a/b.0"),
    }


def test_other_hooks_are_placed_by_the_part_that_looks_like_a_layer() -> None:
    """At the end or in the middle; of layers and their units, the units are the rows."""
    names = [f"norms/grad/layers.{i}.weight" for i in range(4)]
    names += [f"gradient_flow/fc{i}/norm" for i in range(3)]
    names += [f"activations/relu/fc{i}/{unit}" for i in range(2) for unit in range(8)]
    found = layer_places(names)
    assert found["norms/grad/layers.2.weight"] == LayerPlace("norms", "grad", "layers.2.weight")
    assert found["gradient_flow/fc1/norm"] == LayerPlace("gradient_flow", "norm", "fc1")
    assert found["activations/relu/fc1/5"] == LayerPlace("activations/relu", "fc1", "5")
