"""Audits: train with and without hooks; name the first step that differs, what differs there, and the guilty hook."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from hookline.cli.main import main
from hookline.errors import OptionError
from hookline.guard.digest import run_digest
from hookline.guard.rng import stream_states

STEPS = 4


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Generator]:
    """Dropout, BatchNorm, AdamW, from the same seeds each time."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(1)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Generator) -> None:
    """A few steps."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(5, 4, generator=data)), torch.randint(2, (5,), generator=data)).backward()
        optimizer.step()


def train() -> None:
    """Train a model that is made here."""
    steps(*make())


def look(model: nn.Module) -> Any:
    """Put on torch hooks that change nothing."""
    return [each.register_forward_hook(lambda module, args, output: None) for each in model.modules()]


def at_step(step: int, act: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Callable[..., Any]:
    """A function that puts on a hook which acts once, before the forward of a step."""

    def put_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        calls: list[int] = []

        def hook(module: nn.Module, args: Any) -> None:
            calls.append(1)
            if len(calls) == step:  # it is put on in the first forward, whose own hooks torch has listed already
                act(model, optimizer)

        return model.register_forward_pre_hook(hook)

    return put_on


@contextlib.contextmanager
def block() -> Iterator[None]:
    """A context manager around the training."""
    with torch.autograd.set_detect_anomaly(False):
        yield


class CountHook(hl.TrainingHook):
    """Counts steps, and draws from the streams that hooks have."""

    name = "counter"
    hook_points = frozenset({hl.HookPoint.POST_STEP})

    def compute(self, ctx: hl.RunDataContext) -> dict[str, float]:
        """Draw."""
        return {"drawn": float(torch.rand(1))}


class LateHook(CountHook):
    """Fires at epoch ends alone, and this loop has no loader to tell of them before it is stopped."""

    name = "late"
    hook_points = frozenset({hl.HookPoint.POST_EPOCH})
    step_schedule = None


def test_hooks_of_every_form_change_nothing_and_the_audit_leaves_no_trace():
    """Lifecycle hooks, functions of the model, blocks; the process is as before."""
    put_on: list[nn.Module] = []

    def watch(model: nn.Module) -> Any:
        put_on.append(model)
        return hl.watch(model, stats=["norm"])

    torch.manual_seed(9)
    before = stream_states()
    found = hl.audit(train, ["norms", CountHook, look, look, watch, block], steps=3)
    after = stream_states()
    assert found.ok
    assert found.verdict == "same"
    assert found.first_step is None
    assert not found.culprits
    assert found.hooks == ("norms", "counter", "look", "look 2", "watch", "block")
    assert (found.steps, found.trainings, len(put_on), found.silent) == (3, 4, 1, ())
    assert "<table>" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True
    assert torch.equal(before["random stream of torch"], after["random stream of torch"])
    assert before["random stream of Python"] == after["random stream of Python"]
    hl.assert_no_hooks(put_on[0])


@pytest.mark.filterwarnings("ignore:.*stays silent")
@pytest.mark.parametrize("silent", [LateHook, "gradient_projection"])
def test_a_hook_that_did_nothing_is_not_certified(silent: Any):
    """One whose point does not come in these steps, and one that has nothing to measure and turns itself off."""
    found = hl.audit(train, [CountHook, silent], steps=3)
    assert (found.verdict, found.ok, len(found.silent)) == ("undecided", False, 1)
    assert "did not fire" in str(found)
    assert hl.audit(train, CountHook, steps=3).ok


def test_a_training_under_audit_ends_with_the_same_bits():
    """The auditor is inert; negative control: a training that draws one number more."""
    left: list[Any] = []

    def noting(hooks: list[Any]) -> None:
        model, optimizer, data = make()
        torch.rand(len(hooks))
        steps(model, optimizer, data)
        left.append(run_digest([model], [optimizer]))

    noting([])
    noting([1])
    assert not hl.audit(noting, ["draws"]).ok
    plain, drawn, audited = left[0], left[1], left[2]
    assert plain == audited
    assert plain == left[3] == left[5]
    assert drawn == left[4] != plain


def _nudge(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-6


def _age(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[next(model.parameters())]["exp_avg"][0, 0] += 1e-6


@pytest.mark.parametrize(
    ("act", "first"),
    [
        (lambda model, optimizer: torch.rand(1), "random stream of torch"),
        (lambda model, optimizer: random.random(), "random stream of Python"),
        (lambda model, optimizer: np.random.rand(), "random stream of NumPy"),
        (lambda model, optimizer: model[3].eval(), "random stream of torch"),
        (lambda model, optimizer: model[2].eval(), "mode of 2"),
        (lambda model, optimizer: model(torch.zeros(5, 4)), "random stream of torch"),
        (lambda model, optimizer: model[1].running_mean.add_(1), "buffer 1.running_mean"),
        (lambda model, optimizer: model[4].bias.requires_grad_(False), "requires_grad of 4.bias"),
        (_nudge, "buffer 1.running_mean"),
        (_age, "weight 0.weight"),
        (lambda model, optimizer: optimizer.param_groups[0].update(lr=0.02), "weight 0.weight"),
    ],
)
def test_what_differs_first_is_named_with_its_step(act, first):
    """At step 2, before the forward; the innocent hooks beside it are told as such."""
    found = hl.audit(train, {"quiet": look, "acts": at_step(2, act), "norms": "norms"})
    assert not found.ok
    assert found.first_step == 2
    assert first in found.difference.names[:2], found.difference.names
    assert [culprit.hooks for culprit in found.culprits] == [("acts",)]
    assert found.culprits[0].difference.step == 2
    assert "step 2" in str(found)
    assert str(found).count("changes nothing") == 2


def two_that_act_together() -> tuple[Any, Any]:
    """A hook that arms another while it is on, and that other, which draws a number at step 1 if it is armed."""
    armed: list[int] = []

    def arms(model: nn.Module) -> Any:
        armed.append(1)
        handles = contextlib.ExitStack()
        handles.callback(armed.clear)
        return handles

    return arms, at_step(1, lambda *_: torch.rand(1) if armed else None)


def test_two_hooks_that_change_the_run_only_together_are_named_together():
    """Neither of them changes anything; the third culprit acts alone, and later."""
    arms, fires = two_that_act_together()
    hooks = {"arms": arms, "fires": fires, "a": look, "late": at_step(3, lambda *_: random.random())}
    found = hl.audit(train, hooks)
    assert [(one.hooks, one.difference.step) for one in found.culprits] == [(("arms", "fires"), 1), (("late",), 3)]
    assert "only together with fires" in str(found)
    assert "only together with arms" in str(found)


@pytest.mark.parametrize("with_alone", [False, True])
def test_innocents_are_not_blamed_for_two_that_act_together(with_alone):
    """In different halves of six, one of them guilty of its own if asked."""
    arms, fires = two_that_act_together()
    alone = at_step(2, lambda *_: torch.rand(1)) if with_alone else look
    found = hl.audit(train, {"a": look, "arms": arms, "alone": alone, "b": look, "fires": fires, "c": look})
    assert sorted(one.hooks for one in found.culprits) == [("alone",)] * with_alone + [("arms", "fires")]


def test_a_hook_that_keeps_something_between_trainings_blames_none():
    """It acts in its first training alone."""
    acted: list[int] = []
    once = at_step(1, lambda *_: acted or acted.append(int(torch.rand(1))))
    found = hl.audit(train, {"a": look, "once": once, "b": look})
    assert found.verdict == "changed"
    assert not found.culprits
    assert "keeps something from one training to the next" in str(found)


@pytest.mark.slow
def test_a_compiled_model_can_be_audited():
    """More steps than the compiler compiles anew: nothing that the audit reads is in the compiled code."""

    def train_compiled() -> None:
        torch.compiler.reset()
        model, optimizer, data = make()
        model.compile(backend="eager", fullgraph=True)
        for _ in range(3):
            steps(model, optimizer, data)

    def draw_late(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Draw in the tenth step."""
        calls = iter(range(99))
        return optimizer.register_step_pre_hook(lambda *_: torch.rand(1) and None if next(calls) == 9 else None)

    assert hl.audit(
        train_compiled, [lambda model: hl.attach(model, "0", lambda module, args, output: None, observe=True)]
    ).ok
    (culprit,) = hl.audit(train_compiled, [draw_late]).culprits
    assert culprit.difference.step == 9


