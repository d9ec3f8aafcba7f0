"""Of a followed step that accumulates gradients the report names the batch at fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline.debug import find_bad_operations


class Logarithm(nn.Module):
    """Of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).mean()


@pytest.mark.parametrize("names", ["in the batch", "by note_batch", "none"])
def test_the_batch_of_the_bad_operator_is_named_of_several_in_a_step(names: str) -> None:
    """The third of four in step 1, by ids in the batch, ids told, or its shape."""
    model = nn.Sequential(nn.Linear(3, 3), Logarithm(), nn.Dropout(0.5), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
        model[0].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with find_bad_operations(model, optimizer) as check:
        for step in range(3):
            for part in range(4):
                batch: dict[str, Any] = {"x": torch.ones(2 + part, 3) * (-1 if (step, part) == (1, 2) else 1)}
                ids = [f"{step}-{part}"] if names != "none" else None
                if names == "in the batch":
                    batch["ids"] = ids
                check.note_batch(batch, ids=ids if names == "by note_batch" else None)
                _loss(model, batch).backward()
            optimizer.step()
    (report,) = [each for each in check.reports if each.step == 1]
    assert report.operation is not None
    assert (report.operation.operator, report.operation.module) == ("aten.log.default", "1")
    told = "of {x: float32[4, 3]}" if names == "none" else "ids ['1-2']"
    assert report.batch == f"{told}, micro-batch 3 of 4"


def test_forward_and_backward_are_run_again_in_turns() -> None:
    """In the order of the loop, so that dropout draws as it did; all ids are told where no operator is found."""
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
            batch = {"x": torch.ones(2, 3), "ids": part}
            check.note_batch(batch)
            _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert order == ["forward", "backward"] * 6
    (report,) = check.reports
    assert report.verdict == "did not repeat"
    assert report.batch == "ids 0; ids 1; ids 2"


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
