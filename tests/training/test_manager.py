"""The manager: choosing hooks, trackers as hooks, and metrics by ``record``."""

from __future__ import annotations

import pytest
import torch
from helpers_hooks import PathLength, fire, observer
from torch import nn

from hookline.errors import (
    HooklineWarning,
    HookNameError,
    LifecycleError,
    MetricError,
    OptionError,
)
from hookline.lifecycle.manager import HookManager, record
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint

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


def test_two_hooks_with_one_name_are_an_error():
    """Their metrics could not be told apart."""
    with pytest.raises(HookNameError, match=r"Two hooks are called 'a' \(Observer and Observer\)"):
        HookManager(hooks=[observer("a"), observer("a")])
    with pytest.raises(HookNameError, match=r"Two hooks are called 'path'"):
        HookManager(["path", "path"], hooks=[PathLength])


def test_configuration_that_has_no_effect_is_not_passed_over():
    """An unknown hook is an error, one that is not selected a warning, one that is an object an error."""
    with pytest.raises(HookNameError, match=r"Unknown hook: 'paht'.*'path'"):
        HookManager(hooks=[observer("a")], hook_config={"paht": {"scale": 1}})
    with pytest.warns(HooklineWarning, match="hook_config for 'path' has no effect: that hook is not selected"):
        HookManager(hooks=[observer("a")], hook_config={"path": {"scale": 1}})
    with pytest.raises(OptionError, match="'a': it was given as an object"):
        HookManager(hooks=[observer("a")], hook_config={"a": {"scale": 1}})
    with pytest.raises(OptionError, match="'path' takes no 'sclae'; it takes scale"):
        HookManager(["path"], hook_config={"path": {"sclae": 1}})


def test_hooks_that_require_what_the_run_cannot_do_are_left_out_with_a_warning():
    """And come back when it can."""
    hook = observer("a", returns={"x": 1}, requires={"embedding", "gradients"})
    with pytest.warns(HooklineWarning, match="Hook 'a' excluded: requires embedding"):
        manager = HookManager(hooks=[hook], capabilities={"gradients"})
    assert fire(manager, POST_EPOCH) == {}
    manager.set_capabilities({"gradients", "embedding"})
    assert fire(manager, POST_EPOCH) == {"a/x": 1}


class NoHook:
    """A class that is none of ours."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (type(observer("a")), "a list.* the class Observer"),
        (NoHook, "a list.* the class NoHook"),
        (observer("a"), "takes a list; got an Observer"),
        ([nn.Linear(1, 1)], "got a Linear"),
        (["norms"], "got a str.*hook_names="),
    ],
)
def test_what_is_no_list_of_hooks_is_named(given, message):
    """A class by its name, with what to write."""
    with pytest.raises(OptionError, match=message):
        HookManager(hooks=given)


# -- trackers ------------------------------------------------------------------------------------------------


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
    """Beside what it returns."""

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
    """The message names the function."""
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
