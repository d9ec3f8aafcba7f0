"""Compare the fingerprints of the Triton programs with those of the CPU; run by a test with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import torch

from hookline.debug.compare.fingerprint import DeviceFingerprints, fingerprint_on_cpu
from hookline.observe.watch.engine import WatchedPlace

torch.manual_seed(0)
device = DeviceFingerprints(torch.device("cpu"), by_programs=True)
several = torch.randn(257, 1021)
several[3, 5], several[200, 7] = float("nan"), -float("inf")
values = [
    torch.randn(1),
    torch.randn(17 * 2008 + 5),
    several,
    torch.randn(40, 2008).bfloat16(),
    torch.randn(3 * 2008 + 1)[1:],
    torch.randn(4099).half(),
    torch.full((5000,), 1e30),
    torch.full((5000,), 1e-30),
]
places = [WatchedPlace(str(number), "output") for number in range(len(values))]
for _ in range(2):  # at once, and then all together
    for place, value in zip(places, values, strict=True):
        device.add(place, value)
    device.end_pass()
found, marks = device.read()
for value, row, mark in zip(2 * values, found, marks, strict=True):
    numbers, known = torch.from_numpy(row), fingerprint_on_cpu(value)
    assert int(mark) == known.hash, (value.shape, int(mark), known.hash)
    norm = known.numbers[1]
    assert numbers[2:5].tolist() == list(known.numbers[2:]), value.shape
    torch.testing.assert_close(float(numbers[1]), norm, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(float(numbers[0]), known.numbers[0], rtol=1e-4, atol=1e-6 * norm)
    torch.testing.assert_close(numbers[5:], torch.from_numpy(known.sketch), rtol=1e-4, atol=1e-5 * norm)
print("all agree")