def test_a_training_that_does_not_repeat_is_said_and_no_hook_is_blamed():
    """Data that nobody seeded; a model that is made outside."""
    outside = make()
    fresh = np.random.default_rng()

    def unseeded() -> None:
        model, optimizer, data = make()
        steps(model, optimizer, data.manual_seed(int(fresh.integers(2**40))))

    found = hl.audit(unseeded, [look])
    assert found.verdict == "not repeatable"
    assert not found.ok
    assert not found.culprits
    assert found.trainings == 2
    assert found.not_repeatable.step == 0
    assert "seed" in str(found)
    found = hl.audit(lambda: steps(*outside), [look])
    assert found.not_repeatable.step == -1
    assert "weight 0.weight" in found.not_repeatable.names


def test_what_hooks_leave_in_the_process_is_seen():
    """A hook of every module that nobody takes off draws in later trainings too."""
    kept: list[Any] = []

    def global_hook() -> None:
        kept.append(nn.modules.module.register_module_forward_hook(lambda *_: torch.rand(1) and None))

    try:
        found = hl.audit(train, [global_hook])
    finally:
        for handle in kept:
            handle.remove()
    assert found.left_behind is not None
    assert not found.ok
    assert not found.culprits
    assert "not known" in str(found)
    assert "a separate process" in str(found)


