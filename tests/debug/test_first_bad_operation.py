"""The first bad operation is named, nothing else is blamed, and the run goes on as if nobody had looked."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers_first_bad import Run, bfloat_overflow, half_overflow, log_of_negative, root_of_zero, stepping
from helpers_house import House, differences, fingerprint, house_batch
from torch import Tensor, nn

import hookline as hl
from hookline.debug import find_bad_operations

PLANTED = {
    "forward": (log_of_negative, "aten.log.default", "NaN", "forward"),
    "backward": (root_of_zero, "aten.div.Tensor", "Inf", "backward"),
    "float16": (half_overflow, "aten.mul.Tensor", "overflow of float16", "forward"),
    "bfloat16": (bfloat_overflow, "aten.mul.Tensor", "overflow of bfloat16", "forward"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_the_planted_operator_is_named_with_module_batch_and_line(kind: str) -> None:
    """Of 2,000 operators in twelve layers the right one, once; later bad steps are counted, not blamed."""
    planted, operator, what, where = PLANTED[kind]
    run = Run(planted)
    with find_bad_operations(run.model, run.optimizer, step_fn=run.step, every=2) as check:
        for batch in run.data:
            check.step(batch)
    (report,) = check.reports
    found = report.operation
    assert found is not None
    assert report.verdict == "found"
    assert report.step == 2
    assert (found.operator, found.what, found.where, found.module) == (operator, what, where, "layers.7.gate")
    assert f"in {planted.__name__}" in found.source
    assert "helpers_first_bad.py" in found.source
    assert "2, 102" in report.batch
    assert all(not each.nan and not each.inf for each in found.inputs)
    assert any(each.nan or each.inf for each in found.outputs)
    assert check.bad_steps == 2
    assert found.operator in str(check)
    assert found.headline() in repr(check)
    if where == "backward":
        assert (found.node, found.forward_operator) == ("SqrtBackward0", "aten.sqrt.default")
    hl.assert_no_hooks(run.model)


def test_a_loss_of_a_followed_loop_that_makes_nan_is_said_to_come_from_outside() -> None:
    """The model is finite, and the gradient that comes back to it is not."""
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with find_bad_operations(model, optimizer) as check:
        for scale in (1.0, 0.0):
            (model(torch.ones(2, 3)).square() * scale).sqrt().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (report,) = check.reports
    assert (report.step, report.verdict) == (1, "given")
    assert "the loss and the optimizer were not" in report.notes[0]


class Logarithm(nn.Module):
    """Has none for large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return (1e12 - x.abs()).log()


