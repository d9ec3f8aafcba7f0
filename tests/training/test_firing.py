"""Firing: who is called when, in which order, with what, and where the metrics go."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from helpers_hooks import context, fire, intervention, observer
from helpers_waiting import PATIENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hookline.errors import HooklineWarning, LifecycleError, MetricError, OptionError
from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.points import HookPoint
from hookline.lifecycle.run_context import RunDataContext
from hookline.lifecycle.run_phase import phase
from hookline.lifecycle.schedule import StepSchedule
from hookline.metta.relu import ReLUActivationState
from hookline.sinks.memory_sink import MemorySink
from hookline.training.manager import HookManager
from hookline.training.training_hook import TrainingHook

PRE_EPOCH, PRE_STEP, POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint


def never():
    """A factory of contexts that must not be called."""
    raise AssertionError("a context was made though nothing is due")


def test_hooks_fire_at_their_points_and_nowhere_else():
    """Metrics are named after hook and metric; what is not due is not called."""
    at_end, at_snapshot = observer("a", POST_EPOCH, returns={"x": 1}), observer("b", SNAPSHOT, returns={"x": 2})
    manager = HookManager(hooks=[at_end, at_snapshot])
    assert fire(manager, POST_EPOCH) == {"a/x": 1}
    assert fire(manager, SNAPSHOT) == {"b/x": 2}
    assert fire(manager, PRE_EPOCH) == {}
    assert (len(at_end.seen), len(at_snapshot.seen)) == (1, 1)
    assert dict(manager.fired) == {"a": 1, "b": 1}


def test_a_point_may_be_given_by_name():
    """And a wrong one is an error, not silence."""
    manager = HookManager(hooks=[observer("a", returns={"x": 1})])
    assert manager.fire("POST_EPOCH", context()) == {"a/x": 1}
    with pytest.raises(OptionError, match="Did you mean 'POST_EPOCH'"):
        manager.fire("POST_EPOC", context())


@pytest.mark.parametrize("hooks", [[], ["elsewhere"], ["scheduled"], ["outside its window"]])
def test_the_context_is_made_only_if_a_hook_is_due(hooks):
    """Whatever the reason that none is."""
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
    assert manager.receipts == ()


def test_contexts_are_made_once_for_all_hooks_and_the_models_only_for_interventions():
    """A factory is called once per firing."""
    made = []

    def make():
        made.append(context())
        return made[-1]

    one, two = observer("a"), observer("b")
    HookManager(hooks=[one, two]).fire(POST_EPOCH, make, never)
    assert len(made) == 1
    assert one.seen[0] is two.seen[0] is made[0]


def test_a_schedule_of_ones_own_is_asked_at_every_step():
    """Anything with ``is_active`` will do."""

    class Primes:
        def is_active(self, step):
            return step in (2, 3, 5, 7)

    fired = []
    hook = observer("a", POST_STEP, do=lambda ctx: fired.append(ctx.step), step_schedule=Primes())
    manager = HookManager(hooks=[hook])
    for step in range(10):
        manager.advance_step()
        fire(manager, POST_STEP, step=step)
    assert fired == [2, 3, 5, 7]


def test_schedules_concern_steps_alone():
    """At the end of an epoch a hook with a schedule is always due."""
    hook = observer("a", POST_EPOCH, step_schedule=StepSchedule(warmup=100))
    manager = HookManager(hooks=[hook])
    fire(manager, POST_EPOCH)
    assert len(hook.seen) == 1


def test_a_scheduled_hook_without_steps_is_an_error_and_not_silence():
    """Whoever forgets to advance is told so at the first step."""
    manager = HookManager(hooks=[observer("late", POST_STEP, step_schedule=StepSchedule(warmup=1))])
    with pytest.raises(LifecycleError, match=r"'late' has a step_schedule.*advance_step\(\)"):
        fire(manager, POST_STEP)


def test_windows_are_inclusive_and_by_point():
    """POST_EPOCH up to 49, SNAPSHOT from 50 on."""
    fired = []
    hook = observer(
        "a",
        do=lambda ctx: fired.append((ctx.hook_point, ctx.epoch)),
        loop_points={"epoch": {POST_EPOCH: (None, 49), SNAPSHOT: (50, None)}},
    )
    manager = HookManager(hooks=[hook], loop_type="epoch")
    for epoch in range(100):
        for point in (POST_EPOCH, SNAPSHOT):
            manager.fire(point, lambda: context(point, epoch), epoch=epoch if epoch % 2 else None)  # noqa: B023
    assert fired == [(POST_EPOCH, e) for e in range(50)] + [(SNAPSHOT, e) for e in range(50, 100)]
    assert [manager.has_hooks_at(POST_EPOCH, epoch=e) for e in (0, 49, 50)] == [True, True, False]
    assert [manager.has_hooks_at(SNAPSHOT, epoch=e) for e in (49, 50)] == [False, True]
    assert manager.has_hooks_at(SNAPSHOT)


def test_windows_count_steps_in_the_step_loop_from_step_0():
    """Step 0 is a step, not the epoch."""
    fired = []
    hook = observer("a", do=lambda ctx: fired.append(ctx.step), loop_points={"step": {POST_STEP: (0, 2)}})
    manager = HookManager(hooks=[hook], loop_type="step")
    for step in range(6):
        manager.advance_step()
        manager.fire(POST_STEP, lambda: context(POST_STEP, 7, step=step))  # noqa: B023
    assert fired == [0, 1, 2]


def test_points_depend_on_the_loop():
    """By its type; a hook without an entry for it takes no part, one without ``loop_points`` always does."""

    def hooks():
        return [
            observer("both", POST_STEP, POST_EPOCH, loop_points={"epoch": {POST_EPOCH}, "step": {POST_STEP}}),
            observer("epochs", POST_EPOCH, loop_points={"epoch": {POST_EPOCH}}),
            observer("nothing", POST_EPOCH, loop_points={"epoch": {POST_EPOCH}, "step": set()}),
            observer("plain", POST_EPOCH),
        ]

    def names(manager, point):
        return [row.hook for row in manager.plan().rows if row.point == point.name]

    by_epoch = HookManager(hooks=hooks(), loop_type="epoch")
    assert (names(by_epoch, POST_EPOCH), names(by_epoch, POST_STEP)) == (["both", "epochs", "nothing", "plain"], [])
    by_step = HookManager(hooks=hooks(), loop_type="step")
    assert (names(by_step, POST_EPOCH), names(by_step, POST_STEP)) == (["plain"], ["both"])
    assert list(by_step.plan().left_out) == ["epochs", "nothing"]
    by_hand = HookManager(hooks=hooks())
    assert names(by_hand, POST_STEP) == ["both"]
    by_hand.set_loop_type("step")
    assert names(by_hand, POST_EPOCH) == ["plain"]
    with pytest.raises(OptionError, match=r"made for the epoch loop .*the step loop"):
        by_epoch.set_loop_type("step")


@pytest.mark.parametrize("window", [(3, 1), (1, 2, 3), ("a", None), 5, "ab"])
def test_a_window_that_is_none_is_refused(window):
    """When the manager is made."""
    with pytest.raises(OptionError, match=r"'a' at POST_EPOCH.*window"):
        HookManager(hooks=[observer("a", loop_points={"epoch": {POST_EPOCH: window}})], loop_type="epoch")


def test_hooks_see_what_others_of_this_firing_have_returned():
    """Not what was returned the last time; also through ``hook.manager``."""
    seen = []

    class Reads(TrainingHook):
        hook_points = {POST_EPOCH}

        def compute(self, ctx):
            seen.append((self.manager.get_last_metrics(), self.manager.get_last_metrics(POST_EPOCH)))

    number = iter(range(10))
    manager = HookManager(hooks=[observer("a", do=lambda ctx: {"x": next(number)}), Reads()])
    fire(manager, POST_EPOCH)
    fire(manager, POST_EPOCH)
    assert seen == [({"a/x": 0}, {"a/x": 0}), ({"a/x": 1}, {"a/x": 1})]
    assert manager.get_last_metrics() == manager.get_last_metrics(POST_EPOCH) == {"a/x": 1}
    assert manager.get_last_metrics(SNAPSHOT) == {}
    manager.get_last_metrics().clear()
    assert manager.get_last_metrics() == {"a/x": 1}


def test_none_and_nothing_add_nothing():
    """A hook need not have metrics each time."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a"), observer("b", returns={})], sinks=[sink])
    assert fire(manager, POST_EPOCH) == {}
    assert sink.records == []
    assert manager.fired == {"a": 1, "b": 1}


