"""What is read out of records, and its numbers on their way into the page."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import numpy as np
import pytest

from hookline.records.sink import Record, StepSeries
from hookline.report.metric_series import MISSING, Collector, LayerPlace, RunSeries, layer_places
from hookline.report.report_page import Packer, thin


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


def _unpacked(packed: bytes) -> tuple[dict[str, Any], list[int], list[float]]:
    """What the page reads, read in Python."""
    block = gzip.decompress(packed)
    length = int.from_bytes(block[:4], "little")
    header = json.loads(block[4 : 4 + length])
    ints, floats = header["counts"]["ints"], header["counts"]["floats"]
    start = 4 + length
    assert start % 4 == 0
    steps = np.frombuffer(block, "<i4", ints, start)
    planes = np.frombuffer(block, np.uint8, 4 * floats, start + 4 * ints)
    return header, steps.tolist(), planes.reshape(4, -1).T.copy().view("<f4").reshape(-1).tolist()


def test_numbers_come_back_in_single_precision() -> None:
    """NaN and infinities too; what is too large for it stays finite."""
    packer = Packer()
    assert packer.values(np.array([0.1, math.nan, math.inf, -math.inf, 1e300, 0.0])) == 0
    assert packer.values(np.array([5.0])) == 6
    _, _, values = _unpacked(packer.compress({}))
    assert values[0] == np.float32(0.1)
    assert math.isnan(values[1])
    assert values[2:4] == [math.inf, -math.inf]
    assert values[4:] == [float(np.finfo(np.float32).max), 0.0, 5.0]


def test_short_numbers_are_right_to_one_in_65000_and_stay_what_they_are() -> None:
    """Nothing finite becomes infinite, no NaN a number."""
    numbers = np.concatenate([10.0 ** np.linspace(-30, 30, 400), [3.4028235e38, math.nan, math.inf, -math.inf, 0.0]])
    packer = Packer()
    packer.values(numbers, short=True)
    _, _, values = _unpacked(packer.compress({}))
    assert np.allclose(values[:400], numbers[:400], rtol=2**-16, atol=0)
    assert math.isfinite(values[400])
    assert math.isnan(values[401])
    assert values[402:] == [math.inf, -math.inf, 0.0]


def test_steps_are_kept_once_and_even_ones_as_a_rule() -> None:
    """Many layers share one list of steps."""
    packer = Packer()
    even, uneven = np.arange(3, 30, 3), np.array([0, 1, 5, 70_000_000])
    assert [packer.steps(even), packer.steps(uneven), packer.steps(even.copy()), packer.steps(even[:1])] == [0, 1, 0, 2]
    header, steps, _ = _unpacked(packer.compress({"a": 1}))
    assert header["a"] == 1
    assert header["steps"] == [
        {"first": 3, "every": 3, "count": 9},
        {"at": 0, "count": 4},
        {"first": 3, "every": 1, "count": 1},
    ]
    assert steps == uneven.tolist()


def test_thinning_keeps_every_peak_and_whatever_is_not_finite() -> None:
    """At most the columns that were asked for, in order, of each row its own."""
    values = np.tile(np.sin(np.arange(10_007) / 50), (3, 1))
    values[0, 1234] = 9.0
    values[1, 5678] = -9.0
    values[2, 9999] = math.nan
    steps, kept = thin(np.arange(10_007), values, 500)
    assert steps.size <= 502
    assert kept.shape == (3, steps.size)
    assert np.all(np.diff(steps) > 0)
    assert kept[0].max() == 9.0
    assert kept[1].min() == -9.0
    assert np.isnan(kept[2]).sum() == 1
    same_steps, same = thin(np.arange(5), values[:, :5], 5)
    assert same_steps.size == 5
    assert same is not None
