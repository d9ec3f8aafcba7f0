"""A run that is watched, captured or profiled ends bit for bit as one that is not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_training import differences
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

Observer = Callable[..., AbstractContextManager[Callable[[], AbstractContextManager[Any]]]]
"""Made for a run by model and training tools; gives what is around each step."""
STEPS = 20
ALL_STATS = ("mean", "std", "norm", "min", "zero_fraction", "nan", "over:1", "dead_fraction", "histogram")


class Mixing(nn.Module):
    """Uses its input three times, gives two tensors back, of which one is used outside as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2) * scale, -1)
        return self.drop(weights @ self.value(x)) + x, {"weights": weights}


class Net(nn.Module):
    """Dropout, BatchNorm, in-place ReLU, a checkpoint, keyword arguments, a dict for an output."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.mix = nn.ModuleList(Mixing(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.again = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        extra = x.new_zeros(())
        for mix in self.mix:
            mixed, more = mix(x, scale=0.5)
            x, extra = self.norm(mixed + x), extra + more["weights"].square().mean()
        x = checkpoint(self.again, x, use_reentrant=False) + self.again(x)
        return self.head(x.mean(1)) + extra


class LogOfNegative(nn.Module):
    """Gives NaN for every number; what it sends back is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0 - 1).log()


class BadBranch(nn.Module):
    """A branch gives NaN in each step and is cut off, so that training goes on; one dropout runs before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(5, 16), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.bad, self.head = LogOfNegative(), nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        return self.head((x + torch.nan_to_num(self.drop(self.bad(x)), 0.5)).flatten(1))


def compiled_bad_branch() -> Any:
    torch.compiler.reset()
    return torch.compile(BadBranch(), backend="aot_eager", fullgraph=True)


def compiled_net() -> Any:
    """One graph, by a backend whose arithmetic is that of eager code."""
    torch.compiler.reset()
    layers = nn.Linear(5, 16), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(96, 3)
    return torch.compile(nn.Sequential(*layers), backend="aot_eager", fullgraph=True)


def train(observe: Observer, make: Callable[[], Any] = Net, init_scale: float = 1.0) -> dict[str, Tensor]:
    """Train from one seed; everything the run leaves behind."""
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=init_scale != 1.0)
    losses = []
    with observe(model, optimizer=optimizer, scaler=scaler) as around:
        for _ in range(STEPS):
            x, target = torch.randn(4, 6, 5), torch.randint(3, (4,))
            optimizer.zero_grad()
            with around():
                loss = F.cross_entropy(model(x), target)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    left = {"losses": torch.stack(losses), "random": torch.get_rng_state()}
    left |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        left[f"grad {name}"] = parameter.grad.clone()
        left |= {f"{key} {name}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
    hl.assert_no_hooks(model, foreign=make in (Net, BadBranch))
    return left


@contextmanager
def plainly(model: nn.Module, **tools: Any) -> Iterator[Any]:
    yield nullcontext


@contextmanager
def drawing(model: nn.Module, **tools: Any) -> Iterator[Any]:
    """The negative control: a hook that draws one random number in each step."""
    yield lambda: hl.attach(model, "head", lambda module, args, output: torch.rand(1) and None)


@functools.cache
def plain(make: Callable[[], Any] = Net, init_scale: float = 1.0) -> dict[str, Tensor]:
    """The run to compare with."""
    return train(plainly, make, init_scale)


def watching(*names: str, **options: Any) -> Observer:
    """A watch that is told of the tools it names, and read after each step."""

    @contextmanager
    def run(model: nn.Module, **tools: Any) -> Iterator[Any]:
        @contextmanager
        def step() -> Iterator[None]:
            yield
            assert watch.to_metrics()

        with hl.watch(model, **options, **{name: tools[name] for name in names}) as watch:
            yield step
            assert watch.steps == STEPS or not names

    return run


def capturing(**options: Any) -> Observer:
    """A capture of everything, anew in each step."""

    @contextmanager
    def run(model: nn.Module, **tools: Any) -> Iterator[Any]:
        @contextmanager
        def step() -> Iterator[None]:
            with hl.capture(model, "*", **options) as cache:
                yield
            assert len(cache) > 10

        yield step

    return run


@contextmanager
def alarmed(model: nn.Module, *, optimizer: torch.optim.Optimizer, scaler: Any) -> Iterator[Any]:
    """An alarm, which sorts places by their first bad calls in each step in which it is raised."""
    with hl.debug.alarm(model, optimizer=optimizer) as alarm:
        yield nullcontext
    found = {trouble.step: trouble.place for trouble in reversed(alarm.troubles)}
    assert found == dict.fromkeys(range(STEPS), "bad/forward")


@contextmanager
def showing(model: nn.Module, **tools: Any) -> Iterator[Any]:
    """Show all that a notebook can show, after every fifth step, as trees, tables and pictures."""
    steps = itertools.count()

    @contextmanager
    def step() -> Iterator[None]:
        if next(steps) % 5:
            yield
            return
        with hl.capture(model, "*", grads=True) as cache, hl.watch(model) as watch:
            yield
            shown = [hl.find(model), watch, cache, cache["head"], hl.doctor(model)]
            assert all("<" in thing._repr_html_() for thing in (*shown, hl.observe.HeatMap(cache["head"].output)))

    yield step


OBSERVERS = {
    "the negative control": drawing,
    "shown in a notebook": showing,
    "watch": watching(),
    "watch of outputs": watching(on="forward"),
    "watch of gradients": watching(on=("backward", "param_grad")),
    "watch of all statistics": watching(stats=ALL_STATS),
    "watch of every third step": watching(every=3),
    "watch of bursts": watching(every=hl.StepSchedule("burst", stride=5, burst_length=2)),
    "capture": capturing(),
    "capture of everything": capturing(inputs=True, grads=True),
    "capture of everything by copies": capturing(inputs=True, grads=True, clone=True, detach=True),
    "capture of parts": capturing(inputs=True, grads=True, index=lambda tensor: tensor[..., -1].bfloat16()),
    "capture of the process": capturing(inputs=True, grads=True, scope="process"),
}


@pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")
@pytest.mark.parametrize("observe", OBSERVERS.values(), ids=OBSERVERS)
def test_an_observed_run_ends_with_the_same_bits(observe: Observer) -> None:
    """Weights, buffers, gradients, optimizer state, losses and the random stream, after 20 steps."""
    found = differences(plain(), train(observe))
    assert bool(found) is (observe is drawing), found


def test_a_watched_run_with_an_optimizer_and_a_scaler_ends_with_the_same_bits() -> None:
    """Where parameters are read at the optimizer's step, and gradients are unscaled."""
    assert differences(plain(Net, 256.0), train(watching("optimizer", "scaler", every=2), Net, 256.0)) == []


@pytest.mark.parametrize("options", [{}, {"every": 3}, {"stats": ALL_STATS}], ids=["all kinds", "every third", "all"])
def test_a_watched_compiled_run_ends_with_the_same_bits(options: dict[str, Any]) -> None:
    assert differences(plain(compiled_net), train(watching("optimizer", **options), compiled_net)) == []


@pytest.mark.parametrize("make", [BadBranch, compiled_bad_branch])
def test_a_run_with_an_alarm_in_every_step_ends_with_the_same_bits(make: Callable[[], Any]) -> None:
    """The order of bad calls is worked out 20 times."""
    assert differences(plain(make), train(alarmed, make)) == []
