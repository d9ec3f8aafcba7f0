"""The Trainer under DDP: two processes with hooks end as two without."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from helpers_hosts import metrics_of
from helpers_ranks import RankTests
from helpers_trainer import make_trainer, tiny_gpt2, tokens

import hookline as hl
from hookline.distributed import gather_objects, this_rank
from hookline.integrations.transformers import HooklineCallback
from hookline.sinks import MemorySink

on_ranks = RankTests(__file__, initialize=False, imports=["transformers.trainer"])


class GradientLengths(hl.TrainingHook):
    """The length of the gradient of each parameter, by its name; DDP has averaged them."""

    hook_points = {hl.HookPoint.POST_STEP}

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        return {name: parameter.grad.norm() for name, parameter in ctx.model.named_parameters()}


class OneEpochMore(hl.InterventionHook):
    """Trains on, with the collectives of DDP; it is undone on every rank."""

    hook_points = {hl.HookPoint.POST_EPOCH}

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, Any]:
        model_ctx.run_training_epoch()
        return {"weight": model_ctx.model.transformer.wte.weight.norm()}


def _train(folder: Path, *callbacks: Any, model: Any = None) -> tuple[str, str, int]:
    trainer = make_trainer(folder, *callbacks, model=model, train_dataset=tokens(80), ddp_backend="gloo")
    trainer.train()
    digest = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest(), type(trainer.model_wrapped).__name__, trainer.state.global_step


@on_ranks.case
def test_under_ddp_the_run_stays_the_same_and_names_are_plain():
    """20 steps: equal weights with and without hooks, on both ranks; names without ``module.``; rank 0 writes."""
    bare = _train(Path("bare"))
    sink, model = MemorySink(), tiny_gpt2()
    watch = hl.watch(model, "transformer.h.#", every=2)
    hooks = [GradientLengths(), OneEpochMore(), watch]
    hooked = _train(Path("hooked"), HooklineCallback(hooks, sinks=[sink]), model=model)
    watch.remove()
    assert hooked == bare
    assert hooked[1:] == ("DistributedDataParallel", 20)
    assert gather_objects(hooked[0], what="the weights") == [hooked[0]] * 2
    names = {name for name, _, _ in metrics_of(sink)}
    expected = {"GradientLengths/transformer.wte.weight", "watch/transformer.h.1/forward/mean"}
    assert (expected <= names) == bool(names) == (this_rank() == 0)
    assert not any("module." in name for name in names)
