"""Gradients that ranks have reduced, the same bits with and without observers, and who broke it."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from helpers_nets import SmallNet, loss_of
from helpers_ranks import RankTests
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import hookline as hl

on_ranks = RankTests(__file__)
HOW = ["ddp", "fsdp2"]


class HouseNet(SmallNet):
    """With dropout, and a part that activation checkpointing computes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.relu(self.embed(x)))
        x = checkpoint(lambda y: self.act(self.up(y)), x, use_reentrant=False)
        return self.head(self.dropout(self.down(x)))


def house_net() -> HouseNet:
    torch.manual_seed(3)
    return HouseNet().double()


def wrapped(model: nn.Module, how: str) -> nn.Module:
    """DDP, FSDP2, or the model as it is."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        for module in (model.up, model.down, model):
            fully_shard(module)
    return model


def rank_batch(step: int, part: int = 0, rank: int | None = None) -> Tensor:
    """Another batch for each step, micro-batch and rank."""
    seed = 1000 * step + 10 * part + (dist.get_rank() if rank is None else rank)
    return torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def no_sync(model: nn.Module, how: str, last: bool) -> Any:
    """Accumulate without a reduction, until the last micro-batch."""
    if how == "fsdp2":
        model.set_requires_gradient_sync(last)
    return model.no_sync() if how == "ddp" and not last else contextlib.nullcontext()


def train(model: nn.Module, how: str, optimizer: Any, steps: int, parts: int = 1, batches: Any = rank_batch) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            with no_sync(model, how, part == parts - 1):
                loss_of(model(batches(step, part))).backward()
        optimizer.step()


@on_ranks.case(how=HOW)
def test_micro_batches_count_each_and_recomputation_does_not(how):
    """Three steps of two micro-batches; the module ``up`` is computed twice by activation checkpointing."""
    model = wrapped(house_net(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ["forward", "backward", "param_grad"]
    with hl.watch(model, ["up", "head"], on=kinds, optimizer=optimizer) as watch:
        train(model, how, optimizer, 3, parts=2)
        fired = watch.report()["fired"]
    assert {label: count for label, count in fired.items() if count != 6} == {
        f"{name}.{kind}/param_grad": 3 for name in ("up", "head") for kind in ("weight", "bias")
    }


def outcome(how: str, hooking: Any) -> list[Tensor]:
    """Train 20 steps, and return all weights, optimizer state and the next random number."""
    model = wrapped(house_net(), how)
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handles = hooking(model, optimizer)
    train(model, how, optimizer, 20, parts=2)
    for handle in handles:
        handle.remove()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    found = [*model.parameters(), *state, torch.rand(3)]
    return [(each.to_local() if hasattr(each, "to_local") else each).detach().clone() for each in found]


def observers(model: nn.Module, optimizer: Any) -> list[Any]:
    watch = hl.watch(model, optimizer=optimizer)
    hl.attach_optimizer(optimizer, lambda *args: watch.to_metrics(), on="step_post")
    return [watch, hl.watch(model, every=2), hl.debug.alarm(model, optimizer=optimizer)]


def meddler(model: nn.Module, optimizer: Any) -> list[Any]:
    return [hl.attach(model, "head", lambda module, args, output: output * (1 + 1e-15))]


@on_ranks.case(how=HOW)
def test_a_watched_run_ends_with_the_same_bits(how):
    """Watch of every kind, read over ranks at every step, and alarm: 20 steps, dropout, AdamW; a meddler is noticed."""
    plain, watched, meddled = (outcome(how, hooking) for hooking in (lambda *_: [], observers, meddler))
    assert len(plain) == len(watched) == len(meddled)
    assert all(map(torch.equal, plain, watched))
    assert not all(map(torch.equal, plain, meddled))


@on_ranks.case(
    fault=[("ddp", "forward", "up", "NaN"), ("fsdp2", "forward", "down", "NaN"), ("ddp", "backward_pre", "norm", "Inf")]
)
def test_the_first_trouble_names_step_micro_batch_rank_and_layer(fault):
    """On rank 1 in the second micro-batch of the third step, in an output or its gradient; from then on everywhere."""
    how, on, name, what = fault
    logging.getLogger("hookline.debug.alarm").setLevel(logging.ERROR)
    model = wrapped(house_net(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    now = {"step": -1, "part": -1}

    def batches(step: int, part: int) -> Tensor:
        now.update(step=step, part=part)
        alarm.note_batch([step, part, dist.get_rank()])
        return rank_batch(step, part)

    def is_now() -> bool:
        return dist.get_rank() == 1 and now == {"step": 2, "part": 1}

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * float("nan") if is_now() else None

    def spoil_gradient(module: nn.Module, grads: Any) -> Any:
        return tuple(grad * float("inf") for grad in grads) if is_now() else None

    hook = hl.attach(model, name, spoil if on == "forward" else spoil_gradient, on=on)
    alarm = hl.debug.alarm(model, optimizer=optimizer)
    train(model, how, optimizer, 4, parts=2, batches=batches)
    first, own = alarm.gather()[0], alarm.troubles[0]
    hook.remove()
    alarm.remove()
    place = f"{name}/{on.removesuffix('_pre')}"
    assert (first.step, first.micro_batch, first.rank, first.place, first.what, first.batch) == (
        *(2, 1, 1, place, what),
        [2, 1, 1],
    )
    assert str(first).startswith("step 2, rank 1, micro-batch 1, batch [2, 1, 1]: " + what)
    assert (own.step, own.rank) == [(3, 0), (2, 1)][dist.get_rank()]


# -- one process -----------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_an_alarm_in_one_process_counts_steps_by_hand_and_comes_off():
    """NaN in the second step; the table has it, the metrics count it, resetting forgets it."""
    model = small()
    with hl.debug.alarm(model, on=["forward"]) as alarm:
        for step in range(3):
            alarm.note_batch(f"batch {step}")
            model(torch.full((2, 4), float("nan") if step == 1 else 1.0)).sum().backward()
            alarm.step()
        assert [(each.step, each.micro_batch, each.place, each.batch) for each in alarm.troubles] == [
            (1, 0, "0/forward", "batch 1")
        ]
        assert alarm.to_metrics() == {"alarm/NaN": 1.0, "alarm/Inf": 0.0}
        assert "0/forward" in str(alarm)
        assert alarm.gather() == alarm.troubles
        alarm.reset()
        assert "no trouble in 3 steps" in str(alarm)
    hl.assert_no_hooks(model, foreign=True)


def test_evaluations_between_steps_are_no_micro_batches():
    """A forward that does not count begins no micro-batch."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.debug.alarm(model, optimizer=optimizer) as alarm:
        for part in range(3):
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
            model(torch.full((2, 4), float("inf") if part == 2 else 1.0)).sum().backward()
        optimizer.step()
        assert {(each.step, each.micro_batch) for each in alarm.troubles} == {(0, 2)}


def test_where_parts_of_the_model_are_called_their_calls_are_micro_batches():
    """As Lightning calls ``training_step``: the model's own forward is not called."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.debug.alarm(model, optimizer=optimizer) as alarm:
        for step in range(2):
            for part in range(3):
                alarm.note_batch(f"{step}.{part}")
                is_bad = (step, part) in [(0, 0), (0, 1), (1, 2)]
                model[2](model[1](model[0](torch.full((2, 4), float("nan") if is_bad else 1.0)))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                nn.init.ones_(parameter)
    assert [(each.step, each.micro_batch, each.place, each.batch) for each in alarm.troubles] == [
        (0, 0, "0/forward", "0.0"),
        (0, 1, "0/forward", "0.1"),
        (1, 2, "0/forward", "1.2"),
    ]
    hl.assert_no_hooks(model, foreign=True)
