"""Rows about adapters for other people's trainers: what a step costs more when no hook is due.

Takes hosts that do nothing but tell their events, hands `Row`s to ``rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from measure import Row, Samples, interleave, ratios, spread, trial, typical
from subject import Setting
from torch import Tensor, nn

import hookline as hl
from hookline import HookPoint
from hookline.integrations import Follow, HostRun
from hookline.integrations.transformers import HooklineCallback

__all__ = ["adapters"]

BATCH = 200


class Seldom(hl.TrainingHook):
    """At both points of a step, with a schedule that never comes."""

    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_STEP})
    step_schedule = hl.StepSchedule("stride", stride=10**9, warmup=1)

    def compute(self, ctx: hl.RunDataContext) -> None:
        return None


def adapters(setting: Setting) -> Iterator[Row]:
    """Each host with its adapter, and the same host without."""
    optimizer = OptimizerSteps()
    callback = HooklineCallback([Seldom()], sinks=[])
    calls: dict[str, Callable[[], object]] = {
        "bridge": _bridge(),
        "nothing": lambda: None,
        "trainer": TrainerEvents(callback).step,
        "trainer without": TrainerEvents().step,
    }
    loop = WholeLoop()
    trials = [trial(name, call, inner=5, batch=BATCH) for name, call in calls.items()]
    trials.append(trial("follow", optimizer.step, inner=5, batch=BATCH, hooked=optimizer.followed))
    trials.append(trial("follow without", optimizer.step, inner=5, batch=BATCH))
    trials.append(trial("follow without again", optimizer.step, inner=5, batch=BATCH))
    trials.append(trial("whole loop", loop.step, inner=5, batch=BATCH, hooked=loop.followed))
    trials.append(trial("whole loop without", loop.step, inner=5, batch=BATCH))
    trials.append(trial("whole loop by hand", loop.step, inner=5, batch=BATCH, hooked=loop.wrapped))
    samples = interleave(trials, setting.rounds(40))
    yield _row(samples, "HostRun", "bridge", "nothing", "`begin_step` and `end_step` with a loss")
    yield _row(samples, "Trainer", "trainer", "trainer without", "the events of a step, with `HooklineCallback`")
    yield _row(samples, "follow", "follow", "follow without", "a step of the optimizer, with `hl.follow`")
    words = "a batch of the loader, `backward()` and a step of the optimizer, with `hl.follow`"
    yield _row(samples, "follow with loader and loss", "whole loop", "whole loop without", words)
    words = "the same calls inside of empty functions, and two empty hooks on the optimizer"
    yield _row(samples, "empty wrappers by hand", "whole loop by hand", "whole loop without", words, None)
    callback.close()


def _row(samples: Samples, host: str, name: str, bare: str, words: str, at_most: float | None = 20.0) -> Row:
    return Row(
        f"adapter with no due hook, {host} (µs a step)",
        f"what {words}, adds to a step",
        "1 µs",
        "a host that trains nothing",
        spread([(with_it - without) * 1e6 for with_it, without in zip(samples[name], samples[bare], strict=True)]),
        spread(ratios(samples, "follow without again", "follow without")),
        f"{typical(samples, name) * 1e6:.2f}, bare {typical(samples, bare) * 1e6:.2f} µs",
        at_most=at_most,
    )


def _bridge() -> Callable[[], None]:
    model, loss = nn.Linear(2, 1), torch.zeros(())
    run = HostRun([Seldom()])
    run.begin_run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.begin_epoch(0)

    def step() -> None:
        run.begin_step()
        run.hold_gradients()
        run.end_step(loss=loss)

    return step


class TrainerEvents:
    """Tell a callback what the Trainer tells it in a step, in the same order."""

    def __init__(self, *callbacks: Any) -> None:
        self.model = nn.Linear(2, 1)
        self.loss = torch.zeros(())
        self.state = SimpleNamespace(global_step=0, epoch=0.0, max_steps=1 << 40)
        self.args = SimpleNamespace(output_dir="runs", gradient_accumulation_steps=1, max_grad_norm=1.0)
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))
        self.given = {"model": self.model, "optimizer": torch.optim.SGD(self.model.parameters(), lr=0.1)}
        self._tell("on_train_begin")
        self._tell("on_epoch_begin")

    def training_step(self, model: nn.Module, inputs: Any) -> Tensor:
        """Train nothing."""
        return self.loss

    def evaluation_loop(self) -> None:
        """Evaluate nothing."""

    def step(self) -> None:
        """Make a step."""
        self._tell("on_step_begin")
        self.training_step(self.model, None)
        self._tell("on_pre_optimizer_step")
        self._tell("on_optimizer_step")
        self.state.global_step += 1
        self._tell("on_step_end")

    def _tell(self, event: str) -> None:
        for callback in self.callback_handler.callbacks:
            getattr(callback, event)(self.args, self.state, None, **self.given)


class OptimizerSteps:
    """Steps of an optimizer, which have no gradients to take."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.step = torch.optim.SGD(self.model.parameters(), lr=0.1).step

    def followed(self) -> Follow:
        """Follow them while the block lasts."""
        return hl.follow(self.model, self.step.__self__, [Seldom()])


class Endless:
    """A loader that gives the same batch for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class HandedOn:
    """An iterator in Python that hands on what another gives."""

    def __init__(self, iterator: Iterator[int]) -> None:
        self._iterator = iterator

    def __iter__(self) -> HandedOn:
        return self

    def __next__(self) -> int:
        return next(self._iterator)


class WholeLoop:
    """A batch, a backward and a step of the optimizer; followed only while it is measured so."""

    def __init__(self) -> None:
        self.model, self.loader = nn.Linear(2, 1), Endless()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss = torch.zeros((), requires_grad=True)
        self.batches = iter(self.loader)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow it while the block lasts."""
        with hl.follow(self.model, self.optimizer, [Seldom()], loader=self.loader):
            self.batches = iter(self.loader)
            yield
        self.batches = iter(self.loader)

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Put an empty function around each of the three calls while the block lasts: what no way of following can
        leave out.
        """
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)

        def nothing(optimizer: Any, args: Any, kwargs: Any) -> None: ...

        hooks = self.optimizer.register_step_pre_hook(nothing), self.optimizer.register_step_post_hook(nothing)
        torch.autograd.backward = backward
        self.batches = HandedOn(iter(self.loader))
        try:
            yield
        finally:
            torch.autograd.backward = original
            self.batches = iter(self.loader)
            for hook in hooks:
                hook.remove()

    def step(self) -> None:
        """Make a step."""
        next(self.batches)
        self.loss.backward()
        self.optimizer.step()