# -- sinks and steps -----------------------------------------------------------------------------------------


def test_metrics_of_an_epoch_go_out_at_once_on_the_host():
    """Numbers of every library; tensors as numbers, whatever they are in, also those that are not simply in a row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give quantized tensors up
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
    found = {
        "number": (1.5, 1.5),
        "long": (np.longdouble(1.5), 1.5),
        "longs": (np.array([1.5], dtype=np.longdouble), [1.5]),
        "int": (np.int32(3), 3),
        "yes": (np.bool_(True), True),
        "tensor": (torch.tensor(2.5, dtype=torch.float64), 2.5),
        "half": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        "vector": (torch.tensor([1, 2]), [1, 2]),
        "sparse": (torch.eye(2).to_sparse(), [[1.0, 0.0], [0.0, 1.0]]),
        "quantized": (quantized, [1.0, 1.0]),
        "list": ([torch.tensor(1.0), 2], [1.0, 2]),
        "nested": ({"a": {"b": torch.tensor(True)}}, {"a": {"b": True}}),
        "nan": (float("nan"), None),
        "words": ("phase two", "phase two"),
    }
    sink = MemorySink()
    returns = {name: returned for name, (returned, _) in found.items()}
    fire(HookManager(hooks=[observer("a", returns=returns)], sinks=[sink]), POST_EPOCH, epoch=3)
    (record,) = sink.records
    assert (record.epoch, record.hook_point) == (3, POST_EPOCH)
    nan = record.metrics.pop("a/nan")
    assert nan != nan
    assert record.metrics == {f"a/{name}": expected for name, (_, expected) in found.items() if name != "nan"}


def test_metrics_of_steps_are_buffered_with_their_steps_and_go_out_when_flushed():
    """As lists, PRE_STEP and POST_STEP apart, each value with its step; nothing is left."""
    sink = MemorySink()
    every, third = (observer(name, PRE_STEP, POST_STEP, do=lambda ctx: {"x": ctx.step}) for name in ("a", "b"))
    third.step_schedule = StepSchedule("stride", stride=3)
    manager = HookManager(hooks=[every, third], sinks=[sink])
    for step in range(4):
        manager.advance_step()
        fire(manager, PRE_STEP, step=step)
        fire(manager, POST_STEP, step=step)
    assert sink.records == []
    manager.flush_step_metrics(epoch=7)
    assert [(record.hook_point, record.epoch) for record in sink.records] == [(PRE_STEP, 7), (POST_STEP, 7)]
    for record in sink.records:
        assert record.metrics == {"a/x": [0, 1, 2, 3], "b/x": [0, 3]}
        assert record.metrics["a/x"].steps == [0, 1, 2, 3]
        assert record.metrics["b/x"].steps == [0, 3]
    manager.flush_step_metrics(epoch=8)
    manager.flush_sinks()
    assert len(sink.records) == 2


def test_what_is_buffered_at_the_end_goes_out_with_the_sinks():
    """Nothing lost."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", POST_STEP, returns={"x": 1})], sinks=[sink])
    manager.advance_step()
    fire(manager, POST_STEP)
    manager.flush_sinks()
    assert sink.latest == {"a/x": [1]}


