"""What a second run cannot put back or do: nothing is blamed falsely, the run stays, and one fault has one report."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers_first_bad import stepping
from helpers_house import differences, fingerprint
from torch import Tensor, nn

import hookline as hl
from hookline.debug import find_bad_operations, replay_check


class Root(nn.Module):
    """Has none of negative numbers, which it makes when told."""

    is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        return (x - 1e4).sqrt() if self.is_bad else x


class Halves:
    """A model whose halves have an optimizer each; ``bad_loss`` spoils the loss alone, so that the run goes on."""

    def __init__(self, *, bad_loss: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.BatchNorm1d(4), Root(), nn.Linear(4, 1))
        self.first = torch.optim.AdamW(self.model[:3].parameters(), 0.01)
        self.second = torch.optim.AdamW(self.model[3:].parameters(), 0.01)
        self.bad_loss = bad_loss
        self.data = [{"x": torch.randn(4, 4), "ids": [i], "bad": i == 5} for i in range(20)]

    def step(self, batch: dict[str, Any]) -> Tensor:
        self.model[3].is_bad = batch["bad"] and not self.bad_loss
        self.first.zero_grad()
        self.second.zero_grad()
        loss = self.model(batch["x"]).square().mean()
        loss.backward()
        self.first.step()
        self.second.step()
        return loss.detach() * (float("nan") if batch["bad"] else 1)

    def state(self) -> dict[str, Tensor]:
        found = fingerprint(self.model, self.first, [torch.zeros(())])
        return found | {
            f"second {name}": value for name, value in fingerprint(self.model, self.second, [torch.zeros(())]).items()
        }

    def train(self, optimizer: Any) -> tuple[dict[str, Tensor], list[Any]]:
        with find_bad_operations(self.model, optimizer, step_fn=self.step, every=4) as check:
            for batch in self.data:
                check.step(batch)
        hl.assert_no_hooks(self.model)
        return self.state(), check.reports


def test_all_optimizers_are_put_back_and_one_that_was_not_given_keeps_the_step_from_being_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit in each case; negative control: run again in spite of the optimizer that was not given."""
    bare = Halves(bad_loss=True)
    for batch in bare.data:
        bare.step(batch)
    expected = bare.state()

    both = Halves(bad_loss=True)
    found, (report,) = both.train([both.first, both.second])
    assert differences(expected, found) == []
    assert report.verdict in ("given", "found")

    one = Halves(bad_loss=True)
    found, (report,) = one.train(one.first)
    assert differences(expected, found) == []
    assert report.verdict == "not run again"
    assert "AdamW was not given" in report.notes[0]
    assert "optimizer=[first, second]" in report.notes[0]

    monkeypatch.setattr("hookline.debug.first_bad.find_bad_operations.only_steps_of", lambda given: nullcontext())
    blind = Halves(bad_loss=True)
    assert differences(expected, blind.train(blind.first)[0]) != []


