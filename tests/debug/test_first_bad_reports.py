"""One report for one fault, in plain words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookline.debug import find_bad_operations


def _stepping(model: nn.Module, of_loss: Callable[[Tensor], Tensor] = lambda loss: loss) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = of_loss(model(x).mean())
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, step


def test_a_step_with_sparse_gradients_is_run_again() -> None:
    """What torch cannot do is told in one line, without the list of all its backends."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer, step = _stepping(model, lambda loss: (loss * 0 - 1).log())
    with find_bad_operations(model, optimizer, step_fn=step) as check:
        check.step(torch.arange(4))
    (report,) = check.reports
    assert report.operation is not None
    assert report.operation.operator == "aten.log.default"

    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer, step = _stepping(model, lambda loss: loss * float("nan"))
    with find_bad_operations(model, optimizer, step_fn=step) as check:
        check.step(torch.arange(4))
    assert [each.verdict for each in check.reports] == ["given"]  # and no blame for the step of the optimizer

    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer, step = _stepping(model, lambda loss: (loss * 0 - 1).log())
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