def test_what_nobody_has_flushed_is_placed_where_the_run_was():
    """By the epoch, not by the number of steps."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", POST_STEP, returns={"x": 1})], sinks=[sink])
    for step in range(6):
        manager.advance_step()
        fire(manager, POST_STEP, epoch=step // 3)
    manager.flush_sinks()
    assert [record.epoch for record in sink.records] == [1]


def test_a_tensor_is_kept_as_it_was_when_it_was_returned():
    """Though it is a weight, or a view of one, that goes on changing until the flush."""
    sink = MemorySink()
    model = nn.Linear(1, 1)
    buffer = torch.zeros(())

    def returned(ctx):
        return {"bias": model.bias, "view": model.weight[0, 0], "buffer": buffer}

    manager = HookManager(hooks=[observer("a", POST_STEP, do=returned)], sinks=[sink])
    for step in range(3):
        with torch.no_grad():
            model.bias.fill_(step)
            model.weight.fill_(10 * step)
            buffer.fill_(100 * step)
        manager.advance_step()
        fire(manager, POST_STEP)
    manager.flush_step_metrics(0)
    assert sink.latest == {
        "a/bias": [[0.0], [1.0], [2.0]],
        "a/view": [0.0, 10.0, 20.0],
        "a/buffer": [0.0, 100.0, 200.0],
    }


def test_step_metrics_keep_no_graph_alive():
    """A loss that is returned as it is does not hold on to the activations of its step."""
    weight = torch.ones((), requires_grad=True)
    manager = HookManager(hooks=[observer("a", POST_STEP, do=lambda ctx: {"loss": weight * 2})])
    manager.advance_step()
    metrics = fire(manager, POST_STEP)
    assert not metrics["a/loss"].requires_grad


def test_the_loops_own_metrics_go_out_beside_those_of_hooks():
    """At once, with the step they belong to."""
    sink = MemorySink()
    HookManager(sinks=[sink]).emit_metrics({"eval/loss": torch.tensor(0.5)}, 12, SNAPSHOT)
    assert [(r.metrics, r.epoch, r.hook_point) for r in sink.records] == [({"eval/loss": 0.5}, 12, SNAPSHOT)]


@pytest.mark.parametrize(("loop_type", "place"), [(None, 4), ("epoch", 4), ("step", 0)])
def test_a_record_is_placed_by_epoch_or_in_the_step_loop_by_step(loop_type, place):
    """Step 0 included."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", SNAPSHOT, returns={"x": 1})], sinks=[sink], loop_type=loop_type)
    fire(manager, SNAPSHOT, epoch=4, step=0)
    assert [record.epoch for record in sink.records] == [place]


