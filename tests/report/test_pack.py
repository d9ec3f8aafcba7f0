"""Numbers on their way into the page."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import numpy as np

from hookline.report.report_page import Packer, thin


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
