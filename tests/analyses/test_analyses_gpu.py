"""The observers on a GPU: no step waits for the device, and the run is the run without; else skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_analyses import OBSERVERS, context, made, new_manager, random_grads, token_experiment
from helpers_loops import left_by
from helpers_training import differences

import hookline as hl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # of torch, once, that it does not see all
]


def run(manager: hl.HookManager | None) -> dict[str, Any]:
    """Four epochs on the device, with batches that the loss moves there."""
    experiment = token_experiment(evaluate=None)
    experiment.to("cuda")
    hl.epoch_loop(experiment, epochs=5, manager=manager, snapshot_every=2)
    return {name: value.cpu() for name, value in left_by(experiment).items()}


@pytest.fixture(autouse=True)
def batches_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the experiment is written for the CPU."""
    import torch.nn.functional as F

    real = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda logits, target: real(logits, target.to(logits.device)))
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(
        torch.nn.Embedding, "forward", lambda table, tokens: forward(table, tokens.to(table.weight.device))
    )


def test_a_run_with_all_observers_is_the_run_without():
    """Also with state offloaded, which says the same."""
    plain, one, other = run(None), hl.sinks.MemorySink(), hl.sinks.MemorySink()
    assert differences(plain, run(new_manager(OBSERVERS, one))) == []
    assert differences(plain, run(new_manager(OBSERVERS, other, offload_state=True))) == []
    assert one.latest.keys() == other.latest.keys()
    assert {name.partition("/")[0] for name in one.latest} >= set(OBSERVERS)


@pytest.mark.parametrize("name", ["training_metrics", "batch_dynamics", "path_length", "training_diagnostics"])
def test_no_step_waits_for_the_device(name):
    """By torch's own count; a report waits, which is the negative control."""
    model = token_experiment().model.cuda()
    for key, grad in random_grads(model, 1).items():
        dict(model.named_parameters())[key].grad = grad.cuda()
    hook = made(name)
    hook.start(model)
    loss = torch.tensor(1.0, device="cuda")
    ctx = [context(model, hl.HookPoint.POST_STEP, loss=loss, lr=0.1) for _ in range(70)]
    hook.compute(ctx[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in ctx[1:]:
            hook.compute(each)
        if name in ("batch_dynamics", "training_diagnostics"):
            with pytest.raises(RuntimeError, match="synchroniz"):
                hook.compute(context(model, hl.HookPoint.POST_EPOCH))
    finally:
        torch.cuda.set_sync_debug_mode("default")