class Raises(MemorySink):
    def emit(self, metrics, epoch, hook_point):
        raise OSError("disk full")

    def set_run_context(self, **context):
        raise OSError("disk full")


class Greedy(MemorySink):
    def emit(self, metrics, epoch, hook_point):
        metrics.clear()


def test_a_sink_that_raises_does_not_starve_the_others_and_the_run_goes_on():
    """Warned of once, counted each time; the others get theirs even if a warning is an error."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", returns={"x": 1})], sinks=[Raises(), Raises(), Greedy(), sink])
    with pytest.warns(HooklineWarning) as caught:
        fire(manager, POST_EPOCH)
    assert [str(warning.message).partition(" (")[0] for warning in caught] == [
        "Raises could not take metrics",
        "Raises 2 could not take metrics",
    ]
    fire(manager, POST_EPOCH)
    manager.flush_sinks()  # else it would be some time until they are tried again
    assert manager.sink_errors == {"Raises": 2, "Raises 2": 2}
    assert [record.metrics for record in sink.records] == [{"a/x": 1}] * 2


def test_a_sink_that_cannot_begin_or_flush_does_not_take_the_run_down():
    """Nor one that has neither method."""

    class Bare:
        def emit(self, metrics, epoch, hook_point):
            pass

    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", returns={"x": 1})], sinks=[Bare(), Raises(), sink])
    with pytest.warns(HooklineWarning, match="begin another run"):
        manager.set_run_context(strategy="s")
    manager.flush_sinks()
    fire(manager, POST_EPOCH)
    assert sink.records[0].context == {"strategy": "s"}


@pytest.mark.parametrize("sink", [None, 3, MemorySink, "a.jsonl"])
def test_what_is_no_sink_is_refused(sink):
    """When the manager is made."""
    with pytest.raises(OptionError, match="sinks= takes objects with emit"):
        HookManager(sinks=[sink])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"x": object()}, r"'bad' returned an object as 'x', which no sink can write"),
        ({"x": {1, 2}}, r"a set as 'x'"),
        ({"x": [1, nn.Linear(1, 1)]}, r"a Linear as 'x'"),
        ({"x": 1j}, r"a complex as 'x'"),
        ({"x": torch.tensor(1j)}, r"a complex tensor as 'x'"),
        ({"x": torch.ones(1, device="meta")}, r"a tensor without values"),
        ({"x": {None: 1}}, r"a dictionary with a NoneType as a key"),
        ({3: 1.0}, r"by the name 3; names of metrics are strings"),
        (1.0, r"'bad' returned a float; metrics are a dictionary"),
        ([("x", 1)], r"'bad' returned a list"),
    ],
)
def test_a_metric_that_no_sink_can_write_is_an_error_that_names_the_hook(returned, words):
    """Those of other hooks go out nevertheless."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("good", returns={"x": 1}), observer("bad", returns=returned)], sinks=[sink])
    with pytest.raises(MetricError, match=words):
        fire(manager, POST_EPOCH)
    assert sink.latest == {"good/x": 1}


# -- phases, nesting, cost -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pure", [False, True])
def test_what_a_hook_computes_is_not_training(pure):
    """Trackers do not count a forward that an observer makes, also one that draws no random number."""
    phases = []
    manager = HookManager(hooks=[observer("a", do=lambda ctx: phases.append(phase()), pure=pure)])
    fire(manager, POST_EPOCH)
    assert phases == ["intervention"]
    assert phase() == "train"


