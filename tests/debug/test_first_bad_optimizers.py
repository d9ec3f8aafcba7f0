"""Several optimizers, and what else a second run cannot put back: nothing is blamed falsely, and the run stays."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
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