@pytest.mark.slow
def test_autocast_and_compiled_models_are_checked_and_the_second_run_is_eager() -> None:
    """Under autocast the overflow is that of its type; of compiled code the report says that the second run was not."""
    run = Run(lambda x: (x * 1e5).half().float() * 0 + x)

    def under_autocast(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss(run.model, batch)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    with find_bad_operations(run.model, run.optimizer, step_fn=under_autocast) as check:
        for batch in run.data:
            check.step(batch)
    assert check.reports[0].operation is not None
    assert check.reports[0].operation.operator == "aten._to_copy.default"
    assert check.reports[0].operation.what == "overflow of float16"

    torch.manual_seed(0)
    torch.compiler.reset()  # the compiler passes over a Sequential of which it once found nothing to compile
    model = nn.Sequential(nn.Linear(4, 4), Logarithm(), nn.Linear(4, 1))
    model.compile(backend="eager")
    optimizer, step = stepping(model)
    with find_bad_operations(model, optimizer, step_fn=step) as check:
        for batch in torch.randn(3, 2, 4):
            check.step(batch)
        check.step(torch.full((2, 4), float(2**80)))
    (report,) = check.reports
    assert report.step == 3
    assert report.places[0] == "1/forward"
    assert report.operation is not None
    assert report.operation.operator == "aten.log.default"
    assert (report.operation.where, report.operation.module) == ("forward", "1")
    assert any("eager" in note for note in report.notes)


def test_a_followed_forward_is_run_again_under_its_autocast() -> None:
    """In float32 nothing would overflow."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(3e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with find_bad_operations(model, optimizer) as check:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.ones(2, 4))
        out.float().sum().backward()
        optimizer.step()
    assert check.reports[0].operation is not None
    assert check.reports[0].operation.what == "overflow of float16"


def test_what_was_given_and_what_does_not_repeat_is_said_so() -> None:
    """A bad batch is no operator's fault; a fault that is gone in the second run did not repeat."""
    run = Run()
    calls = {"count": 0}

    def sometimes(x: Tensor) -> Tensor:
        calls["count"] += 1
        return x * float("nan") if calls["count"] == 1 else x

    run.planted = sometimes
    with find_bad_operations(run.model, run.optimizer, step_fn=run.step) as check:
        for batch in run.data[1:3]:
            check.step(batch)
    assert [report.verdict for report in check.reports] == ["did not repeat"]
    assert "did not repeat" in str(check)
    assert "globals of Python, counters" in str(check)
    assert "Next: hookline.debug.replay_check" in str(check)
    assert check.reports[0].operation is None

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, step = stepping(model)
    with find_bad_operations(model, optimizer, step_fn=step) as check:
        check.step(torch.tensor([[1.0, float("nan"), 2.0]]))
    assert check.reports[0].verdict == "given"
    assert check.reports[0].operation is not None
    assert "an input, a constant" in check.reports[0].operation.given


class Masked(nn.Module):
    """Hides entries by minus infinity; all of them at one step."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.ones(4, 4).triu(0 if x[0, 0] == 0 else 1).bool(), float("-inf"))


def test_infinities_that_are_meant_are_no_fault_and_hide_none() -> None:
    """A mask in the output of a module is meant, and no report; a softmax over nothing but minus infinity is one."""
    model = nn.Sequential(Masked(), nn.Softmax(dim=-1), nn.Linear(4, 1))
    optimizer, step = stepping(model)
    with find_bad_operations(model, optimizer, step_fn=step) as check:
        for number in (3.0, 2.0, 0.0, 1.0):
            check.step(torch.full((4, 4), number))
    (made,) = check.reports
    assert (made.step, made.verdict, made.operation.operator) == (2, "found", "aten._softmax.default")
    assert check.bad_steps == 2


class Aside(House):
    """House with a part whose result is not used, and is not finite at one step."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Identity()
        self.bad = False

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.aside(inputs.log() if self.bad else inputs)
        return super().forward(inputs, target)


@functools.cache
def _bare() -> dict[str, Tensor]:
    return _train(checked=False)[0]


def _train(*, checked: bool, steps: int = 20) -> tuple[dict[str, Tensor], list[Any]]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = Aside().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    def step(number: int) -> Tensor:
        model.bad = number in (9, 13)
        optimizer.zero_grad()
        loss = model(*house_batch(number))["loss"] * (1 + 1e-3 * random.random() + 1e-3 * np.random.rand())
        loss.backward()
        optimizer.step()
        return loss.detach()

    if not checked:
        losses = [step(number) for number in range(steps)]
        return fingerprint(model, optimizer, losses), []
    with find_bad_operations(model, optimizer, step_fn=step, every=4) as check:
        losses = [check.step(number) for number in range(steps)]
    return fingerprint(model, optimizer, losses), check.reports


def test_the_run_is_the_same_to_the_last_bit_with_the_check_and_two_second_runs() -> None:
    """Dropout, BatchNorm, AdamW, three random streams; the check looked twice in between."""
    bare = _bare()
    watched, reports = _train(checked=True)
    assert [(each.step, each.operation.operator) for each in reports] == [
        (9, "aten.log.default"),
        (13, "aten.log.default"),
    ]
    assert differences(bare, watched) == []


def infinite_constant(x: Tensor) -> Tensor:
    """An infinity that is no mask: it goes on, and becomes NaN in the norm of the next layer."""
    return x * torch.tensor(float("inf"))


def half_filled(x: Tensor) -> Tensor:
    """Memory of which only a part is written; torch fills it with NaN, if results are to be deterministic."""
    found = torch.empty_like(x)
    found[..., :2] = x[..., :2]
    return found


@pytest.mark.parametrize(("planted", "what"), [
    (infinite_constant, "Inf"),
    (half_filled, "NaN"),
])  # fmt: skip
def test_a_constant_and_memory_that_was_not_filled_are_named_where_they_are(
    planted: Callable[[Tensor], Tensor], what: str
) -> None:
    """The module that put them in, not the one in which an infinity becomes NaN."""
    run = Run(planted)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with find_bad_operations(run.model, run.optimizer, step_fn=run.step) as check:
            for batch in run.data:
                check.step(batch)
    finally:
        torch.use_deterministic_algorithms(before)
    found = check.reports[0].operation
    assert found is not None
    assert found.what == what
    assert "a constant, or memory that nothing has filled" in found.given
    assert (found.module, found.where) == ("layers.7.gate", "forward")


def test_a_loop_that_skips_bad_gradients_itself_has_the_operator_named() -> None:
    """Nothing bad is left behind by such a step; the operator of the backward is found all the same."""
    run = Run(root_of_zero)

    def step(batch: Any) -> Tensor:
        loss = run.loss(run.model, batch)
        loss.backward()
        if all(bool(each.grad.isfinite().all()) for each in run.model.parameters()):
            run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach()

    with find_bad_operations(run.model, run.optimizer, step_fn=step) as check:
        for batch in run.data:
            check.step(batch)
    (report,) = check.reports
    assert report.verdict == "found"
    assert (report.operation.operator, report.operation.where) == ("aten.div.Tensor", "backward")
    assert report.operation.module == "layers.7.gate"


@pytest.mark.parametrize(("scale", "skipped"), [(4.0, 1), (2.0**30, 4)])
def test_a_scaler_that_skips_a_step_is_not_alarmed_about(scale: float, skipped: int) -> None:
    """Gradients that overflow under a GradScaler are counted, not reported; NaN in the forward still is.

    With a scale that is too large for float16, all gradients overflow, from that of the model's own output on.
    """
    run = Run(root_of_zero)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=skipped == 4):
            loss = run.loss(run.model, batch)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        return loss.detach()

    with find_bad_operations(run.model, run.optimizer, step_fn=step, scaler=scaler) as check:
        for batch in run.data:
            check.step(batch)
    assert check.reports == []
    assert check.scaled_steps == skipped
    assert check.bad_steps == 0


def test_options_that_cannot_work_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(hl.errors.OptionError, match="step_fn=, or the optimizer"):
        find_bad_operations(model)
    with pytest.raises(hl.errors.OptionError, match="every="):
        find_bad_operations(model, step_fn=print, every=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with find_bad_operations(model, optimizer) as check, pytest.raises(hl.errors.OptionError, match="step_fn"):
        check.step(None)
    hl.assert_no_hooks(model)