def test_a_manager_fires_for_one_thread_at_a_time():
    """A second thread is told so, instead of being taken for part of the first one's firing; later it may fire."""
    began, may_end = threading.Event(), threading.Event()

    def wait(ctx):
        began.set()
        assert may_end.wait(PATIENCE)
        return {"x": 1}

    manager = HookManager(hooks=[observer("slow", do=wait), observer("other", SNAPSHOT, returns={"y": 2})])
    found = []
    thread = threading.Thread(target=lambda: found.append(fire(manager, POST_EPOCH)))
    thread.start()
    assert began.wait(PATIENCE)
    try:
        with pytest.raises(LifecycleError, match="SNAPSHOT was fired while another thread is firing POST_EPOCH"):
            fire(manager, SNAPSHOT)
    finally:
        may_end.set()
        thread.join()
    assert found == [{"slow/x": 1}]
    assert fire(manager, SNAPSHOT) == {"other/y": 2}


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


def test_a_hook_may_mark_sections_though_the_loop_knows_of_no_profiler():
    """And a profiler that the loop has given is kept."""

    def compute(ctx):
        with ctx.profiler.section("svd"):
            return {"mine": ctx.profiler is manager.profiler}

    manager = HookManager(hooks=[observer("a", do=compute)], profile_hooks=True)
    assert fire(manager, POST_EPOCH) == {"a/mine": True}
    assert manager.profiler.report()["svd"]["count"] == 1
    assert fire(manager, POST_EPOCH, profiler=HookManager(profile_hooks=True).profiler) == {"a/mine": False}


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
    assert manager.fired == {"a": 2}


