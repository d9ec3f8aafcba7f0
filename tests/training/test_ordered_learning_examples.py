"""OrderedLearning's examples of hooks run as they stand there, with only import lines and placeholders changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline.guard.model_context import ModelDataContext
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import DebugInterventionHook, InterventionHook, TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.lifecycle.registry import HookRegistry
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint

some_value = 0.5


pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture
def run():
    """A model, what hooks are shown of it, and what interventions get hold of."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
    tools = ModelDataContext(
        model, optimizer, loader=loader, loss_fn=lambda model, batch: model(batch[0]).square().mean()
    )
    return model, lambda point: RunDataContext(point, 0, model=model), tools


def test_loop_type_filtering():
    """A hook that names a point for each type of loop has that point in that loop, and no other."""

    class TrainingMetricsHook(TrainingHook):
        hook_points = {HookPoint.POST_STEP, HookPoint.POST_EPOCH}
        loop_points = {
            "epoch": {HookPoint.POST_EPOCH},
            "step": {HookPoint.POST_STEP},
        }

        def compute(self, ctx):
            return {}

    for loop_type, point in (("epoch", "POST_EPOCH"), ("step", "POST_STEP")):
        rows = HookManager(hooks=[TrainingMetricsHook()], loop_type=loop_type).plan.rows
        assert [row.point for row in rows] == [point]


def test_registration_and_groups(run):
    """``@HookRegistry.register`` as it is written; the class is stored and not an instance."""

    @HookRegistry.register
    class MyHook(TrainingHook):
        name = "my_hook"
        hook_points = {HookPoint.POST_EPOCH}

        def compute(self, ctx):
            return {"my_metric": some_value}

    hook_sets = {"none": [], "minimal": ["my_hook"]}
    for name, hooks in hook_sets.items():
        HookRegistry.add_group(name, hooks)
    _, ctx, _ = run
    sink = MemorySink()
    HookManager(["minimal"], sinks=[sink]).fire(HookPoint.POST_EPOCH, ctx(HookPoint.POST_EPOCH))
    assert sink.latest == {"my_hook/my_metric": 0.5}
    assert not HookManager(["none"]).hooks


def test_selective_intervention(run):
    """``compute`` at POST_EPOCH, ``intervene`` at SNAPSHOT, with the pattern of a well-behaved intervention."""
    model, ctx, tools = run

    class MyHook(InterventionHook):
        hook_points = {HookPoint.POST_EPOCH, HookPoint.SNAPSHOT}
        intervention_points = {HookPoint.SNAPSHOT}  # only intervene at SNAPSHOT

        def compute(self, ctx):
            # Called at POST_EPOCH (observer mode)
            return {"lightweight_metric": some_value}

        def intervene(self, run_ctx, model_ctx):
            # Called at SNAPSHOT (intervention mode, with ModelDataContext)
            token = model_ctx.save_checkpoint(full=True)
            try:
                model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
                metrics = {"moved": (model_ctx.model.weight - before).norm()}
            finally:
                model_ctx.restore_checkpoint(token)
                model_ctx.discard_checkpoint(token)
            return metrics

    before = model.weight.detach().clone()
    manager = HookManager(hooks=[MyHook()])
    assert manager.fire(HookPoint.POST_EPOCH, ctx(HookPoint.POST_EPOCH), tools) == {"MyHook/lightweight_metric": 0.5}
    assert manager.fire(HookPoint.SNAPSHOT, ctx(HookPoint.SNAPSHOT), tools)["MyHook/moved"] > 0
    assert torch.equal(model.weight, before)


def test_an_intervention_that_forgets_to_restore(run):
    """What a hook leaves behind is undone, though it restored nothing itself."""
    model, ctx, tools = run

    class Forgetful(DebugInterventionHook):
        hook_points = {HookPoint.SNAPSHOT}

        def intervene(self, run_ctx, model_ctx):
            model_ctx.apply_perturbation({"weight": torch.ones(1, 2)}, 10.0)
            return {"weight": model_ctx.model.weight.mean()}

    before = model.weight.detach().clone()
    metrics = HookManager(hooks=[Forgetful()]).fire(HookPoint.SNAPSHOT, ctx(HookPoint.SNAPSHOT), tools)
    assert metrics["Forgetful/weight"] == pytest.approx(float(before.mean()) + 10, rel=1e-5)
    assert torch.equal(model.weight, before)
