"""`follow`: which losses and batches belong to which step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_follow import Loop, Seen
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.integrations.loop_events import BackwardLosses

POST_STEP = hl.HookPoint.POST_STEP


def _clear_by_optimizer(loop: Loop) -> None:
    loop.optimizer.zero_grad()


def _clear_in_place(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


def _clear_by_model(loop: Loop) -> None:
    loop.model.zero_grad(set_to_none=False)


def _clear_by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("clear", [_clear_by_optimizer, _clear_in_place, _clear_by_model, _clear_by_hand])
@pytest.mark.parametrize("at_once", [True, False], ids=["when it is skipped", "with the next batch"])
def test_a_batch_that_the_loop_skips_after_its_backward_is_no_part_of_a_step(clear: Any, at_once: bool) -> None:
    loop, seen = Loop(), Seen()
    losses: list[float] = []
    batches: list[torch.Tensor] = []
    with loop.follow([seen], loader=loop.loader):
        for number, batch in enumerate(loop.loader):
            if not at_once:
                clear(loop)
            loss = loop.loss_fn(loop.model, batch)
            loss.backward()
            if number in (0, 3):  # as loops do that leave out a gradient which is too long
                if at_once:
                    clear(loop)
                continue
            losses.append(float(loss.detach()))
            batches.append(batch[0])
            loop.optimizer.step()
            if at_once:
                clear(loop)
    steps = [ctx for ctx in seen.contexts if ctx.hook_point is POST_STEP]
    assert [ctx.loss for ctx in steps] == losses
    assert [ctx.batch_idx for ctx in steps] == [1, 2, 4, 5, 6]
    assert all(torch.equal(ctx.batch_data[0], x) for ctx, x in zip(steps, batches, strict=True))


def test_a_gradient_that_is_clipped_between_two_backwards_of_a_step_is_not_cleared() -> None:
    loop, seen, losses = Loop(), Seen(), []
    with loop.follow([seen], loader=loop.loader):
        for number, batch in enumerate(loop.loader):
            loss = loop.loss_fn(loop.model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
            losses.append(float(loss.detach()))
            if number % 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    found = [ctx.loss for ctx in seen.contexts if ctx.hook_point is POST_STEP]
    assert found == pytest.approx([sum(losses[at : at + 2]) for at in range(0, 2 * len(found), 2)])


class Marked(torch.Tensor):
    """A tensor whose functions go through ``__torch_function__``."""


def test_losses_of_torch_autograd_backward_are_seen_and_parts_of_a_backward_are_not() -> None:
    model = nn.Linear(3, 1)
    losses = BackwardLosses()

    def number(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    x = torch.ones(1, 3)
    expected = float(number(x).detach())
    try:
        torch.autograd.backward(number(x))
        assert float(losses.take()) == expected
        torch.autograd.backward([number(x), 2 * number(x)])
        assert float(losses.take()) == pytest.approx(3 * expected)
        torch.autograd.backward(iter([number(x)]))  # only torch may walk through it
        assert losses.take() is None
        torch.autograd.backward(number(x).as_subclass(Marked))
        assert float(losses.take()) == expected
        inner = checkpoint(number, x.requires_grad_(), use_reentrant=True)
        (inner * 5).backward()  # which calls backward on the number inside
        assert float(losses.take()) == pytest.approx(5 * expected)
    finally:
        losses.remove()


@pytest.mark.parametrize("parts", [(), ("loader",)], ids=["bare", "loader"])
def test_steps_at_which_no_hook_is_due_are_counted_and_change_nothing_of_the_others(parts: Any) -> None:
    """Steps that are only counted: at the others, a hook sees what it sees in a run where a hook is due at each."""

    def train(*, seldom: bool) -> tuple[list[Any], list[int]]:
        loop, seen, steps = Loop(), Seen(), []
        seen.hook_points = {hl.HookPoint.PRE_STEP, POST_STEP}
        if seldom:
            seen.step_schedule = hl.StepSchedule("stride", stride=4)
        given = {name: getattr(loop, name) for name in parts}
        with loop.follow(None, manager=hl.HookManager(hooks=[seen]), **given) as run:
            handle = loop.model.register_forward_hook(lambda *_: steps.append(run.step))
            loop.train(3)
            handle.remove()
            assert (run.step, run.epoch) == (20, 3 if parts else 0)
            assert run.state_dict()["run"]["num_steps"] == 21
        told = [
            (ctx.hook_point, ctx.epoch, ctx.step, ctx.batch_idx, ctx.loss) for ctx in seen.contexts if ctx.step % 4 == 0
        ]
        return told, steps

    every, seldom = train(seldom=False), train(seldom=True)
    assert len(every[0]) == 12
    assert seldom == every


def test_the_loss_of_another_model_is_no_part_of_a_step() -> None:
    """A GAN that freezes its discriminator while the generator trains; also where the generator comes first."""
    torch.manual_seed(0)
    for is_first in (False, True):
        seen, true = Seen(), []
        generator, model = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, generator))

        def train_generator(generator: Any = generator, model: Any = model, other: Any = other) -> None:
            model.requires_grad_(False)
            (10 - model(generator(torch.ones(2, 3))).mean()).backward()
            other.step()
            other.zero_grad()
            model.requires_grad_(True)

        with hl.follow(model, optimizer, [seen], sinks=[]):
            for _ in range(3):
                if is_first:
                    train_generator()
                loss = model(torch.ones(2, 3)).mean()
                loss.backward()
                true.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
                if not is_first:
                    train_generator()
        found = [float(ctx.loss) for ctx in seen.contexts if ctx.hook_point is POST_STEP]
        assert found == true
