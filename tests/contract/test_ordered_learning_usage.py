"""OrderedLearning's own examples, with only imports and placeholders changed, in the loops they are meant for.

Its pictures too: the order of firing within an epoch, and what one firing at a snapshot does, step by step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_loops import rich_experiment

import hookline as hl
from hookline import (
    HookManager,
    HookPoint,
    HookRegistry,
    InterventionHook,
    MetricSink,
    RunDataContext,
    TrainingHook,
    epoch_loop,
    step_loop,
)
from hookline.lifecycle import DebugInterventionHook


def test_loop_points_by_type_of_loop():
    """The source's training metrics: at the end of epochs in one loop, after steps in the other."""

    class TrainingMetricsHook(TrainingHook):
        name = "training_metrics"
        hook_points = {HookPoint.POST_STEP, HookPoint.POST_EPOCH}
        loop_points = {"epoch": {HookPoint.POST_EPOCH}, "step": {HookPoint.POST_STEP}}

        def compute(self, ctx: RunDataContext) -> dict[str, Any]:
            return {"loss": ctx.loss, "learning_rate": ctx.lr}

    sink = hl.sinks.MemorySink()
    epoch_loop(
        rich_experiment(batches=3, evaluate=None),
        epochs=2,
        manager=HookManager(hooks=[TrainingMetricsHook], sinks=[sink]),
    )
    assert [record.hook_point.name for record in sink.records] == ["POST_EPOCH", "POST_EPOCH"]
    assert sink.records[0].metrics["training_metrics/learning_rate"] == 0.01
    sink.clear()
    step_loop(
        rich_experiment(batches=3, evaluate=None),
        steps=4,
        manager=HookManager(hooks=[TrainingMetricsHook], sinks=[sink]),
    )
    assert {record.hook_point.name for record in sink.records} == {"POST_STEP"}
    assert sum(len(record.metrics["training_metrics/loss"]) for record in sink.records) == 4


def test_the_firing_order_within_one_epoch():
    events: list[str] = []

    class Drawn(TrainingHook):
        hook_points = set(HookPoint)

        def compute(self, ctx):
            events.append(ctx.hook_point.name)
            return {"one": 1}

    class Flushes(MetricSink):
        def emit(self, metrics, epoch, hook_point):
            if hook_point is HookPoint.POST_STEP:
                events.append("flush_step_metrics()")

    class Scheduler:
        def step(self):
            events.append("scheduler.step()")

    experiment = rich_experiment(batches=3, evaluate=None)
    experiment.train_step = lambda batch: events.append("train_step()")
    experiment.scheduler = Scheduler()
    experiment.evaluate = lambda model: events.append("evaluate()")
    epoch_loop(experiment, epochs=1, manager=HookManager(hooks=[Drawn()], sinks=[Flushes()]), snapshot_every=1)
    assert events == [
        "PRE_EPOCH",
        *["PRE_STEP", "train_step()", "POST_STEP"] * 3,
        "flush_step_metrics()",
        "scheduler.step()",
        "evaluate()",
        "POST_EPOCH",
        "SNAPSHOT",
    ]


@pytest.mark.parametrize("restores", [True, False])
def test_the_typical_intervention_pattern(restores):
    """Save, work, restore and discard in finally; one that forgets to restore is caught."""

    class Typical(InterventionHook):
        hook_points = {HookPoint.POST_EPOCH}
        needs_grads = needs_pre_epoch_state = True

        def intervene(self, run_ctx, model_ctx):
            token = model_ctx.save_checkpoint(full=True)
            try:
                model_ctx.restore_pre_epoch()
                shuffled = model_ctx.run_training_epoch(model_ctx.get_shuffled_loader(), step=True)
                model_ctx.apply_perturbation(shuffled, -1.0)
                whole = model_ctx.compute_gradients()
                metrics = {
                    "cosine": torch.cosine_similarity(
                        run_ctx.accumulated_grads["0.weight"].flatten(), shuffled["0.weight"].flatten(), dim=0
                    ),
                    "norm": whole["0.weight"].norm(),
                    "device": str(model_ctx.device),
                    "layers": len(model_ctx.model),
                }
            finally:
                if restores:
                    model_ctx.restore_checkpoint(token)
                    model_ctx.discard_checkpoint(token)
            return metrics

    def train(*hooks):
        experiment, sink = rich_experiment(batches=3, evaluate=None), hl.sinks.MemorySink()
        epoch_loop(experiment, epochs=3, manager=HookManager(hooks=hooks, sinks=[sink]))
        return experiment.model[0].weight.detach(), sink.latest

    plain, _ = train()
    weight, metrics = train(Typical())
    assert torch.equal(plain, weight)
    assert -1 <= metrics["Typical/cosine"] <= 1
    assert metrics["Typical/norm"] > 0
    assert (metrics["Typical/device"], metrics["Typical/layers"]) == ("cpu", 5)


