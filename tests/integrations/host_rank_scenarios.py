"""What each of two processes does with trainers that save and resume; `test_host_rank_states` starts them."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from helpers_hosts import metrics_of
from helpers_ranks import run_cases
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hookline as hl
from hookline.distributed import this_rank
from hookline.sinks import MemorySink

__all__ = ["CountsByRank", "save_and_resume"]


class CountsByRank(hl.TrainingHook):
    """Counts steps: rank 0 by ones, rank 1 by hundreds. A rank that goes on with the count of the other is seen."""

    name = "counts"
    hook_points = {hl.HookPoint.POST_STEP}
    reduce = {"all": "concat"}

    def __init__(self) -> None:
        self.count = 0

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        self.count += 100 ** this_rank()
        return {"all": self.count}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def reset(self) -> None:
        self.count = 0


def _counts(sink: MemorySink) -> dict[int, Any]:
    return {step: value for (name, _, step), value in metrics_of(sink).items() if name == "counts/all"}


def _told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, hl.errors.HooklineWarning)]


def save_and_resume(folder: str) -> dict[str, Any]:
    """Run every case; each returns the counts of a run that goes on from the middle of another."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def transformers_trainer() -> Any:
        from helpers_trainer import make_trainer, tokens

        from hookline.integrations.transformers import HooklineCallback

        def train(resume: str | None) -> dict[int, Any]:
            sink = MemorySink()
            trainer = make_trainer(
                Path(folder, "hf"), HooklineCallback([CountsByRank()], sinks=[sink], loop="epoch"),
                train_dataset=tokens(32),
                max_steps=4, save_strategy="steps", save_steps=2, ddp_backend="gloo",
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
            return _counts(sink)

        return train(None), train(str(Path(folder, "hf", "checkpoint-2")))

    def accelerate_loop() -> Any:
        return _accelerate(Path(folder, "accelerate"), everywhere=True)

    def accelerate_on_rank_0() -> Any:
        return _accelerate(Path(folder, "alone"), everywhere=False)

    def lightning_trainer() -> Any:
        return _lightning(Path(folder, "lightning"))

    def followed_loop() -> Any:
        return _follow()

    def guarded_epochs() -> Any:
        return {host.__name__: host() for host in (_accelerate_trains, _followed_trains)}

    return run_cases([
        transformers_trainer, accelerate_loop, accelerate_on_rank_0, lightning_trainer, followed_loop, guarded_epochs,
    ])  # fmt: skip


def _accelerate(folder: Path, *, everywhere: bool) -> Any:
    """A loop whose state is saved on every rank, or on rank 0 alone, and loaded on every rank."""
    import accelerate

    from hookline.integrations.accelerate import follow

    def train(first: int) -> tuple[dict[int, Any], list[str]]:
        accelerator, sink = accelerate.Accelerator(cpu=True), MemorySink()
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        run = follow(accelerator, model, optimizer, [CountsByRank()], sinks=[sink], loop="epoch")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if first:
                accelerator.load_state(str(folder))
        for step in range(first, 4):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(3, 4)).sum())
            optimizer.step()
            if step == 1 and not first and (everywhere or this_rank() == 0):
                accelerator.save_state(str(folder))
        run.close()
        return _counts(sink), _told(caught)

    (straight, _), (resumed, told) = train(0), train(2)
    return straight, resumed, told


def _lightning(folder: Path) -> Any:
    import lightning

    from hookline.integrations.lightning import HooklineCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def train(resume: str | None) -> dict[int, Any]:
        sink = MemorySink()
        torch.manual_seed(0)
        data = TensorDataset(torch.ones(16, 4))
        trainer = lightning.Trainer(
            default_root_dir=folder, max_epochs=2 if resume else 1, accelerator="cpu", strategy="ddp", devices=2,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[HooklineCallback([CountsByRank()], sinks=[sink], loop="epoch"), SavesAtTheEnd()],
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, 4, sampler=DistributedSampler(data)), ckpt_path=resume)
        return _counts(sink)

    class SavesAtTheEnd(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(folder / "last.ckpt")

    return train(None), train(str(folder / "last.ckpt"))


def _follow() -> Any:
    """A loop of its own: the states of all ranks in one, and that of rank 0 alone, which every rank loads."""
    net = nn.Linear(4, 2)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps: int, state: Any) -> tuple[Any, Any, list[int], list[str]]:
        hook, told = CountsByRank(), []
        with hl.follow(model, optimizer, [hook], sinks=[]) as run:
            if state is not None:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    run.load_state_dict(state)
                told = _told(caught)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
            own, every = run.state_dict(), run.state_dict(all_ranks=True)
        return own, every, hook.count, told

    from hookline.distributed import gather_objects

    own, every, _, _ = train(2, None)
    of_first = gather_objects(own, what="the state of rank 0")[0]
    return {
        "every": every,
        "of all": train(1, every)[2:],
        "of this rank": train(1, own)[2:],
        "of rank 0": train(1, of_first)[2:],
    }


# -- interventions that train -------------------------------------------------------------------------------------


class TrainsAhead(hl.InterventionHook):
    """Train one epoch more, and tell the weights of every rank, and how the hook sees the model."""

    name = "ahead"
    hook_points = {hl.HookPoint.POST_EPOCH}
    reduce = {"weights": "concat"}

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: Any) -> dict[str, Any]:
        self.seen = type(run_ctx.model).__name__
        model_ctx.run_training_epoch()
        return {"weights": float(sum(each.detach().double().sum() for each in model_ctx.model.parameters()))}


def _rows() -> tuple[nn.Linear, Any, TensorDataset]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    return net, torch.optim.SGD(net.parameters(), 0.1), TensorDataset(torch.randn(8, 3))


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def _ahead(hook: TrainsAhead, sink: MemorySink) -> Any:
    return hook.seen, [value for (name, _, _), value in metrics_of(sink).items() if name == "ahead/weights"]


def _accelerate_trains() -> Any:
    import accelerate

    from hookline.integrations.accelerate import follow

    net, made, data = _rows()
    hook, sink, accelerator = TrainsAhead(), MemorySink(), accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(net, made, DataLoader(data, 2))
    with follow(accelerator, model, optimizer, [hook], loader=loader, sinks=[sink], loss_fn=_loss):
        for batch in loader:
            accelerator.backward(_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return _ahead(hook, sink)


def _followed_trains() -> Any:
    net, optimizer, data = _rows()
    hook, sink, model = TrainsAhead(), MemorySink(), nn.parallel.DistributedDataParallel(net)
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    with hl.follow(model, optimizer, [hook], loader=loader, sinks=[sink], loss_fn=_loss):
        for batch in loader:
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return _ahead(hook, sink)
