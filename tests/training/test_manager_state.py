"""The state of a manager over time: resumed runs, reference weights, offloading, profiling."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from helpers_hooks import PathLength, fire, observer
from safetensors.torch import save_file

from hookline.errors import (
    HooklineWarning,
    OptionError,
)
from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint, StepSchedule

POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT


@pytest.fixture(autouse=True)
def registry(own_registry, monkeypatch):
    monkeypatch.setattr(own_registry, "_hooks", {"path": PathLength})


# -- state ---------------------------------------------------------------------------------------------------


def run(manager, steps):
    for _ in range(steps):
        manager.advance_step()
        fire(manager, POST_STEP, step=manager.global_step)


def made(sink=None):
    late = observer("late", POST_STEP, do=lambda ctx: {"at": ctx.step}, step_schedule=StepSchedule("stride", stride=4))
    return HookManager(["path"], hooks=[late], sinks=[] if sink is None else [sink])


@pytest.mark.parametrize("split", [0, 1, 3, 4, 7])
def test_a_resumed_run_goes_on_where_the_other_was(split):
    """Steps, schedules, windows and what was buffered; through a file."""
    whole, parts = MemorySink(), MemorySink()
    manager = made(whole)
    run(manager, 10)
    manager.flush_step_metrics(0)
    first = made()
    run(first, split)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = made(parts)
    second.load_state_dict(state)
    assert second.global_step == split - 1
    run(second, 10 - split)
    second.flush_step_metrics(0)
    assert parts.latest == whole.latest
    assert {k: v.steps for k, v in parts.latest.items()} == {k: v.steps for k, v in whole.latest.items()}


def test_loading_earlier_steps_wakes_scheduled_hooks_again():
    """What was worked out from a later step does not hold."""
    manager = made()
    state = manager.state_dict()
    run(manager, 6)
    fired = manager.hooks.fired["late"]
    manager.load_state_dict(state)
    run(manager, 6)
    assert manager.hooks.fired["late"] == 2 * fired == 4


def test_the_state_of_a_hook_that_is_not_there_is_told_of():
    """Those that are there go on."""
    state = made().state_dict()
    with pytest.warns(HooklineWarning, match="passed over: 'late'"):
        HookManager(["path"]).load_state_dict(state)


def test_a_hook_that_was_switched_off_stays_off():
    """A resumed run does not try it again."""

    def fail(ctx):
        raise ValueError("no")

    first = HookManager(hooks=[observer("a", do=fail)], on_error="disable")
    fire(first, POST_EPOCH)
    second = HookManager(hooks=[observer("a", do=fail)], on_error="raise")
    second.load_state_dict(first.state_dict())
    assert fire(second, POST_EPOCH) == {}


def test_reset_all_begins_another_run():
    """Steps from 0, nothing buffered, nothing remembered, every hook reset."""
    sink = MemorySink()
    manager = made(sink)
    run(manager, 6)
    manager.reset_all()
    assert manager.global_step == -1
    assert manager.get_last_metrics() == {}
    assert manager.hooks.receipts == ()
    run(manager, 2)
    manager.flush_step_metrics(0)
    assert sink.latest["path/length"] == [1.0, 2.0]
    assert sink.latest["late/at"] == [0]


# -- reference weights ---------------------------------------------------------------------------------------


def test_reference_weights_are_looked_for_when_a_hook_needs_them(tmp_path):
    """From a mapping, a function, or a file whose name depends on the run; once per run."""
    weights = {"_orig_mod.weight": torch.ones(2)}
    torch.save({"model": weights}, tmp_path / "stride_final.pt")
    save_file(weights, tmp_path / "stride_final.safetensors")
    asked = []

    def find():
        asked.append(1)
        return weights

    paths = [str(tmp_path / f"{{strategy}}_final.{ending}") for ending in ("pt", "safetensors")]
    for source in (weights, find, *paths):
        hook, other = observer("a", needs_reference_weights=True), observer("b", SNAPSHOT)
        manager = HookManager(hooks=[hook, other], reference_weights=source)
        manager.set_run_context(strategy="stride")
        fire(manager, SNAPSHOT)
        assert not hasattr(hook, "reference_weights")
        for _ in range(2):
            fire(manager, POST_EPOCH)
        assert torch.equal(hook.reference_weights["weight"], torch.ones(2))
    assert asked == [1]


def test_reference_weights_that_cannot_be_had_are_warned_of_once(tmp_path):
    """The run goes on without; in another run they are looked for again."""
    hook = observer("a", returns={"x": 1}, needs_reference_weights=True)
    path = tmp_path / "none.pt"
    manager = HookManager(hooks=[hook], hook_config={"reference_weights": {"path": str(path)}})
    with pytest.warns(HooklineWarning, match=r"reference weights.*none.pt"):
        assert fire(manager, POST_EPOCH) == {"a/x": 1}
    torch.save({"w": torch.ones(1)}, path)
    assert fire(manager, POST_EPOCH) == {"a/x": 1}
    assert not hasattr(hook, "reference_weights")
    manager.reset_all()
    fire(manager, POST_EPOCH)
    assert list(hook.reference_weights) == ["w"]


@pytest.mark.parametrize("policy", ["raise", "disable"])
def test_a_hook_that_cannot_take_its_reference_weights_has_raised(policy, caplog):
    """Under the same policy as in compute; the others run."""

    class Picky(TrainingHook):
        hook_points = frozenset({POST_EPOCH})
        needs_reference_weights = True

        def set_reference_weights(self, reference):
            raise ValueError("another shape")

        def compute(self, ctx):
            raise AssertionError("called without its weights")

    hooks = [Picky(), observer("b", returns={"y": 1})]
    manager = HookManager(hooks=hooks, reference_weights={"w": torch.ones(1)}, on_error=policy)
    if policy == "raise":
        with pytest.raises(ValueError, match="another shape"):
            fire(manager, POST_EPOCH)
        return
    assert fire(manager, POST_EPOCH) == {"b/y": 1}
    assert manager.hooks.errors == {"Picky": 1}
    assert "Picky" in manager.plan.left_out
    assert "another shape" in caplog.text


# -- offloading, profiling, the log of steps -----------------------------------------------------------------


def test_what_is_no_state_of_a_manager_is_refused():
    """With what it lacks."""
    with pytest.raises(OptionError, match="no hooks, step_metrics"):
        HookManager().load_state_dict({"global_step": 3})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sinks": MemorySink()}, "sinks= takes a list .* a MemorySink"),
        ({"sinks": MemorySink}, "sinks= takes a list .* call it"),
        ({"loop_type": "epochs"}, "loop_type= is 'epoch', 'step' or None"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(options, words):
    """By name, with what to write instead."""
    with pytest.raises(OptionError, match=words):
        HookManager(**options)


def test_step_metrics_are_written_as_lines_of_json(tmp_path):
    """With their steps; NaN and infinity as words, so that any parser reads them."""
    values = iter([1.0, float("nan"), float("inf")])
    path = tmp_path / "raw" / "steps.jsonl"
    hooks = [observer("a", POST_STEP, do=lambda ctx: {"x": next(values)}), observer("b", returns={"y": 1})]
    manager = HookManager(hooks=hooks, step_metrics_log=path)
    for epoch in range(3):
        run(manager, 1)
        manager.flush_step_metrics(epoch)
        fire(manager, POST_EPOCH)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["a/x"] for line in lines] == [[1.0], ["NaN"], ["Infinity"]]
    assert (lines[2]["epoch"], lines[2]["hook_point"], lines[2]["steps"]) == (2, "POST_STEP", {"a/x": [2]})
