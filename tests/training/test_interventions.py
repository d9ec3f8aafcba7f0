"""Interventions: after the observers, one save for all, a restore after each, and what happens when one raises."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from helpers_hooks import fire, intervention, observer
from helpers_loops import left_by, rich_experiment
from helpers_training import differences

import hookline as hl
from hookline.errors import GuardError, HooklineWarning, LifecycleError
from hookline.guard.guard import Guard
from hookline.lifecycle.manager import HookManager
from hookline.phases import phase
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint

POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT


class Training:
    """A run that has trained an epoch, with its guard."""

    def __init__(self):
        self.experiment = rich_experiment(evaluate=None)
        self.model, self.optimizer = self.experiment.model, self.experiment.optimizer
        hl.epoch_loop(self.experiment, epochs=1)
        self.guard = Guard(self.model, self.optimizer, self.experiment.scheduler)
        self.model_ctx = SimpleNamespace(guard=self.guard, model=self.model)

    def state(self):
        return left_by(self.experiment)

    def wreck(self, *_):
        """Everything that an intervention may do and must not leave behind."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(999.0)
        self.model(torch.randn(8, 6)).sum().backward()
        self.optimizer.step()
        self.experiment.scheduler.step()
        self.model.eval()
        return {"weight": self.model[0].weight[0, 0], "lr": self.optimizer.param_groups[0]["lr"]}


@pytest.fixture
def training():
    return Training()


def test_receipts_say_what_was_touched_and_put_back(training):
    """Per hook, of the last firing."""
    manager = HookManager(hooks=[intervention("wreck", do=training.wreck), observer("a")])
    fire(manager, POST_EPOCH, model_ctx=training.model_ctx)
    looked, wrecked = manager.hooks.receipts
    assert (looked.hook, looked.scope, looked.touched) == ("a", "observes", ())
    assert (wrecked.hook, wrecked.scope, wrecked.error) == ("wreck", "trains", "")
    assert any("0.weight" in name for name in wrecked.touched)
    assert set(wrecked.touched) == set(wrecked.restored)
    assert wrecked.saved_bytes > 0
    assert wrecked.seconds > 0


# -- errors --------------------------------------------------------------------------------------------------


class Stop(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), Stop()], ids=lambda error: type(error).__name__
)
def test_an_intervention_that_raises_leaves_nothing_behind_and_metrics_go_out(training, error):
    """State first, then the metrics of the observers, then the error itself."""
    sink = MemorySink()

    def fail(run_ctx, model_ctx):
        training.wreck()
        raise error

    done = []
    hooks = [
        observer("a", returns={"x": 1}),
        intervention("b", do=lambda *_: {"y": 2}),
        intervention("fails", do=fail),
        intervention("after", do=lambda *_: done.append(1)),
    ]
    manager = HookManager(hooks=hooks, sinks=[sink])
    before = training.state()
    with pytest.raises(type(error)) as caught:
        fire(manager, POST_EPOCH, model_ctx=training.model_ctx)
    assert caught.value is error
    assert differences(before, training.state()) == []
    assert sink.latest == {"a/x": 1, "b/y": 2}
    assert not done
    assert phase() == "train"
    assert [bool(receipt.error) for receipt in manager.hooks.receipts] == [False, False, True]
    assert manager.get_last_metrics(POST_EPOCH) == {"a/x": 1, "b/y": 2}


def failing(error):
    """A hook that raises an error."""

    def fail(ctx):
        raise error

    return observer("fails", do=fail)


def test_disable_switches_the_hook_off_and_logs_it(caplog):
    """Once; the plan says so, and nothing is computed for it any more."""
    hook = failing(ValueError("no"))
    hook.needs_grads = True
    manager = HookManager(hooks=[hook, observer("a", returns={"x": 1})], on_error="disable")
    assert manager.needs_grad_accumulation()
    with caplog.at_level(logging.ERROR, "hookline"):
        assert fire(manager, POST_EPOCH) == {"a/x": 1}
        assert fire(manager, POST_EPOCH) == {"a/x": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "Hook 'fails' raised; it is switched off and the run continues"
    ]
    assert len(hook.seen) == 1
    assert manager.hooks.errors == {"fails": 1}
    assert not manager.needs_grad_accumulation()
    assert "fails (switched off" in str(manager.plan)


def test_an_intervention_under_warn_is_undone_and_the_next_one_runs(training):
    """The run goes on from the true state."""

    def fail(run_ctx, model_ctx):
        training.wreck()
        raise ValueError("no")

    hooks = [intervention("fails", do=fail), intervention("b", do=lambda *_: {"y": training.model[0].weight[0, 0]})]
    manager = HookManager(hooks=hooks, on_error="warn")
    before = training.state()
    with pytest.warns(HooklineWarning, match="'fails' raised"):
        metrics = fire(manager, POST_EPOCH, model_ctx=training.model_ctx)
    assert metrics == {"b/y": training.model[0].weight[0, 0].item()}
    assert differences(before, training.state()) == []


@pytest.mark.parametrize("policy", ["raise", "warn", "disable"])
def test_a_broken_declaration_always_stops_the_run(training, policy):
    """Whatever the policy; hook and tensor are named, and observers' metrics go out."""
    sink = MemorySink()

    def writes(run_ctx, model_ctx):
        with torch.no_grad():
            training.model[0].weight.add_(1)

    hooks = [observer("a", returns={"x": 1}), intervention("liar", do=writes, scope="reads")]
    manager = HookManager(hooks=hooks, sinks=[sink], on_error=policy)
    with pytest.raises(GuardError, match=r"'liar'.*0\.weight"):
        fire(manager, POST_EPOCH, model_ctx=training.model_ctx)
    assert sink.latest == {"a/x": 1}


@pytest.mark.parametrize("policy", ["warn", "disable"])
def test_an_interrupt_is_never_passed_over(policy):
    manager = HookManager(hooks=[failing(KeyboardInterrupt())], on_error=policy)
    with pytest.raises(KeyboardInterrupt):
        fire(manager, POST_EPOCH)


def test_if_nothing_can_be_saved_no_intervention_runs_and_observers_metrics_go_out(training):
    """Whatever the policy: that is not the fault of a hook."""
    sink, done = MemorySink(), []

    def full(scopes, *, batch=None):
        raise torch.OutOfMemoryError("no room")

    training.guard.save = full
    hooks = [observer("a", returns={"x": 1}), intervention("b", do=lambda *_: done.append(1))]
    manager = HookManager(hooks=hooks, sinks=[sink], on_error="disable")
    before = training.state()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        fire(manager, POST_EPOCH, model_ctx=training.model_ctx)
    assert differences(before, training.state()) == []
    assert sink.latest == {"a/x": 1}
    assert not done
    assert manager.hooks.errors == {}


def test_an_intervention_inside_of_another_is_refused_and_both_are_undone(training):
    """It would overwrite what the outer one is put back to; observers may be fired there."""

    def outer(run_ctx, model_ctx):
        training.wreck()
        fire(manager, POST_STEP, model_ctx=model_ctx)
        fire(manager, SNAPSHOT, model_ctx=model_ctx)

    looks = observer("looks", POST_STEP)
    manager = HookManager(hooks=[intervention("outer", do=outer), looks, intervention("inner", SNAPSHOT)])
    before = training.state()
    with pytest.raises(LifecycleError, match=r"'outer' fires SNAPSHOT, at which 'inner' intervenes"):
        fire(manager, POST_EPOCH, model_ctx=training.model_ctx)
    assert differences(before, training.state()) == []
    assert len(looks.seen) == 1
    fire(manager, SNAPSHOT, model_ctx=training.model_ctx)
