"""What each of several processes does with a Trainer; `test_trainer_hosts` starts them."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

from helpers_hosts import metrics_of
from helpers_trainer import make_trainer, tiny_gpt2, tokens

import hookline as hl
from hookline.integrations.transformers import HooklineCallback
from hookline.sinks import MemorySink

__all__ = ["GradientLengths", "train_with_and_without"]


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


def train_with_and_without(folder: str) -> dict[str, Any]:
    """Train under DDP without hooks, then with; return what each left."""
    warnings.simplefilter("ignore")  # torch's about gloo; the test looks at results
    bare = _train(Path(folder, "bare"))
    sink, model = MemorySink(), tiny_gpt2()
    watch = hl.watch(model, "transformer.h.#", every=2)
    hooks = [GradientLengths(), OneEpochMore(), watch]
    hooked = _train(Path(folder, "hooked"), HooklineCallback(hooks, sinks=[sink]), model=model)
    watch.remove()
    names = sorted({name for name, _, _ in metrics_of(sink)})
    return {"bare": bare, "hooked": hooked, "names": names, "records": len(sink.records)}


def _train(folder: Path, *callbacks: Any, model: Any = None) -> tuple[str, str, int]:
    trainer = make_trainer(folder, *callbacks, model=model, train_dataset=tokens(80), ddp_backend="gloo")
    trainer.train()
    digest = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest(), type(trainer.model_wrapped).__name__, trainer.state.global_step