def test_firing_with_nothing_due_grows_nothing():
    """A hundred thousand times, with hooks that wait for other points, steps and epochs."""
    schedule = StepSchedule("stride", stride=10**7, warmup=1)
    manager = HookManager(
        hooks=[observer("a", SNAPSHOT), observer("b", POST_STEP, step_schedule=schedule)], loop_type="epoch"
    )

    def many(times):
        for _ in range(times):
            manager.advance_step()
            manager.fire(PRE_STEP, never)
            manager.fire(POST_STEP, never)

    many(100)
    gc.collect()
    before = sys.getallocatedblocks()
    many(100_000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 50


def test_a_firing_that_is_over_frees_its_batch_at_once(caplog):
    """Of an error that is passed over too; no search for circles: a batch on a GPU may be one too many until then."""
    caplog.set_level(logging.CRITICAL + 1, "hookline")  # what pytest keeps of the log would hold on to the error

    class Fails(TrainingHook):
        hook_points = frozenset({POST_EPOCH})

        def compute(self, ctx):
            raise ValueError("no")

    kept = observer("a", returns={"x": 1})
    kept.seen = deque(maxlen=0)
    manager = HookManager(hooks=[kept, Fails()], on_error="warn")
    batch = torch.ones(3)
    alive = weakref.ref(batch)
    gc.disable()
    try:
        with pytest.warns(HooklineWarning, match="'Fails' raised"):
            fire(manager, POST_EPOCH, batch_data=batch)
        del batch
        assert alive() is None
    finally:
        gc.enable()
    assert [receipt.error for receipt in manager.receipts] == ["", "ValueError: no"]


def test_where_warnings_are_errors_every_sink_has_its_metrics_first():
    """The warning comes when all have had their turn."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", returns={"x": 1})], sinks=[Raises(), sink])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HooklineWarning, match="Raises could not take metrics"):
            fire(manager, POST_EPOCH)
    assert sink.latest == {"a/x": 1}


def test_where_warnings_are_errors_every_sink_is_flushed_first():
    """Though the one before it could not take what was buffered."""
    flushed = []

    class Flushes(MemorySink):
        def flush(self):
            flushed.append(len(self.records))

    manager = HookManager(hooks=[observer("a", POST_STEP, returns={"x": 1})], sinks=[Raises(), Flushes()])
    manager.advance_step()
    fire(manager, POST_STEP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HooklineWarning, match="Raises could not take metrics"):
            manager.flush_sinks()
    assert flushed == [1]


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            StepSchedule,
            mode=st.sampled_from(["continual", "stride", "burst"]),
            stride=st.integers(1, 12),
            burst_length=st.integers(1, 14),
            warmup=st.integers(0, 30),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.booleans(), min_size=1, max_size=60),
)
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


def test_a_context_alone_says_which_point_it_is():
    """With a model context beside it, or not; the point may be a name in it."""
    seen = []
    hook, edit = (
        observer("a", POST_STEP, returns={"x": 1}),
        intervention("b", SNAPSHOT, do=lambda run, m: seen.append(m)),
    )
    manager = HookManager(hooks=[hook, edit])
    model = nn.Linear(2, 1)
    ctx = context(POST_STEP, 3, model=model)
    assert manager.fire(ctx) == {"a/x": 1}
    assert manager.fire(RunDataContext("POST_STEP", 4)) == {"a/x": 1}
    assert manager.fire(POST_STEP, context(POST_STEP, 5), None) == {"a/x": 1}  # the point twice
    assert manager.fire(POST_STEP, run_ctx=context(POST_STEP, 6)) == {"a/x": 1}
    assert [shown.epoch for shown in hook.seen] == [3, 4, 5, 6]
    assert hook.seen[0] is ctx
    model_ctx = ModelDataContext(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.fire(context(SNAPSHOT), model_ctx)
    manager.fire(context(SNAPSHOT), model_ctx=lambda: model_ctx)
    assert seen == [model_ctx, model_ctx]


def test_fields_make_the_context_of_the_point_if_a_hook_is_due():
    """The same that a context by hand would be; where nothing is due none is made."""
    hook = observer("a", POST_STEP, returns={"x": 1})
    manager = HookManager(hooks=[hook])
    model = nn.Linear(2, 1)
    assert manager.fire(POST_STEP, epoch=2, model=model, step=7, loss=torch.tensor(0.5)) == {"a/x": 1}
    (ctx,) = hook.seen
    assert (ctx.hook_point, ctx.epoch, ctx.step, ctx.loss) == (POST_STEP, 2, 7, 0.5)
    assert ctx.model is model
    assert manager.fire("POST_STEP", epoch=0) == {"a/x": 1}
    assert manager.fire(POST_EPOCH, epoch=0) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: m.fire(POST_STEP),
            r"fire\(POST_STEP, ...\) was given no context, so .* fire\(POST_STEP, epoch=epoch",
        ),
        (lambda m: m.fire(POST_STEP, None), "was given no context"),
        (lambda m: m.fire(POST_STEP, model=None), "the epoch at least"),
        (lambda m: m.fire(POST_STEP, epoch=0, modle=1), "has no field 'modle'; nearest: 'model'. It has step, model, "),
        (lambda m: m.fire(POST_STEP, context(POST_STEP), model=1), r"a context and fields of one beside it \(model\)"),
        (lambda m: m.fire(context(POST_STEP), model=1), "a context of POST_STEP and more than a model_ctx"),
        (lambda m: m.fire(context(POST_STEP), context(POST_EPOCH)), "more than a model_ctx"),
        (lambda m: m.fire(POST_EPOCH, context(POST_STEP)), "was given a context of POST_STEP"),
        (lambda m: m.fire(lambda: context(POST_STEP)), "Unknown hook point"),
    ],
)
def test_a_moment_that_is_told_by_halves_or_twice_is_an_error(call, message):
    """Before a hook is called; of a point that is named once, also where no hook is due."""
    hook = observer("a", POST_STEP, POST_EPOCH)
    for manager in (HookManager(hooks=[hook]), *([] if "was given a context of" in message else [HookManager()])):
        with pytest.raises(OptionError, match=message):
            call(manager)
    assert hook.seen == []


# -- what is given as hooks ----------------------------------------------------------------------------------------


class NoHook:
    """A class that is none of ours."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (type(observer("a")), r"got the class Observer: write hooks=\[Observer\(\)\]\."),
        (NoHook, r"got the class NoHook: write hooks=\[NoHook\(\)\]"),
        ([NoHook], r"got the class NoHook, which does not derive from TrainingHook: write class NoHook\(hookline.Tr"),
        ([ReLUActivationState], r"got the class ReLUActivationState: call it, hooks=\[ReLUActivationState\(\)\]\."),
        ([NoHook()], "got a NoHook"),
        (observer("a"), "put an Observer into one"),
        ([3], "hooks= takes TrainingHook objects or classes, trackers and watches; got an int"),
        ([lambda ctx: {}], "got a function"),
        ([nn.Linear(1, 1)], "got a Linear"),
        ([None], "got a NoneType"),
        (["norms"], r"got a str \('norms'\); hooks by name go into hook_names="),
    ],
)
def test_what_is_no_list_of_hooks_is_named(given, message):
    """A class by its name, with what to write."""
    with pytest.raises(OptionError, match=message):
        HookManager(hooks=given)
