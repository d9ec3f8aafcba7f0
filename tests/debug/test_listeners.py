"""Alarm, finder, recorder and nan_alarm on one model: each reports what it does alone, by one watch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_first_bad import Run, log_of_negative, root_of_zero
from torch import Tensor
from torch.utils.data import DataLoader

import hookline as hl
from hookline.debug import FlightRecorder, find_bad_operations, read_flight
from hookline.factories import nan_alarm
from hookline.phases import in_phase

TOOLS = ("alarm", "finder", "recorder", "nan_alarm")


def outcome(tools: Collection[str], planted: Callable[[Tensor], Tensor], folder: Path, *, whole: bool) -> Any:
    """Train four steps, the third of which has NaN; return the reports of each tool, the weights, the hooks in a block.

    With ``whole`` the finder makes whole steps again, the optimizer's with them; else the model's part of them.
    """
    run, path, found = Run(planted), folder / "flight.json", {}
    model, optimizer, loader, step = run.model, run.optimizer, DataLoader(run.data, batch_size=None), run.step
    with ExitStack() as on:
        hooks: list[Any] = []
        if "alarm" in tools:
            alarm = on.enter_context(hl.observe.alarm(model, optimizer=optimizer, spike=10))
        if "finder" in tools:
            check = find_bad_operations(model, optimizer, step_fn=run.step if whole else None, every=2 if whole else 16)
            on.enter_context(check)
            step = check.step if whole else run.step
        if "recorder" in tools:
            hooks.append(FlightRecorder(to=path, target="layers.#"))
        if "nan_alarm" in tools:
            counts = nan_alarm()
            on.enter_context(hl.attach(model, "*", counts, observe=True))
        on.enter_context(hl.follow(model, optimizer, hooks, loader=loader, sinks=[]))
        model.eval()
        model(torch.zeros(2, 6, dtype=torch.long))  # no step, nor part of one
        model.train()
        for batch in loader:
            step(batch)
        of_block = [str(handle).split(",")[0] for handle in hl.attached(model.layers[3].up)]
    if "alarm" in tools:
        found["alarm"] = [str(each) for each in alarm.troubles]
    if "finder" in tools:
        found["finder"] = [str(each) for each in check.reports]
    if "recorder" in tools:
        flight = read_flight(path)
        found["recorder"] = [{**each, "time": 0} for each in flight.steps], flight.reason
    if "nan_alarm" in tools:
        found["nan_alarm"] = {key: value > 0 for key, value in counts.to_metrics().items()}
    hl.assert_no_hooks(model)
    return found, [parameter.detach().clone() for parameter in model.parameters()], of_block


@pytest.mark.parametrize("whole", [False, True], ids=["followed", "whole steps"])
@pytest.mark.parametrize("planted", [log_of_negative, root_of_zero])
def test_all_on_one_model_report_what_each_does_alone(planted: Any, whole: bool, tmp_path: Path) -> None:
    """The weights are those of a run with none of them, bit for bit, and modules have one hook for each direction."""
    _, plain, none = outcome((), planted, tmp_path, whole=whole)
    together, weights, of_block = outcome(TOOLS, planted, tmp_path, whole=whole)
    assert none == []
    assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(plain, weights, strict=True))
    assert sorted(each.split()[2] for each in of_block if "NanAlarm" not in each) == ["backward_pre", "forward"]
    for tool in TOOLS:
        alone, _, _ = outcome([tool], planted, tmp_path, whole=whole)
        assert together[tool] == alone[tool], tool
        assert alone[tool], tool


def test_steps_of_an_intervention_are_no_steps_of_an_alarm() -> None:
    """The NaN is in the second step of the run, whatever was trained and put back before."""
    run = Run(log_of_negative, when=1)
    with hl.observe.alarm(run.model, optimizer=run.optimizer) as alarm:
        run.step(run.data[0])
        with hl.rollback(run.model, run.optimizer), in_phase("intervention"):
            run.step(run.data[2])
        run.step(run.data[1])
    assert {each.step for each in alarm.troubles} == {1}
