"""The manager: choosing hooks, trackers as hooks, metrics by record, its state, reference weights."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_hooks import PathLength, fire, observer
from safetensors.torch import save_file
from torch import nn

from hookline.errors import HooklineWarning, HookNameError, HookSignatureError, LifecycleError, MetricError, OptionError
from hookline.lifecycle.hook import InterventionHook, TrainingHook
from hookline.lifecycle.manager import HookManager, record
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint, StepSchedule

POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT


@pytest.fixture(autouse=True)
def registry(own_registry, monkeypatch):
    monkeypatch.setattr(own_registry, "_hooks", {"path": PathLength})


# -- choosing ------------------------------------------------------------------------------------------------


def test_hooks_come_by_name_as_objects_and_as_classes():
    """In that order; each knows its manager."""

    class Other(PathLength):
        pass

    manager = HookManager(["path"], hooks=[observer("a"), Other], hook_config={"path": {"scale": 2.0}})
    assert list(manager.hooks) == ["path", "a", "Other"]
    assert manager.get_hook("path").scale == 2.0
    assert all(hook.manager is manager for hook in manager.hooks.values())
    with pytest.raises(HookNameError, match=r"Unknown hook: 'b'. Available: path, a, Other"):
        manager.get_hook("b")


class TakesNothing(TrainingHook):
    hook_points = {POST_EPOCH}

    def compute(self):
        return {}


class Writes(InterventionHook):
    hook_points = {POST_EPOCH}
    scope = "writes"

    def intervene(self, run_ctx, model_ctx):
        return {}


class Gives(PathLength):
    """Hands out a state that it cannot take back: a resumed run would go on without, and nobody would know."""

    set_state_tensors = TrainingHook.set_state_tensors


def declared(loop_points):
    return {"hooks": [observer("a", loop_points=loop_points)]}


REFUSED = [
    (declared({"epoch": {POST_EPOCH: (5, 2)}}), OptionError, "'a' at POST_EPOCH.*window"),
    (declared({"epoch": {POST_EPOCH: 5}}), OptionError, "'a' at POST_EPOCH.*window"),
    (declared({POST_EPOCH}), OptionError, "loop_points of hook 'a'"),
    (declared({"epochs": {POST_EPOCH}}), OptionError, "loop_points of hook 'a'"),
    ({"hooks": [observer("a", hook_points=None)]}, OptionError, "Hook 'a' never fires: give it hook_points"),
    ({"hooks": [Writes()]}, OptionError, "'Writes'.*reads, grads, trains.*'writes'"),
    ({"hooks": [Gives()]}, HookSignatureError, r"Gives hands out get_state_tensors\(\) and cannot take them back"),
    ({"hooks": [observer("a")] * 2}, HookNameError, r"Two hooks are called 'a' \(Observer and Observer\)"),
    ({"hook_names": ["path"] * 2, "hooks": [PathLength]}, HookNameError, "Two hooks are called 'path'"),
    ({"hooks": type(observer("a"))}, OptionError, "a list.* the class Observer"),
    ({"hooks": MemorySink}, OptionError, "a list.* the class MemorySink"),
    ({"hooks": observer("a")}, OptionError, "takes a list; got an Observer"),
    ({"hooks": [nn.Linear(1, 1)]}, OptionError, "got a Linear"),
    ({"hooks": ["norms"]}, OptionError, "got a str.*hook_names="),
    ({"hook_config": {"paht": {"scale": 1}}}, HookNameError, "Unknown hook: 'paht'.*'path'"),
    ({"hooks": [observer("a")], "hook_config": {"a": {"scale": 1}}}, OptionError, "'a': it was given as an object"),
    ({"hooks": [TakesNothing()]}, HookSignatureError, r"TakesNothing\.compute.*compute\(self, ctx\)"),
    ({"hook_names": ["path"], "hook_config": {"path": {"sclae": 1}}}, OptionError, "takes no 'sclae'; it takes scale"),
    ({"hook_names": ["path"], "hook_config": ["epsilon"]}, OptionError, "a dictionary of arguments for each hook"),
    ({"hook_names": ["path"], "hook_config": {"scale": 1}}, OptionError, "a dictionary of arguments for each hook"),
    ({"sinks": MemorySink()}, OptionError, "sinks= takes a list .* a MemorySink"),
    ({"sinks": MemorySink}, OptionError, "sinks= takes a list .* call it"),
    ({"loop_type": "epochs"}, OptionError, "loop_type= is 'epoch', 'step' or None"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_what_no_manager_can_be_made_of_is_refused_by_its_name(options, error, words):
    """When it is made, with what to write instead: silence would look like a hook with nothing to say."""
    with pytest.raises(error, match=words):
        HookManager(**{"loop_type": "epoch"} | options)


def test_a_state_may_be_loaded_by_a_method_of_ones_own():
    """Then the hook need not take its tensors back."""
    HookManager(hooks=[type("Loads", (Gives,), {"load_state_dict": lambda self, state: None})()])


def test_arguments_of_a_hook_that_is_not_selected_are_warned_of():
    with pytest.warns(HooklineWarning, match="hook_config for 'path' has no effect: that hook is not selected"):
        HookManager(hooks=[observer("a")], hook_config={"path": {"scale": 1}})


def test_hooks_that_require_what_the_run_cannot_do_are_left_out_with_a_warning():
    """And come back when it can."""
    hook = observer("a", returns={"x": 1}, requires={"embedding", "gradients"})
    with pytest.warns(HooklineWarning, match="Hook 'a' excluded: requires embedding"):
        manager = HookManager(hooks=[hook], capabilities={"gradients"})
    assert fire(manager, POST_EPOCH) == {}
    manager.set_capabilities({"gradients", "embedding"})
    assert fire(manager, POST_EPOCH) == {"a/x": 1}


class Count:
    """A tracker."""

    def __init__(self):
        self.count = 0

    def to_metrics(self):
        return {"count": self.count}

    def reset(self):
        self.count = 0


def test_a_tracker_reports_at_the_end_of_an_epoch_and_starts_anew():
    """In the step loop at snapshots; by hand at whichever comes, but not twice in a moment."""
    for loop_type, expected in (("epoch", [POST_EPOCH] * 2), ("step", [SNAPSHOT] * 2), (None, [POST_EPOCH] * 2)):
        sink, tracker = MemorySink(), Count()
        manager = HookManager(hooks=[tracker], sinks=[sink], loop_type=loop_type)
        for epoch in range(2):
            manager.advance_step()
            tracker.count += 3
            fire(manager, POST_EPOCH, epoch)
            fire(manager, SNAPSHOT, epoch)
        assert [record.hook_point for record in sink.records] == expected
        assert [record.metrics for record in sink.records] == [{"Count/count": 3}] * 2


# -- record --------------------------------------------------------------------------------------------------


def test_record_adds_to_the_metrics_of_the_hook_that_runs():
    def compute(ctx):
        record("extra", torch.tensor(2.0))
        return {"x": 1}

    manager = HookManager(hooks=[observer("a", do=compute), observer("b")])
    assert fire(manager, POST_EPOCH) == {"a/extra": 2.0, "a/x": 1}


def test_record_outside_of_a_firing_joins_the_step():
    """From a hook of a module, say; of the manager that is in a step."""
    sink = MemorySink()
    manager = HookManager(sinks=[sink])
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda module, args, output: record("largest", output.amax()))
    for _ in range(3):
        manager.advance_step()
        model(torch.ones(1, 2))
    handle.remove()
    manager.flush_step_metrics(0)
    assert sink.records[0].metrics["largest"].steps == [0, 1, 2]


def test_what_is_recorded_or_emitted_is_checked_like_what_hooks_return():
    manager = HookManager()
    manager.advance_step()
    with pytest.raises(MetricError, match=r"record\(\) was given a set as 'x', which no sink can write"):
        record("x", {1})
    with pytest.raises(MetricError, match=r"emit_metrics\(\) was given an object as 'y'"):
        manager.emit_metrics({"y": object()}, 0, SNAPSHOT)


def test_record_without_a_manager_is_an_error():
    """Once the manager is gone, there is no record to join."""
    manager = HookManager()
    manager.advance_step()
    record("x", 1)
    del manager
    with pytest.raises(LifecycleError, match=r"record\('x', ...\) has no record to join"):
        record("x", 1)


# -- state ---------------------------------------------------------------------------------------------------


def run(manager, steps):
    for _ in range(steps):
        manager.advance_step()
        fire(manager, POST_STEP, step=manager.global_step)


def made(sink=None):
    late = observer("late", POST_STEP, do=lambda ctx: {"at": ctx.step}, step_schedule=StepSchedule("stride", stride=4))
    return HookManager(["path"], hooks=[late], sinks=[] if sink is None else [sink])


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
    with pytest.raises(OptionError, match="no hooks, step_metrics"):
        HookManager().load_state_dict({"global_step": 3})


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
    manager.reset_all()
    assert fire(manager, POST_EPOCH) == {"a/x": 1}  # without a second warning
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