def test_a_training_may_put_the_hooks_on_itself():
    """As a trainer takes its callbacks; a step that was not made is a difference; a model is not needed."""

    def plain(hooks: list[Any]) -> None:
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(3 - ("stops" in hooks)):
            (weight**2).sum().backward()
            if step == 1 and "scales" in hooks:
                weight.grad.mul_(2)
            optimizer.step()

    found = hl.audit(plain, ["scales", "nothing"])
    assert found.culprits[0].hooks == ("scales",)
    assert found.difference.step == 1
    assert found.difference.names[0] == "weight parameter 0 of group 0"
    assert hl.audit(plain, ["stops"]).difference.first == "number of steps (3, then 2)"
    with pytest.raises(OptionError, match="write train_fn"):
        hl.audit(lambda: plain([]), [look])


def test_what_a_hook_does_when_it_is_taken_off_is_compared_after_stopped_trainings_too():
    """It changes a weight or draws at its removal alone; negative control: a block that does neither."""

    @contextlib.contextmanager
    def draws_at_the_end() -> Iterator[None]:
        try:
            yield
        finally:
            torch.rand(1)

    class Scaling:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def remove(self) -> None:
            self.model[0].weight.data.mul_(2)

    found = hl.audit(train, {"look": look, "draws": draws_at_the_end, "scales": Scaling}, steps=2)
    assert [(one.hooks, one.difference.where) for one in found.culprits] == [
        (("draws",), "the end"),
        (("scales",), "the end"),
    ]
    assert found.culprits[1].difference.names == ("weight 0.weight",)
    assert hl.audit(train, [look, contextlib.nullcontext], steps=2).ok


def test_a_training_that_calls_sys_exit_is_told_and_a_hook_that_does_is_blamed():
    """No audit ends the process that asked for it, as if all were well."""

    def ends() -> None:
        train()
        sys.exit(0)

    with pytest.raises(OptionError, match=r"sys\.exit\(\)"):
        hl.audit(ends, [look])
    found = hl.audit(train, {"look": look, "leaves": at_step(2, lambda *_: sys.exit(0))})
    assert found.culprits[0].hooks == ("leaves",)
    assert found.difference.first.startswith("error: OptionError")


def test_mistakes_are_errors_that_say_what_to_do():
    """No hooks, no steps, a block that can be entered once, what cannot be put on."""
    cases = [
        (train, [], "no hooks"),
        (lambda: None, [look], "made no step"),
        (train, [block()], "the function that makes it"),
        (train, [3], "lambda model"),
        (train, [lambda a, b, c, d: None], "needs 4 arguments"),
        (train, ["normz"], "norms"),
    ]
    for train_fn, hooks, text in cases:
        with pytest.raises(hl.HooklineError, match=text):
            hl.audit(train_fn, hooks)
    with pytest.raises(OptionError, match="at least 1"):
        hl.audit(train, [look], steps=0)
    with pytest.raises(ZeroDivisionError) as raised:
        hl.audit(lambda: 1 / 0, [look])
    assert "without any hooks" in raised.value.__notes__[0]


SCRIPT = """
import torch
import hookline as hl

class Draws(hl.TrainingHook):
    hook_points = {hl.HookPoint.POST_STEP}
    pure = True

    def compute(self, ctx):
        print("drawn")
        torch.rand(1)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stays silent")
def test_the_command_audits_run_files_and_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Exit codes 0 to 3; the answer on the standard output alone; reference weights reach the hook that needs them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hl.HookRegistry, "_hooks", dict(hl.HookRegistry._hooks))  # the script adds one
    script = tmp_path / "audited_script.py"

    def hookline(*words: str) -> tuple[int, str]:
        code = main(["audit", *words])
        return code, capsys.readouterr().out

    experiments = Path(__file__).parent.parent / "cli" / "experiments.py"
    run_file = tmp_path / "run.json"
    spec = {"name": "shape", "target_modules": ["*"], "hook_factory": "hookline.testing.model_hooks:dummy_hook_factory"}
    hooks = {"names": ["norms", "hessian"]}
    run_file.write_text(json.dumps({"experiment": f"{experiments}:Tiny", "hooks": hooks, "specs": [spec]}))
    code, out = hookline(str(run_file), "--steps", "3", "--json")
    found = json.loads(out)
    assert code == 3
    assert found["hooks"] == ["training_metrics", "norms", "hessian", "shape"]
    assert found["steps"] == 3
    assert "hessian" in found["silent"]
    assert not (tmp_path / "runs").exists()
    weights = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2)).state_dict()
    torch.save(weights, tmp_path / "final.pt")
    for given, expected in (({"path": "final.pt"}, 0), ({}, 3)):
        hooks = {"names": ["gradient_projection"], "config": {"reference_weights": given}}
        run_file.write_text(json.dumps({"experiment": f"{experiments}:Tiny", "hooks": hooks}))
        code, out = hookline(str(run_file), "--json")
        assert (code, json.loads(out)["silent"]) == (expected, ["gradient_projection"] if expected else [])
    assert hookline()[0] == 2
    script.write_text(SCRIPT)
    code, out = hookline(f"{experiments}:Tiny", "--hooks", f"{script}:Draws", "--steps", "3")
    assert (code, out.startswith("Changed: 3 steps"), "drawn" in out) == (1, True, False)
    code, out = hookline(f"{experiments}:Tiny", "--hooks", "norms")
    assert (code, out.startswith("Same: ")) == (0, True)
