"""Traces, comparisons, the first bad operation and the flight recorder on a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_first_bad import Run, log_of_negative, root_of_zero
from helpers_house import Mark, differences, fingerprint
from torch import Tensor, nn

import hookline as hl
from hookline.debug import FlightRecorder, find_bad_operations, read_trace, replay_check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DEVICE = "cuda"
Hooked = Callable[[Run], AbstractContextManager[Any]]
VALUES = {
    "float32": torch.randn(300, 77),
    "several blocks": torch.randn(600, 1021),
    "bfloat16": torch.randn(64, 33).bfloat16(),
    "float16": torch.randn(7).half(),
    "float64": torch.randn(1023, dtype=torch.float64),
    "float8": torch.randn(40).to(torch.float8_e4m3fn),
    "int64": torch.arange(5000) * 10**12,
    "bool": torch.arange(99) % 3 == 0,
    "complex": torch.randn(31, dtype=torch.complex64),
    "NaN and Inf": torch.tensor([1.0, float("nan"), float("inf"), -2.0]),
    "strided": torch.randn(40, 50).t(),
}


def trained(hooked: Hooked, *, dtype: torch.dtype = torch.float32, steps: int = 4) -> Mark:
    """Train the twelve layers, under autocast for another dtype, and return all that is left behind."""
    run = Run(device=DEVICE)
    torch.manual_seed(1)
    losses = []
    with hooked(run):
        for batch in (run.data * steps)[:steps]:
            with torch.autocast(DEVICE, dtype=dtype, enabled=dtype is not torch.float32):
                loss = run.loss(run.model, batch)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.detach())
    hl.assert_no_hooks(run.model)
    return fingerprint(run.model, run.optimizer, losses) | {"random.device": torch.rand(8, device=DEVICE)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_and_a_recorder_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """The run is the same with a trace of everything and with a recorder; a hook that adds 1e-6 is the control."""

    def recorded(run: Run) -> AbstractContextManager[Any]:
        return hl.follow(run.model, run.optimizer, [FlightRecorder(to=tmp_path / "flight.json")])

    def followed(run: Run) -> AbstractContextManager[Any]:
        return find_bad_operations(run.model, run.optimizer)

    def traced(run: Run) -> AbstractContextManager[Any]:
        kinds = ("input", "output", "output_grad", "param_grad", "parameter")
        return hl.trace(run.model, to=tmp_path / "trace", kinds=kinds, step=run.optimizer, tensors="layers.3")

    bare = trained(lambda run: nullcontext(), dtype=dtype)
    assert differences(bare, trained(lambda run: nullcontext(), dtype=dtype)) == []
    for hooked in (traced, recorded, followed):
        assert differences(bare, trained(hooked, dtype=dtype)) == [], hooked.__name__

    def nudged(run: Run) -> AbstractContextManager[Any]:  # the negative control
        return hl.attach(run.model, "layers.5.down", lambda module, args, output: output + 1e-3)

    assert differences(bare, trained(nudged, dtype=dtype)) != []


@pytest.mark.parametrize("name", list(VALUES))
def test_fingerprints_of_the_same_bits_are_equal_on_both_devices(name: str, tmp_path: Path) -> None:
    """The hash to the bit, all numbers up to rounding: a trace of one device is compared with one of the other."""
    found = []
    for number, device in enumerate(("cpu", DEVICE)):
        model = nn.Sequential(nn.Identity())
        with hl.trace(model, to=tmp_path / str(number), kinds="output"):
            model(VALUES[name].to(device))
        found.append(read_trace(tmp_path / str(number)).records[0])
    one, two = (each.fingerprint for each in found)
    assert one.hash == two.hash
    assert (one.nan, one.inf, one.absmax) == (two.nan, two.inf, two.absmax)
    assert two.norm == pytest.approx(one.norm, rel=1e-5)
    assert two.mean == pytest.approx(one.mean, abs=1e-5 * one.norm)
    assert one.distance(two) <= 1e-5 * one.norm


@pytest.mark.parametrize(("planted", "operator", "where"), [
    (log_of_negative, "aten.log.default", "forward"),
    (root_of_zero, "aten.div.Tensor", "backward"),
])  # fmt: skip
def test_the_first_bad_operator_is_named(planted: Callable[[Tensor], Tensor], operator: str, where: str) -> None:
    """Operator, module and batch, although the numbers arrive a step later."""
    run = Run(planted, device=DEVICE)
    with find_bad_operations(run.model, run.optimizer, step_fn=run.step, every=2) as check:
        for batch in run.data:
            check.step(batch)
    report = check.reports[0]
    assert report.operation is not None
    assert (report.operation.operator, report.operation.where) == (operator, where)
    assert report.operation.module == "layers.7.gate"
    assert report.batch == "ids [2, 102]"


def test_the_check_and_the_recorder_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """No call within the steps makes the host wait; torch raises if one does, as the control shows."""
    run = Run(device=DEVICE)
    recorder = FlightRecorder(to=tmp_path / "flight.json")
    with (
        find_bad_operations(run.model, run.optimizer, step_fn=run.step, every=4) as check,
        hl.follow(run.model, run.optimizer, [recorder]),
    ):
        check.step(run.data[0])  # allocates
        check.step(run.data[1])
        try:
            with warnings.catch_warnings():  # torch says that it is a prototype
                warnings.simplefilter("ignore", UserWarning)
                torch.cuda.set_sync_debug_mode("error")
            for batch in run.data[2:]:
                check.step(batch)
            with pytest.raises(RuntimeError, match="synchroniz"):  # the negative control
                run.step(run.data[0]).item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert check.reports == []
    assert recorder.written == []


class Scattering(nn.Module):
    """Adds numbers up in any order, as atomic additions do."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.numel(), device=x.device) % 3
        return x.new_zeros(3).index_add(0, places, x.flatten())


def test_a_step_repeats_unless_it_adds_up_in_any_order() -> None:
    """Dropout repeats; a million atomic additions do not, and the operator is named."""
    run = Run(device=DEVICE)
    assert replay_check(run.step, run.model, run.optimizer, run.data[0]).equal
    model = nn.Sequential(nn.Linear(64, 64), Scattering()).to(DEVICE)
    found = replay_check(lambda x: model(x).sum(), model, None, torch.randn(1 << 15, 64, device=DEVICE), times=5)
    assert not found.equal
    assert found.operator.startswith("aten.index_add")
    assert found.where == "forward of '1'"


class DrawsOnTheDevice(hl.TrainingHook):
    """Says that it draws nothing, and draws on the device."""

    name = "draws_on_the_device"
    hook_points = frozenset({hl.HookPoint.POST_STEP})
    pure = True

    def compute(self, ctx: Any) -> dict[str, float]:
        return {"x": float(torch.rand((), device=DEVICE))}


def test_a_hook_that_draws_on_the_device_is_not_inert() -> None:
    """The streams of devices are compared like the others."""
    torch.rand(1, device=DEVICE)
    found = hl.testing.check_hook(DrawsOnTheDevice, raises=False).findings
    assert any(each.check == "inert" and "cuda" in each.text for each in found)
