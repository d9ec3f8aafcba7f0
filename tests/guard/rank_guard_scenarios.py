"""What ranks do in the tests of interventions with several ranks; called in processes by `helpers_ranks`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers_ranks import run_cases

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training" / "ranks"))

from rank_resume_scenarios import local, sharded
from rank_run_scenarios import Records, experiment

import hookline as hl

STEPS = 24
MAKERS = {"ddp": experiment, "fsdp": sharded}


class Ahead(hl.InterventionHook):
    """Trains an epoch on the run's own data, in another order, and a step by hand."""

    name = "ahead"
    hook_points = frozenset({hl.HookPoint.SNAPSHOT})

    def __init__(self, fails_on: int | None = None, *, inside: bool = False) -> None:
        self.fails_on, self.inside = fails_on, inside

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, Any]:
        if self.inside and dist.get_rank() == self.fails_on:
            raise ValueError("before the others train")
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        moved = sum(float(one.sum()) for one in local_tensors(model_ctx.model))
        torch.rand(3)
        if dist.get_rank() == self.fails_on:
            raise ValueError("after training")
        return {"moved": moved}


def local_tensors(model: Any) -> list[torch.Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]


class Unguarded(hl.TrainingHook):
    """Says that it observes, and changes the weights: the negative control."""

    hook_points = frozenset({hl.HookPoint.SNAPSHOT})

    def compute(self, ctx: Any) -> None:
        with torch.no_grad():
            for one in local_tensors(ctx.model):
                one.mul_(1.0001)


def trained(kind: str, hooks: list[Any], **options: Any) -> tuple[Any, Any, Records, str]:
    """Train with hooks; return weights, manager, records, and how it ended."""
    made, sink = MAKERS[kind](), Records()
    manager = hl.HookManager(hooks=hooks, sinks=[sink], **options)
    try:
        hl.step_loop(made, steps=STEPS, manager=manager, snapshot_every=8)
        ended = "went on"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    return local(made), manager, sink, ended


def undone() -> dict[str, Any]:
    """Interventions that train leave no trace, under DDP and FSDP2."""
    found: dict[str, Any] = {}
    for kind in MAKERS:
        without, *_ = trained(kind, [])
        weights, manager, sink, ended = trained(kind, [Ahead()])
        control, *_ = trained(kind, [Unguarded()])
        found[kind] = {
            "same": weights == without,
            "control": control == without,
            "ended": ended,
            "fired": manager.hooks.fired["ahead"],
            "records": len([one for one in sink.records if "ahead/moved" in one[2]]),
            "touched": bool(manager.hooks.receipts) and len(manager.hooks.receipts[0].touched) > 0,
        }
    return found


def fails_on_one_rank() -> dict[str, Any]:
    """An intervention raises on rank 1 when it has trained: what it did is undone on both, and the policy holds."""
    found: dict[str, Any] = {}
    for kind in MAKERS:
        without, *_ = trained(kind, [])
        for policy in ("disable", "warn"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                weights, manager, _, ended = trained(kind, [Ahead(fails_on=1)], on_error=policy)
            off = "ahead" in manager.plan.left_out
            told = any("rank 1 failed with ValueError" in str(one.message) for one in caught)
            found[f"{kind} {policy}"] = {"same": weights == without, "ended": ended, "off": off, "told": told}
        _, manager, _, ended = trained(kind, [Ahead(fails_on=1)])
        found[f"{kind} raise"] = {"ended": ended, "step": manager.global_step}
    return found


def all_guarded() -> dict[str, Any]:
    """Run every case that all ranks come back from."""
    return run_cases([undone, fails_on_one_rank])


def fails_while_others_train() -> dict[str, Any]:
    """An intervention raises on rank 1 while rank 0 waits for it inside a backward pass."""
    made = experiment()
    before = local(made)
    manager = hl.HookManager(hooks=[Ahead(fails_on=1, inside=True)], sinks=[Records()])
    seen: dict[str, Any] = {}

    class Keep(hl.TrainingHook):
        hook_points = frozenset({hl.HookPoint.POST_STEP})

        def compute(self, ctx: Any) -> None:
            seen["weights"] = local(made)

    manager = hl.HookManager(hooks=[Keep(), Ahead(fails_on=1, inside=True)], sinks=[Records()])
    try:
        hl.step_loop(made, steps=STEPS, manager=manager, snapshot_every=8)
        ended = "went on"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    return {"ended": ended, "restored": local(made) == seen["weights"], "trained": seen["weights"] != before}
