"""Optimizers that wrap another one: hooks are put on the one inside, wherever an optimizer is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.optim import AdamW, Optimizer

import hookline as hl


@pytest.fixture(autouse=True)
def _without_accelerate_afterwards() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


class Around:
    """A wrapper that is no ``Optimizer``, as DeepSpeed's and fairscale's are."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Underscored(Around):
    """The same with a private attribute."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Any:
        return self._optimizer


class Copied(Optimizer):
    """As Lightning's: a subclass that takes over the attributes of the optimizer it wraps, its hooks among them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


def accelerated(optimizer: Optimizer) -> Any:
    """Accelerate's own wrapper."""
    return Accelerator(cpu=True).prepare(optimizer)


WRAPPERS: list[Callable[[Any], Any]] = [accelerated, Around, Underscored, Copied, lambda inner: Around(Around(inner))]


def make() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    return model, AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_hook_on_a_wrapper_sits_on_the_optimizer_inside(wrap: Callable[[Any], Any]) -> None:
    """It fires once a step, is handed torch's optimizer, is listed for both, and comes off."""
    model, inner = make()
    wrapper = wrap(inner)
    seen: list[Any] = []
    handle = hl.attach_optimizer(wrapper, lambda optimizer, args, kwargs: seen.append(optimizer), on="step_pre")
    train(model, wrapper)
    assert [each is inner for each in seen] == [True] * 3
    assert hl.attached(wrapper) == hl.attached(inner) == [handle]
    handle.remove()
    train(model, wrapper)
    assert len(seen) == 3
    assert hl.attached(wrapper) == []


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_watch_takes_a_wrapped_optimizer(wrap: Callable[[Any], Any]) -> None:
    """Its steps are the steps, and the gradients of parameters are read before each."""
    model, inner = make()
    wrapper = wrap(inner)
    with hl.watch(model, optimizer=wrapper, on=("param_grad",)) as watch:
        train(model, wrapper)
    assert watch.steps == 3
    assert watch.report()["fired"]["0.weight/param_grad"] == 3


def test_accumulated_micro_batches_make_no_step_of_accelerates_wrapper() -> None:
    """Where Accelerate leaves a step out, no hook fires and the watch goes no step on."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, inner = make()
    model, optimizer = accelerator.prepare(model, inner)
    fired: list[int] = []
    with hl.watch(model, "0", optimizer=optimizer, on=("forward", "param_grad")) as watch:
        hl.attach_optimizer(optimizer, lambda *_: fired.append(1))
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(6, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert (len(fired), watch.steps) == (2, 2)
    assert watch.report()["fired"] == {"0/forward": 4, "0.weight/param_grad": 2, "0.bias/param_grad": 2}


def test_an_optimizer_that_makes_its_own_steps_keeps_its_hooks() -> None:
    """One that is set up as an optimizer and has another one inside (SAM, for instance) is hooked itself."""

    class Twice(Optimizer):
        def __init__(self, base: Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base_optimizer = base

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base_optimizer.step()
            self.base_optimizer.step()

    model, inner = make()
    outer = Twice(inner)
    seen: list[Any] = []
    hl.attach_optimizer(outer, lambda optimizer, args, kwargs: seen.append(optimizer))
    train(model, outer, 1)
    assert seen == [outer]
