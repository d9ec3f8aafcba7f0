"""Firing: which hook is called when, in which order and with what; and the plan that says so."""

from __future__ import annotations

import pytest
from helpers_hooks import context, fire, intervention, observer
from helpers_threads import in_thread
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hookline.errors import HooklineWarning, LifecycleError, OptionError
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.manager import HookManager
from hookline.when import HookPoint, StepSchedule

PRE_EPOCH, PRE_STEP, POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint


def never():
    """A factory of contexts that must not be called."""
    raise AssertionError("a context was made though nothing is due")


@pytest.mark.parametrize("hooks", [[], ["elsewhere"], ["scheduled"], ["outside its window"]])
def test_the_context_is_made_only_if_a_hook_is_due(hooks):
    made = {
        "elsewhere": observer("elsewhere", SNAPSHOT),
        "scheduled": observer("scheduled", POST_STEP, step_schedule=StepSchedule("stride", stride=5, warmup=5)),
        "outside its window": observer("outside", loop_points={"epoch": {POST_STEP: (5, None)}}),
    }
    manager = HookManager(hooks=[made[name] for name in hooks], loop_type="epoch")
    for _ in range(5):
        manager.advance_step()
        assert manager.fire(POST_STEP, never, never, epoch=2) == {}
    assert manager.get_last_metrics(POST_STEP) == {}
    assert manager.hooks.receipts == ()


def test_receipts_are_of_the_last_firing_and_counts_of_all():
    """A point that has no hooks is no firing."""
    manager = HookManager(hooks=[observer("a", POST_EPOCH), observer("b", SNAPSHOT)])
    for point in (POST_EPOCH, POST_EPOCH, SNAPSHOT, PRE_STEP):
        manager.fire(point, epoch=0)
    assert [receipt.hook for receipt in manager.hooks.receipts] == ["b"]
    assert manager.hooks.fired == {"a": 2, "b": 1}
    assert {name: cost["count"] for name, cost in manager.hooks.costs().items()} == {"a": 2, "b": 1}


def test_a_scheduled_hook_without_steps_is_an_error_and_not_silence():
    """Whoever forgets to advance is told so at the first step."""
    manager = HookManager(hooks=[observer("late", POST_STEP, step_schedule=StepSchedule(warmup=1))])
    with pytest.raises(LifecycleError, match=r"'late' has a step_schedule.*advance_step\(\)"):
        fire(manager, POST_STEP)


def test_windows_count_steps_in_the_step_loop_from_step_0():
    """Step 0 is a step, not the epoch."""
    fired = []
    hook = observer("a", do=lambda ctx: fired.append(ctx.step), loop_points={"step": {POST_STEP: (0, 2)}})
    manager = HookManager(hooks=[hook], loop_type="step")
    for step in range(6):
        manager.advance_step()
        manager.fire(POST_STEP, lambda: context(POST_STEP, 7, step=step))  # noqa: B023
    assert fired == [0, 1, 2]


# -- phases, nesting, cost -----------------------------------------------------------------------------------


def test_what_is_no_context_of_that_point_is_refused():
    """Before any hook is called."""
    hook = observer("a")
    manager = HookManager(hooks=[hook])
    with pytest.raises(OptionError, match="takes a RunDataContext, or a function that makes one; got an int"):
        manager.fire(POST_EPOCH, 3)
    with pytest.raises(OptionError, match=r"fire\(POST_EPOCH, ...\) was given a context of POST_STEP"):
        manager.fire(POST_EPOCH, context(POST_STEP))
    with pytest.raises(OptionError, match="Unknown hook point"):
        manager.fire([POST_EPOCH], context())
    assert hook.seen == []
    windowed = observer("b", loop_points={"epoch": {POST_EPOCH: (0, 3)}})
    with pytest.raises(OptionError, match="takes a RunDataContext"):
        HookManager(hooks=[windowed], loop_type="epoch").fire(POST_EPOCH, lambda: None)


def test_a_hook_may_fire_another_point():
    """The outer firing goes on as it was."""
    inner = observer("inner", SNAPSHOT, returns={"x": 1})
    got = []

    def outer(ctx):
        got.append(fire(manager, SNAPSHOT))
        return {"before": list(manager.get_last_metrics())}

    manager = HookManager(hooks=[observer("first", returns={"y": 1}), observer("outer", do=outer), inner])
    assert fire(manager, POST_EPOCH) == {"first/y": 1, "outer/before": ["first/y"]}
    assert got == [{"inner/x": 1}]