def test_a_sink_of_ones_own():
    """Emit, set_run_context, flush: called with metrics, at the start of a run, at its end."""

    class Dashboard(MetricSink):
        def __init__(self):
            self.calls: list[Any] = []

        def emit(self, metrics: dict[str, Any], epoch: int, hook_point: HookPoint):
            self.calls.append((hook_point, epoch, metrics))

        def set_run_context(self, **kwargs):  # called on strategy change
            self.calls.append(kwargs)

        def flush(self):  # called at experiment end
            self.calls.append("flush")

    class Constant(TrainingHook):
        name = "constant"
        hook_points = {HookPoint.POST_EPOCH}

        def compute(self, ctx):
            return {"one": 1}

    sink = Dashboard()
    manager = HookManager(hooks=[Constant()], sinks=[sink])
    for strategy in ("stride", "random"):
        epoch_loop(
            rich_experiment(batches=3, evaluate=None), epochs=1, manager=manager, run_context={"strategy": strategy}
        )
    emitted = (HookPoint.POST_EPOCH, 0, {"constant/one": 1})
    assert sink.calls == [{"strategy": "stride"}, emitted, "flush", {"strategy": "random"}, emitted, "flush"]


def test_hook_sets_and_keywords(own_registry):
    """Groups by name; "all" leaves hooks for debugging out, "with_debug" has them."""

    def define(kind: type[TrainingHook], hook_name: str) -> None:
        methods = {"compute": lambda self, ctx: None, "intervene": lambda self, run_ctx, model_ctx: None}
        body = {"name": hook_name, "hook_points": {HookPoint.POST_EPOCH}, **methods}
        HookRegistry.register(type(f"Hook_{hook_name}", (kind,), body))

    define(TrainingHook, "some_observer")
    define(InterventionHook, "some_intervention")
    define(DebugInterventionHook, "some_validator")
    hook_sets = {"nothing": [], "light": ["some_observer"], "everything": ["some_observer", "some_intervention"]}
    for name, hooks in hook_sets.items():
        HookRegistry.add_group(name, hooks)
    assert HookRegistry.resolve("nothing") == []
    assert HookRegistry.resolve(["light", "everything"]) == ["some_observer", "some_intervention"]
    assert {"some_observer", "some_intervention"} <= set(HookRegistry.resolve("all"))
    assert "some_validator" not in HookRegistry.resolve("all")
    assert "some_validator" in HookRegistry.resolve(["all", "with_debug"])
    assert "some_intervention" not in HookRegistry.resolve("observers")


def test_one_snapshot_cycle():
    """Observers, then a save, interventions, restored; random streams back; sinks; then kept for others to read."""
    events: list[str] = []
    experiment = rich_experiment(batches=3, evaluate=None)
    streams = {}

    class Looks(TrainingHook):
        name = "looks"
        hook_points = {HookPoint.SNAPSHOT}

        def compute(self, ctx):
            torch.rand(1)
            events.append("observer")
            return {"metric": 1}

    class Does(InterventionHook):
        hook_points = {HookPoint.SNAPSHOT}

        def __init__(self, name):
            self.name = name

        def intervene(self, run_ctx, model_ctx):
            assert self.manager.get_last_metrics()["looks/metric"] == 1
            assert experiment.model[0].weight.abs().max() < 10  # of what the one before did nothing is left
            with torch.no_grad():
                experiment.model[0].weight.fill_(100.0)
            events.append(f"intervention {self.name}, save {model_ctx.guard.num_saves}")
            return {"metric": 2}

    class Last(MetricSink):
        def emit(self, metrics, epoch, hook_point):
            streams["after"] = torch.get_rng_state()
            events.append(f"sink {hook_point.name}: {', '.join(metrics)}")

    experiment.evaluate = lambda model: streams.update(before=torch.get_rng_state())
    manager = HookManager(hooks=[Does("first"), Looks(), Does("second")], sinks=[Last()])
    epoch_loop(experiment, epochs=1, manager=manager)
    assert events == [
        "observer",
        "intervention first, save 1",
        "intervention second, save 1",
        "sink SNAPSHOT: looks/metric, first/metric, second/metric",
    ]
    assert torch.equal(streams["before"], streams["after"])
    expected = {"looks/metric": 1, "first/metric": 2, "second/metric": 2}
    assert manager.get_last_metrics(HookPoint.SNAPSHOT) == expected
    assert [receipt.hook for receipt in manager.hooks.receipts] == ["looks", "first", "second"]
