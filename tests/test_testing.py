"""check_hook: a good hook passes, and each thing that a hook can do wrong is found, by its name, and told in words."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch

import hookline as hl
from hookline import HookPoint
from hookline.errors import HookCheckError
from hookline.testing import HookCheck, check_hook


class Mean(hl.TrainingHook):
    """The mean norm of a weight so far; keeps a tensor and a count."""

    name = "mean"
    hook_points = {HookPoint.POST_STEP, HookPoint.SNAPSHOT}

    def __init__(self, first: float = 0.0) -> None:
        self.first = first
        self.reset()

    def reset(self) -> None:
        self.total, self.count = torch.tensor(self.first), 0

    def compute(self, ctx):
        self.total, self.count = self.total + ctx.model.decoder.weight.detach().norm(), self.count + 1
        return {"norm": self.total / self.count}

    def get_state_tensors(self):
        return {"total": self.total}

    def set_state_tensors(self, tensors):
        self.total = tensors["total"]

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state):
        self.total, self.count = state["total"], state["count"]


class Plain(hl.TrainingHook):
    """Keeps nothing; the base of hooks with one fault each."""

    name = "plain"
    hook_points = {HookPoint.POST_EPOCH}

    def value(self, ctx: Any) -> Any:
        return ctx.model.decoder.weight.detach().norm()

    def compute(self, ctx):
        return {"x": self.value(ctx)}


class Ahead(hl.InterventionHook):
    """Trains on, which is undone."""

    name = "ahead"
    hook_points = {HookPoint.SNAPSHOT}

    def intervene(self, run_ctx, model_ctx):
        gradients = model_ctx.run_training_epoch()
        return {"norm/decoder": gradients["decoder.weight"].norm()}


@cache
def report_on(hook: Any) -> HookCheck:
    """A check takes half a second to a second, so each hook has one."""
    return check_hook(hook, raises=False)


def faulty(hook: Any) -> set[str]:
    """The checks that found something; the error lists each of them."""
    report = report_on(hook)
    with pytest.raises(HookCheckError) as raised:
        report.raise_if_any()
    for finding in report.findings:
        assert f"{finding.check}: {finding.text}" in str(raised.value)
        assert finding.text.endswith(".")
        assert finding.check not in report.passed
    return {finding.check for finding in report.findings}


def text_of(hook: Any, check: str) -> str:
    return " ".join(finding.text for finding in report_on(hook).findings if finding.check == check)


def test_a_good_hook_passes_and_the_report_is_a_table():
    """In both loops, with everything that was asked on a line of its own."""
    report = check_hook(Mean, first=1.0)
    assert report.ok
    assert list(report.passed) == ["inert", "reset", "state"]
    assert report.metrics == ("norm",)
    lines = str(report).splitlines()
    assert lines[0] == "hook 'mean', metrics: norm"
    assert any(line.split()[:4] == ["ok", "inert", "The", "run"] for line in lines)


class Writes(Plain):
    def value(self, ctx):
        ctx.model.decoder.weight.data.mul_(1.0001)
        return 1.0


class Evaluates(Plain):
    def value(self, ctx):
        ctx.model.dropout.eval()
        return 1.0


class DrawsThoughPure(Plain):
    pure = True

    def value(self, ctx):
        torch.rand(1)
        return 1.0


class Freezes(Plain):
    def value(self, ctx):
        if ctx.epoch == 3:  # the last: the weights are those of the other run
            ctx.model.decoder.bias.requires_grad_(False)
        return 1.0


class LeavesHooks(Plain):
    def start(self, model):
        model.decoder.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("hook", [Writes, Evaluates, DrawsThoughPure, Freezes, LeavesHooks])
def test_what_changes_the_run_is_not_inert(hook):
    """Weights, modes, random streams, flags, hooks left on the model."""
    assert faulty(hook) == {"inert"}


class Forgets(Mean):
    """Saves its tensor, and not its count."""

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class Remembers(Mean):
    """Of the last run."""

    def reset(self):
        if not hasattr(self, "total"):
            super().reset()


class Unwritable(Mean):
    def state_dict(self):
        return {"total": self.total, "count": self.count, "function": lambda: None}


def test_state_that_does_not_come_through_is_found():
    """What is left out, and what no file can hold; and what is kept over a reset."""
    assert faulty(Forgets) == {"state"}
    assert "in the epoch loop 'norm' at 2 is" in text_of(Forgets, "state")
    assert faulty(Unwritable) == {"state"}
    assert "raised CheckpointError" in text_of(Unwritable, "state")
    assert faulty(Remembers) == {"reset"}


class NoPoints(Plain):
    hook_points = frozenset()


class WrongPoint(Plain):
    hook_points = {"POST_EPOK"}


class NoCompute(hl.TrainingHook):
    hook_points = {HookPoint.POST_EPOCH}


class TakesNoState(Plain):
    def get_state_tensors(self):
        return {"a": torch.zeros(())}


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (NoPoints, "never fires"),
        (WrongPoint, "Did you mean 'POST_EPOCH'"),
        (NoCompute, "define compute"),
        (TakesNoState, "set_state_tensors"),
    ],
)
def test_what_is_declared_is_checked_before_it_runs(hook, text):
    assert faulty(hook) == {"declared"}
    assert text in text_of(hook, "declared")


class Raises(Plain):
    def value(self, ctx):
        raise ZeroDivisionError("of course")


class ReadsAndWrites(Ahead):
    scope = "reads"


def test_a_hook_that_raises_is_told_with_its_error():
    """Its own, and the guard's when it breaks its promise."""
    assert faulty(Raises) == {"runs"}
    assert "ZeroDivisionError: of course" in text_of(Raises, "runs")
    assert faulty(ReadsAndWrites) == {"runs"}


class Late(Plain):
    hook_points = {HookPoint.POST_STEP}
    step_schedule = hl.StepSchedule("stride", stride=30, warmup=30)


@pytest.mark.slow
def test_a_hook_that_is_never_due_is_told_how_to_get_there():
    """Nothing was checked, so nothing passes; with a longer run it does."""
    assert faulty(Late) == {"fires"}
    assert "num_steps=" in text_of(Late, "fires")
    assert check_hook(Late, num_steps=36).ok


class Timed(Plain):
    def value(self, ctx):
        return time.perf_counter()


def test_what_is_no_fault_is_a_note():
    """Times differ from run to run."""
    report = check_hook(Timed)
    assert report.ok
    assert any("'x' differ from one run to the next" in note for note in report.notes)
    assert "note" in str(report)
