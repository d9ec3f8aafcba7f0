"""What an experiment declares as its state is as it was when an intervention is over."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

EPOCHS, BATCHES = 3, 4


class Trains(hl.InterventionHook):
    """Trains an epoch at every step, from before the epoch at its end, and goes back and forth by a checkpoint."""

    hook_points = {hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH}
    needs_pre_epoch_state = True

    def __init__(self) -> None:
        self.count = 0

    def intervene(self, run_ctx, model_ctx):
        self.count += 1
        token = model_ctx.save_checkpoint()
        model_ctx.run_training_epoch([torch.randn(4, 2) for _ in range(3)])
        model_ctx.restore_checkpoint(token)
        if run_ctx.hook_point is hl.HookPoint.POST_EPOCH:
            model_ctx.restore_pre_epoch()
        model_ctx.run_training_epoch([torch.randn(4, 2)])


class Adversaries(hl.Experiment):
    """Two networks with an optimizer each, of which the loop knows neither; an average; figures of all kinds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        super().__init__(self.maker, loader=[torch.randn(4, 2) for _ in range(BATCHES)])
        self.optimizers = {name: torch.optim.Adam(net.parameters()) for name, net in self._nets().items()}
        self.schedulers = [torch.optim.lr_scheduler.StepLR(self.optimizers["judge"], 2)]
        self.average = torch.optim.swa_utils.AveragedModel(self.maker)
        self.random = torch.Generator().manual_seed(1)
        self.seen, self.running = 0, torch.zeros(3)
        self.losses: list[Tensor] = []
        self.counts, self.recent, self.kinds = {"steps": 0}, deque([0], maxlen=2), {0}

    def _nets(self) -> dict[str, nn.Module]:
        return {"maker": self.maker, "judge": self.judge}

    def train_step(self, batch):
        made = self.maker(torch.randn(4, 2, generator=self.random))
        self.optimizers["judge"].zero_grad()
        (self.judge(made.detach()).mean() - self.judge(batch).mean()).backward()
        self.optimizers["judge"].step()
        self.optimizers["maker"].zero_grad()
        loss = -self.judge(made).mean()
        loss.backward()
        self.optimizers["maker"].step()
        self.average.update_parameters(self.maker)
        self.schedulers[0].step()
        self._count(loss)
        return loss

    def _count(self, loss: Tensor) -> None:
        self.seen += 1
        self.running += loss.detach()
        self.losses.append(loss.detach())
        self.counts["steps"] += 1
        self.recent.append(self.seen)
        self.kinds.add(self.seen)

    def left(self) -> dict[str, Any]:
        tensors = {f"{n} {k}": v for n, net in self._nets().items() for k, v in net.state_dict().items()}
        tensors |= {f"average {k}": v for k, v in self.average.state_dict().items()}
        for name, net in self._nets().items():
            tensors |= {f"{name} grad {k}": p.grad for k, p in net.named_parameters()}
            states = self.optimizers[name].state.values()
            tensors |= {f"{name} {i} {k}": v for i, state in enumerate(states) for k, v in state.items()}
        tensors |= {"running": self.running, "random": self.random.get_state(), "torch": torch.get_rng_state()}
        lrs = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers.values()]
        figures = [self.seen, self.counts, list(self.recent), self.kinds, lrs, self.schedulers[0].last_epoch]
        return {name: value.tolist() for name, value in tensors.items()} | {"figures": figures, "losses": self.losses}


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_optimizers_modules_and_figures_of_the_experiment_do_not_notice_interventions(loop):
    """To the last bit; negative control: without interventions being undone, everything differs."""

    def train(hook: Trains | None) -> dict[str, Any]:
        experiment, hooks = Adversaries(), [] if hook is None else [hook]
        if loop == "epoch":
            hl.epoch_loop(experiment, epochs=EPOCHS, manager=hl.HookManager(hooks=hooks))
        else:
            hl.step_loop(experiment, steps=EPOCHS * BATCHES, manager=hl.HookManager(hooks=hooks))
        return experiment.left()

    hook = Trains()
    plain, hooked = train(None), train(hook)
    assert hook.count == (EPOCHS * (BATCHES + 1) if loop == "epoch" else EPOCHS * BATCHES)
    assert [name for name in plain if plain[name] != hooked[name]] == []
    experiment = Adversaries()
    experiment.train_step(torch.randn(4, 2))
    before = experiment.left()
    experiment.train_step(torch.randn(4, 2))
    assert {name for name, value in experiment.left().items() if value != before[name]} >= {"figures", "running"}


def test_a_state_of_ones_own_adds_and_leaves_out():
    """Data stay where they are, and are not copied; an object that tells no state is declared by its attributes."""

    class Queue:
        items = 0

    class Own(Adversaries):
        def __init__(self):
            super().__init__()
            self.data, self.queue = torch.zeros(2**20), Queue()
            self.queue.items = 0

        @property
        def state(self):
            declared = {name: value for name, value in super().state.items() if name != "data"}
            return {**declared, "queue": vars(self.queue)}

        def train_step(self, batch):
            self.queue.items += 1
            self.data[0] += 1
            return super().train_step(batch)

    class Sizes(Trains):
        def intervene(self, run_ctx, model_ctx):
            super().intervene(run_ctx, model_ctx)
            self.saved = model_ctx.guard.last_bytes

    experiment, hook = Own(), Sizes()
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook]))
    assert experiment.queue.items == experiment.seen == BATCHES
    assert experiment.data[0] > BATCHES  # nobody looks after it
    assert hook.saved < 2**16


def test_what_is_declared_is_what_has_a_state_and_what_is_plain():
    """Not the parts that every run has, not the loader under another name, not functions and objects of others."""
    experiment = Adversaries()
    experiment.batches, experiment.log, experiment.late = experiment.loader, print, iter(())
    experiment.manager, experiment.frozen = hl.HookManager(), [print]
    assert set(experiment.state) == {
        "maker", "judge", "optimizers", "schedulers", "average", "random", "seen", "running", "losses", "counts",
        "recent", "kinds",
    }  # fmt: skip