def test_two_threads_that_fire_one_manager_are_told_apart():
    """Each saves and puts back the random streams, which are those of the process."""

    def from_another_thread(ctx):
        with pytest.raises(LifecycleError, match="SNAPSHOT was fired while another thread fires POST_EPOCH"):
            in_thread(lambda: fire(manager, SNAPSHOT))

    manager = HookManager(hooks=[observer("outer", do=from_another_thread), observer("inner", SNAPSHOT)])
    fire(manager, POST_EPOCH)
    assert manager.hooks.fired == {"outer": 1}


def test_interventions_without_a_model_context_are_told_of_once():
    """They cannot run; observers of the firing do."""
    done = []
    manager = HookManager(
        hooks=[intervention("late", do=lambda run, model: done.append(1)), observer("a", returns={"x": 1})]
    )
    with pytest.warns(HooklineWarning, match=r"due at POST_EPOCH and do not run.*model_ctx: 'late'"):
        assert fire(manager, POST_EPOCH) == {"a/x": 1}
    assert fire(manager, POST_EPOCH) == {"a/x": 1}
    assert not done
    assert manager.hooks.fired == {"a": 2}


class Primes:
    """A schedule of one's own: anything with ``is_active`` will do."""

    def is_active(self, step):
        return step in (2, 3, 5, 7)


SCHEDULES = st.builds(
    StepSchedule,
    mode=st.sampled_from(["continual", "stride", "burst"]),
    stride=st.integers(1, 12),
    burst_length=st.integers(1, 14),
    warmup=st.integers(0, 30),
)


@settings(deadline=None)
@given(
    st.lists(SCHEDULES | st.builds(Primes), min_size=1, max_size=4), st.lists(st.booleans(), min_size=1, max_size=60)
)
@example([StepSchedule("stride", stride=3)], [True] * 8)
def test_hooks_fire_exactly_when_their_schedules_say_whichever_steps_are_fired(schedules, steps):
    """The short cut past steps at which nothing is due leaves none out; a loop may ask beforehand."""
    fired = [[] for _ in schedules]
    hooks = [
        observer(str(n), POST_STEP, do=lambda ctx, n=n: fired[n].append(ctx.step), step_schedule=s, pure=True)
        for n, s in enumerate(schedules)
    ]
    manager = HookManager(hooks=hooks)
    for step, is_fired in enumerate(steps):
        manager.advance_step()
        assert manager.has_active_step_hooks() == any(schedule.is_active(step) for schedule in schedules)
        if is_fired:
            fire(manager, POST_STEP, step=step)
    for schedule, found in zip(schedules, fired, strict=True):
        assert found == [step for step, is_fired in enumerate(steps) if is_fired and schedule.is_active(step)]


# -- a point that is named once -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.fire(POST_STEP), r"POST_STEP.*context.*epoch"),
        (lambda m: m.fire(POST_STEP, None), "context"),
        (lambda m: m.fire(POST_STEP, model=None), "the epoch at least"),
        (lambda m: m.fire(POST_STEP, context(POST_STEP), model=1), r"a context.* model"),
        (lambda m: m.fire(context(POST_STEP)), "Unknown hook point"),
        (lambda m: m.fire(POST_STEP, epoch=0, modle=None), "Did you mean 'model'"),
    ],
)
def test_a_moment_that_is_told_by_halves_or_twice_is_an_error(call, message):
    """Before a hook is called; of a point that is named once, also where no hook is due."""
    hook = observer("a", POST_STEP, POST_EPOCH)
    for manager in (HookManager(hooks=[hook]), HookManager()):
        with pytest.raises(OptionError, match=message):
            call(manager)
    assert hook.seen == []


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


def test_a_manager_that_was_made_for_one_loop_is_refused_by_the_other():
    """Its hooks would wait for points that never come."""
    with pytest.raises(OptionError, match="loop_type='step', and the epoch loop"):
        HookManager(loop_type="step").plan.use_loop("epoch")


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
    assert [manager.has_hooks_at(POST_EPOCH, epoch=e) for e in (None, 9, 10)] == [True, False, True]
    assert manager.has_hooks_at(POST_EPOCH, SNAPSHOT, epoch=9)
    assert not manager.has_hooks_at(HookPoint.PRE_STEP)
    assert manager.has_interventions()
    assert manager.has_interventions_at(SNAPSHOT)
    assert not manager.has_interventions_at(POST_EPOCH)
