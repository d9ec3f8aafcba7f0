"""In which order hooks run, and the plan that says so."""

from __future__ import annotations

import pytest
from helpers_hooks import intervention, observer

from hookline.errors import LifecycleError, OptionError
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.manager import HookManager
from hookline.when import HookPoint, StepSchedule

POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT


def order(*hooks, point=POST_EPOCH):
    return [row.hook for row in HookManager(hooks=hooks).plan.rows if row.point == point.name]


def test_without_wishes_hooks_run_as_given_observers_first():
    """Interventions after all observers, whatever was given first."""
    assert order(intervention("i"), observer("b"), intervention("h"), observer("a")) == ["b", "a", "i", "h"]


def test_the_plan_prints_who_runs_where_when_and_what_it_needs():
    """As a table, in the order of the loop."""
    hooks = [
        intervention("hessian", SNAPSHOT, needs_pre_epoch_state=True, scope="grads"),
        observer("norms", needs_grads=True, loop_points={"epoch": {POST_EPOCH: (None, 49), SNAPSHOT: (50, None)}}),
        observer("bursts", POST_STEP, step_schedule=StepSchedule("burst", stride=100, burst_length=3, warmup=200)),
        observer("steps", loop_points={"step": {POST_STEP}}),
    ]
    assert str(HookManager(hooks=hooks, loop_type="epoch").plan).splitlines() == [
        "point          hook     does                when                           needs",
        "POST_STEP   1  bursts   observes            3 of every 100 steps from 200  –",
        "POST_EPOCH  1  norms    observes            up to epoch 49                 grads",
        "SNAPSHOT    1  norms    observes            from epoch 50                  grads",
        "SNAPSHOT    2  hessian  intervenes (grads)  always                         pre epoch state",
        "left out: steps (its loop_points have nothing for the epoch loop)",
    ]


def test_hooks_that_the_run_never_fires_are_named():
    """Those that have some of their points are not."""
    hooks = [observer("ends", POST_EPOCH), observer("both", POST_EPOCH, POST_STEP), observer("shots", SNAPSHOT)]
    manager = HookManager(hooks=hooks)
    assert manager.plan.will_not_fire([POST_STEP, SNAPSHOT]) == (
        "Hook 'ends' will not fire: it waits for POST_EPOCH, and the run fires POST_STEP, SNAPSHOT.",
    )
    assert manager.plan.will_not_fire(HookPoint) == ()


def test_a_hook_that_never_fires_is_refused_when_the_manager_is_made():
    """Not at the first step at which it matters."""
    with pytest.raises(OptionError, match=r"Hook 'a' never fires: give it hook_points"):
        HookManager(hooks=[observer("a", hook_points=None)], loop_type="epoch")


def test_a_hook_that_has_loop_points_alone_waits_until_the_loop_is_known():
    """A loop says it; whoever fires by hand without saying it is told, instead of nothing happening."""
    hook = observer("a", returns={"x": 1}, loop_points={"epoch": {POST_EPOCH}}, hook_points=())
    manager = HookManager(hooks=[hook])
    assert "left out: a (its loop_points depend on the loop" in str(manager.plan)
    for point in (POST_EPOCH, "POST_STEP"):
        with pytest.raises(LifecycleError, match=r"'a' has .*loop_points.*loop_type"):
            manager.fire(point, lambda: RunDataContext(POST_EPOCH, 0))
    manager.plan.use_loop("epoch")
    assert manager.fire(POST_EPOCH, lambda: RunDataContext(POST_EPOCH, 0)) == {"a/x": 1}


# -- what loops ask ------------------------------------------------------------------------------------------


def test_needs_are_those_of_the_hooks_at_the_points_in_question():
    """Nothing is computed that no due hook asked for; not knowing the epoch, it may be due."""
    hooks = [
        observer("g", needs_grads=True, loop_points={"epoch": {POST_EPOCH: (10, None)}}),
        intervention("p", SNAPSHOT, needs_pre_epoch_state=True),
        observer("s", POST_STEP, needs_prev_step_grads=True, step_schedule=StepSchedule("stride", stride=3, warmup=3)),
    ]
    manager = HookManager(hooks=hooks, loop_type="epoch")
    assert manager.needs_grad_accumulation()
    assert [manager.needs_grad_accumulation_at(POST_EPOCH, epoch=e) for e in (None, 9, 10)] == [True, False, True]
    assert not manager.needs_grad_accumulation_at(SNAPSHOT, POST_STEP)
    assert manager.needs_pre_epoch_state()
    assert manager.needs_pre_epoch_state_at(POST_EPOCH, SNAPSHOT)
    assert not manager.needs_pre_epoch_state_at(POST_EPOCH)
    assert manager.needs_prev_step_grads()
    assert manager.needs_prev_step_grads_at(POST_STEP)
    assert not manager.needs_prev_step_grads_at(POST_EPOCH)
    asked = []
    for _ in range(8):
        manager.advance_step()
        asked.append((manager.needs_prev_step_grads_this_step(), manager.has_active_step_hooks()))
    assert asked == [(step in (3, 6),) * 2 for step in range(8)]
    assert not manager.has_active_step_interventions()
    assert manager.has_interventions()
    assert manager.has_interventions_at(SNAPSHOT)
    assert not manager.has_interventions_at(POST_EPOCH)
