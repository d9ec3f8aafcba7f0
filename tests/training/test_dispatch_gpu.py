"""Firing on a GPU: nothing waits for it before the flush, state is offloaded, streams are kept; skipped without one."""

from __future__ import annotations

import pytest
import torch
from helpers_hooks import fire, observer

from hookline.lifecycle.hook import TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # torch says once that the mode is new; as an error, that would leave the mode on for every test after.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
POST_STEP, POST_EPOCH = HookPoint.POST_STEP, HookPoint.POST_EPOCH


def test_steps_do_not_wait_for_the_gpu_and_the_flush_has_every_value():
    """Tensors of several dtypes and shapes cross together, each as it was at its step."""
    sink = MemorySink()
    x = torch.zeros(3, device="cuda")

    def compute(ctx):
        return {"first": x[0], "all": x, "half": x.sum().half(), "int": (x > 0).sum(), "host": torch.tensor(ctx.step)}

    manager = HookManager(hooks=[observer("a", POST_STEP, do=compute)], sinks=[sink])
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in range(4):
            x += 1
            manager.advance_step()
            fire(manager, POST_STEP, step=step, loss=x[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    manager.flush_step_metrics(0)
    assert sink.latest == {
        "a/first": [1.0, 2.0, 3.0, 4.0],
        "a/all": [[step + 1.0] * 3 for step in range(4)],
        "a/half": [3.0, 6.0, 9.0, 12.0],
        "a/int": [3, 3, 3, 3],
        "a/host": [0, 1, 2, 3],
    }


class Window(TrainingHook):
    """Keeps the last tensors on the GPU."""

    hook_points = frozenset({POST_STEP, POST_EPOCH})

    def __init__(self):
        self.total = torch.zeros(8, device="cuda")
        self.where = []

    def compute(self, ctx):
        self.where.append(self.total.device.type)
        self.total = self.total + torch.ones(8, device="cuda")
        return {"total": self.total.sum()}

    def get_state_tensors(self):
        return {"total": self.total}

    def set_state_tensors(self, tensors):
        self.total = tensors["total"]


def test_offloaded_state_is_on_the_cpu_between_firings_and_metrics_are_the_same():
    """Also at points that are fired without a model, and through a saved state."""
    found = {}
    for offload in (False, True):
        hook, sink = Window(), MemorySink()
        manager = HookManager(hooks=[hook], sinks=[sink], offload_state=offload)
        for _ in range(3):
            manager.advance_step()
            fire(manager, POST_STEP)
            assert hook.total.device.type == ("cpu" if offload else "cuda")
            fire(manager, POST_EPOCH)
        state = manager.state_dict()
        assert state["hooks"]["Window"]["total"].device.type == "cuda"
        again = HookManager(hooks=[Window()], sinks=[sink], offload_state=offload)
        again.load_state_dict(state)
        fire(again, POST_EPOCH)
        again.flush_sinks()
        assert set(hook.where) == {"cuda"}
        found[offload] = [record.metrics for record in sink.records]
    assert found[False] == found[True]
