"""Other trainers with several ranks: each rank goes on with its own hook state, and guarded steps average gradients."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_hosts import metrics_of
from helpers_ranks import RankTests, run_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hookline as hl
from hookline.distributed import gather_objects, this_rank
from hookline.errors import HooklineWarning
from hookline.sinks import MemorySink

on_ranks = RankTests(
    __file__,
    initialize=False,
    imports=("accelerate", "lightning", "transformers.trainer"),
    environment={"HF_HUB_OFFLINE": "1"},
)
STRAIGHT = {step: [step + 1, 100 * (step + 1)] for step in range(4)}
"""The counts of both ranks at each step; the sink of rank 0 has them."""


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


@on_ranks.case
def test_the_trainer_goes_on_with_the_state_of_each_rank():
    """Four steps, and the last two again from the checkpoint in the middle: rank 1 counts on by hundreds.

    The checkpoint has the metrics of its first steps too, which were not written yet.
    """
    from helpers_trainer import make_trainer, tokens

    from hookline.integrations.transformers import HooklineCallback

    def train(resume: str | None) -> dict[int, Any]:
        sink = MemorySink()
        trainer = make_trainer(
            Path("hf"), HooklineCallback([CountsByRank()], sinks=[sink], loop="epoch"),
            train_dataset=tokens(32),
            max_steps=4, save_strategy="steps", save_steps=2, ddp_backend="gloo",
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return _counts(sink)

    straight, resumed = train(None), train("hf/checkpoint-2")
    assert straight == resumed == ({} if this_rank() else STRAIGHT)


@on_ranks.case
def test_accelerate_goes_on_with_the_state_of_each_rank():
    """``save_state`` on every rank; nothing is warned of."""
    straight, resumed, told = _accelerate(Path("accelerate"), everywhere=True)
    assert told == []
    assert straight == resumed == ({} if this_rank() else STRAIGHT)


@on_ranks.case
def test_accelerate_on_rank_0_alone_waits_for_nobody_and_says_what_is_missing():
    """Many loops call ``save_state`` on the main process only; rank 1 then goes on from what there is, and says so."""
    _, resumed, told = _accelerate(Path("alone"), everywhere=False)
    if this_rank() == 0:
        assert ({step: resumed[step] for step in (2, 3)}, told) == ({2: [3, 102], 3: [4, 202]}, [])
    else:
        (text,) = told
        assert "is of rank 0 of 2, and rank 1 of 2 continues with it" in text


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


@on_ranks.case
def test_lightning_goes_on_with_the_state_of_each_rank():
    """Two steps an epoch; the checkpoint is written at the end of the first."""
    import lightning

    from hookline.integrations.lightning import HooklineCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

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
            default_root_dir=Path.cwd(), max_epochs=2 if resume else 1, accelerator="cpu", strategy="ddp", devices=2,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[HooklineCallback([CountsByRank()], sinks=[sink], loop="epoch"), SavesAtTheEnd()],
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, 4, sampler=DistributedSampler(data)), ckpt_path=resume)
        return _counts(sink)

    class SavesAtTheEnd(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint("last.ckpt")

    straight, resumed = train(None), train("last.ckpt")
    assert straight == ({} if this_rank() else {step: STRAIGHT[step] for step in range(2)})
    assert resumed == ({} if this_rank() else STRAIGHT)


def _follow(steps: int, state: Any = None) -> tuple[Any, Any, int, list[str]]:
    """Follow a loop from this state; return the state of this rank, that of all, the count, and what was told."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
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


@on_ranks.case
def test_a_followed_loop_goes_on_with_the_state_of_each_rank():
    """One dictionary of all ranks, or one of each rank; the dictionary of rank 0 alone is loaded with a warning."""
    own, every, *_ = _follow(2)
    of_first = gather_objects(own, what="the state of rank 0")[0]
    one = 100 ** this_rank()
    assert _follow(1, every)[2:] == _follow(1, own)[2:] == (3 * one, [])
    count, told = _follow(1, of_first)[2:]
    assert count == 2 + one
    assert ["state_dict(all_ranks=True)" in text for text in told] == [True] * this_rank()


def _state_of_all() -> Any:
    return _follow(2)[1]


def test_another_number_of_ranks_goes_on_with_rank_0_and_is_told() -> None:
    """Two ranks have saved, one process goes on."""
    state = run_ranks(_state_of_all)[0]
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook = CountsByRank()
    with hl.follow(model, optimizer, [hook], sinks=[]) as run:
        with pytest.warns(HooklineWarning, match="of rank 0 of 2, and rank 0 of 1 continues"):
            run.load_state_dict(state)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        assert (run.step, hook.count) == (2, 3)


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


@on_ranks.case(trains=[_accelerate_trains, _followed_trains])
def test_an_intervention_that_trains_averages_gradients_over_ranks(trains):
    """Each rank has other rows; after a guarded epoch all have the weights of the others, and hooks see the model."""
    seen, weights = trains()
    assert seen == "Linear"
    if this_rank() == 0:
        ((first, second),) = weights
        assert first == second