def test_nothing_is_blamed_when_the_steps_before_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is at fault; with the second optimizer ahead, the steps lead elsewhere, and the report says so."""
    both = Halves()
    _, (report,) = both.train((both.first, both.second))
    assert report.operation is not None
    assert (report.operation.operator, report.operation.module) == ("aten.sqrt.default", "3")

    monkeypatch.setattr("hookline.debug.first_bad.find_bad_operations.only_steps_of", lambda given: nullcontext())
    one = Halves()
    one.second.param_groups[0]["lr"] = 0.1
    _, (report,) = one.train(one.first)
    assert (report.verdict, report.operation) == ("not repeated", None)
    assert "could not be repeated: something outside was changed" in report.headline()
    assert "data that the step fetches itself" in str(report)


def test_several_optimizers_end_a_step_that_is_followed_and_can_be_replayed() -> None:
    """The last one given ends it; lists that hold no optimizer are refused."""
    run = Halves()
    with find_bad_operations(run.model, [run.first, run.second]) as check:
        for batch in run.data[:7]:
            run.step(batch)
    (report,) = check.reports
    assert (report.step, report.operation.operator) == (5, "aten.sqrt.default")

    run = Halves()
    before = run.state()
    assert replay_check(run.step, run.model, [run.first, run.second], run.data[0]).equal
    assert differences(before, run.state()) == []
    with pytest.raises(hl.errors.OptionError, match="was not given"):
        replay_check(run.step, run.model, run.first, run.data[0])
    for wrong in ([], [None]):
        with pytest.raises(hl.errors.OptionError, match="optimizer="):
            find_bad_operations(run.model, wrong, step_fn=run.step)


def test_a_step_with_sparse_gradients_is_run_again() -> None:
    """What torch cannot do is told in one line, without the list of all its backends."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer, step = stepping(model, lambda loss: (loss * 0 - 1).log())
    with find_bad_operations(model, optimizer, step_fn=step) as check:
        check.step(torch.arange(4))
    (report,) = check.reports
    assert report.operation is not None
    assert report.operation.operator == "aten.log.default"

    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer, step = stepping(model, lambda loss: loss * float("nan"))
    with find_bad_operations(model, optimizer, step_fn=step) as check:
        check.step(torch.arange(4))
    assert [each.verdict for each in check.reports] == ["given"]  # and no blame for the step of the optimizer

    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer, step = stepping(model, lambda loss: (loss * 0 - 1).log())
    calls = []

    def failing(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            torch.as_strided(torch.eye(2).to_sparse(), (1,), (1,))
        return step(x)

    with find_bad_operations(model, optimizer, step_fn=failing) as check:
        check.step(torch.arange(4))
    (report,) = check.reports
    assert report.verdict == "not run again"
    (note,) = report.notes
    assert "NotImplementedError: Could not run 'aten::as_strided'" in note
    assert "registered" not in note
    assert len(note) < 300


class Logarithm(nn.Module):
    """Of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).mean()


def test_the_batch_of_the_bad_operator_is_named_of_several_in_a_step() -> None:
    """The third of four in step 1, by its shape."""
    model = nn.Sequential(nn.Linear(3, 3), Logarithm(), nn.Dropout(0.5), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
        model[0].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with find_bad_operations(model, optimizer) as check:
        for step in range(3):
            for part in range(4):
                batch: dict[str, Any] = {"x": torch.ones(2 + part, 3) * (-1 if (step, part) == (1, 2) else 1)}
                _loss(model, batch).backward()
            optimizer.step()
    (report,) = [each for each in check.reports if each.step == 1]
    assert report.operation is not None
    assert (report.operation.operator, report.operation.module) == ("aten.log.default", "1")
    assert report.batch == "of (float32[4, 3]), micro-batch 3 of 4"


def test_forward_and_backward_are_run_again_in_turns() -> None:
    """In the order of the loop, so that dropout draws as it did; all are told where no operator is found."""
    order: list[str] = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            order.append("forward")
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            order.append("backward")
            return grad * (float("nan") if order.count("backward") == 2 else 1.0)

    class Telling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Told.apply(x)

    model = nn.Sequential(nn.Linear(3, 3), Telling())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with find_bad_operations(model, optimizer) as check:
        for part in range(3):
            _loss(model, {"x": torch.ones(2 + part, 3)}).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert order == ["forward", "backward"] * 6
    (report,) = check.reports
    assert report.verdict == "did not repeat"
    assert report.batch == "of (float32[2, 3]); of (float32[3, 3]); of (float32[4, 3])"


def test_a_fault_of_the_step_before_is_reported_with_its_batch() -> None:
    """A learning rate by which the weights overflow shows in the next forward."""
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Any]) -> Tensor:
        optimizer.param_groups[0]["lr"] = 1e38 if batch["ids"] == 2 else 0.1
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    with find_bad_operations(model, optimizer, step_fn=step) as check:
        for number in range(5):
            check.step({"x": torch.full((2, 3), 100.0), "ids": number})
    (report,) = check.reports
    assert (report.step, report.batch) == (3, "ids 2")
    assert any("step 2" in note for note in report.notes)
