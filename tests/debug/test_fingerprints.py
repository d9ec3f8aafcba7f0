"""The arithmetic of fingerprints: on the CPU and by operators for other devices it is the same."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hookline.debug.compare.fingerprint import DeviceFingerprints, fingerprint_on_cpu
from hookline.observe.watch.engine import WatchedPlace

VALUES = {
    "float32": torch.randn(3, 5),
    "two blocks": torch.randn(600, 700),
    "bfloat16": torch.randn(7).bfloat16(),
    "float64": torch.randn(33, 33, dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(210).reshape(70, 3),
    "complex": torch.randn(5, 6, dtype=torch.complex64),
    "transposed": torch.randn(40, 50).t(),
    "repeated": torch.tensor([1.5]).expand(2000),
    "not finite": torch.tensor([1.0, math.nan, -math.inf, 2.0]),
    "small": torch.full((100,), 1e-25),
    "large": torch.full((100,), 1e30),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_both_ways_and_torch_agree(name):
    """Mean, norm and absmax are torch's in float64; hash and sketch do not depend on the way."""
    value = VALUES[name]
    found = fingerprint_on_cpu(value)
    device = DeviceFingerprints(torch.device("cpu"))
    device.add(None, value)
    rows, (mark,) = device.read()
    row = rows[0]
    true = torch.view_as_real(value).double() if value.is_complex() else value.double()
    finite = torch.nan_to_num(true, 0.0, 0.0, 0.0)
    norm = finite.norm().item()
    mean, own_norm, absmax, nan, inf = found.numbers
    assert own_norm == pytest.approx(norm, rel=1e-5)
    assert mean == pytest.approx(finite.mean().item() if finite.numel() else 0.0, abs=1e-5 * norm + 1e-30)
    assert absmax == (finite.abs().max().item() if finite.numel() else 0.0)
    assert (nan, inf) == (int(true.isnan().sum()), int(true.isinf().sum()))
    np.testing.assert_allclose(row, [*found.numbers, *found.sketch], rtol=1e-5, atol=1e-5 * norm)
    assert int(mark) == found.hash
    if not value.is_contiguous():
        assert fingerprint_on_cpu(value.contiguous()).hash == found.hash


def test_rows_are_read_again_until_they_are_forgotten():
    """A flush that Ctrl-C ends writes them the next time."""
    device = DeviceFingerprints(torch.device("cpu"))
    device.add(None, torch.randn(5))
    first, second = device.read(), device.read()
    assert first[1].tolist() == second[1].tolist() != []
    device.forget()
    assert not len(device.read()[1])


def test_a_tensor_that_waits_is_read_as_it_was_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was changed first has no row, and the next of its place is read at once."""
    device, place = DeviceFingerprints(torch.device("cpu"), by_programs=True), WatchedPlace("layer", "output")
    monkeypatch.setattr(
        device, "_by_program", lambda dtype, some: [device._by_operators(flat, row) for flat, _, row in some]
    )
    values = [torch.randn(2008) for _ in range(4)]
    known = [fingerprint_on_cpu(value).hash for value in values]
    device.add(place, values[0])
    device.end_pass()
    assert device.add(place, values[1]) == 1
    assert device.add(place, values[2]) == 2
    values[2].add_(1)
    device.end_pass()
    device.add(place, values[3])
    values[3].add_(1)
    _, marks = device.read()
    assert device.found == {0, 1, 3}
    assert [int(marks[row]) for row in device.found] == [known[row] for row in device.found]


def test_an_error_with_a_tensor_that_waited_does_not_end_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when there is no memory left for the signs."""
    device, place = DeviceFingerprints(torch.device("cpu"), by_programs=True), WatchedPlace("layer", "output")
    device.add(place, torch.randn(5).double())
    device.end_pass()
    assert device.add(place, torch.randn(5).double()) == 1

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(device, "_by_operators", fail)
        device.end_pass()
    device.read()
    assert device.found == {0}
    assert [(row, str(error)) for row, error in device.errors.items()] == [(1, "no memory")]


@pytest.mark.slow
def test_the_programs_for_gpus_find_the_same(tmp_path: Path) -> None:
    """Hash to the bit, numbers and sketch up to rounding, in Triton's interpreter: one process for all of them."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    file = Path(__file__).with_name("interpreted_fingerprints.py")
    done = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "all agree\n", done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["all", "one row", "one column", "a bias", "a constant"])
def test_sketches_are_linear_and_tell_how_far_two_tensors_are_apart(kind):
    """The estimate is within a factor of 1.5 for two thirds of 30 places, and right on average."""
    torch.manual_seed(0)
    value, change = torch.randn(200, 256), torch.zeros(200, 256)
    change[{"one row": (7,), "one column": (slice(None), 5)}.get(kind, ())] = 0.01
    change = change * {"a bias": torch.randn(256), "all": torch.randn(200, 256)}.get(kind, 1.0)
    estimates = []
    for place in range(30):
        before = torch.zeros(97 * place)
        one, two, apart = (
            fingerprint_on_cpu(torch.cat([before, each.flatten()])).sketch for each in (value + change, value, change)
        )
        np.testing.assert_allclose(one - two, apart, atol=1e-3)
        estimates.append(float(np.linalg.norm(one - two)) / change.norm().item())
    assert sum(1 / 1.5 < each < 1.5 for each in estimates) >= 20
    assert 0.8 < math.sqrt(np.mean(np.square(estimates))) < 1.25
