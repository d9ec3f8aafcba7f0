"""What ranks do in the tests of runs with several ranks; called in processes by `helpers_ranks`."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from helpers_ranks import run_cases
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import hookline as hl
from hookline.errors import HooklineWarning, OptionError
from hookline.training.ranks import share_experiment, share_loader

STEPS = 24
"""Steps of a run that is compared bit for bit."""


class Net(nn.Module):
    """A small model with everything that a rank could get wrong: dropout, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 3)
        self.width = 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def data(number: int = 192) -> TensorDataset:
    """Return samples whose first feature is their number."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(number, 6, generator=generator)
    x[:, 0] = torch.arange(number) / number
    return TensorDataset(x, torch.randint(0, 3, (number,), generator=generator))


def experiment(*, shared: bool = True, **options: Any) -> hl.Experiment:
    """Return an experiment of this rank: same data and weights everywhere, other dropout."""
    torch.manual_seed(3)
    model = Net()
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    made = hl.Experiment(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader, **options)
    if shared:
        share_experiment(made, rank=dist.get_rank(), ranks=dist.get_world_size(), seed=3)
        torch.manual_seed(3 + 1000 * dist.get_rank())
    return made


class Records(hl.MetricSink):
    """Keeps every record."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append((record.point, record.step, dict(record.metrics)))

    def metrics(self, point: str) -> dict[str, Any]:
        return {name: value for where, _, found in self.records if where == point for name, value in found.items()}


class Local(hl.TrainingHook):
    """Returns what differs by rank, under every rule."""

    name = "local"
    hook_points = frozenset({hl.HookPoint.POST_EPOCH, hl.HookPoint.POST_STEP})
    reduce = {"count": "sum", "*/max": "max", "low": "min", "root": "l2", "all": "concat", "own": "none"}

    def start(self, model: nn.Module) -> None:
        self.seen = [name for name, _ in model.named_parameters()]

    def compute(self, ctx: Any) -> dict[str, Any]:
        rank = dist.get_rank()
        numbers = {"count": 3 + rank, "a/max": float(rank), "low": 7 - rank, "root": 3.0 + rank, "own": rank}
        found = {**numbers, "all": f"r{rank}", "plain": 1.0 + rank, "text": f"r{rank}", "by": {0: rank, 1: 2.0}}
        if rank == 1:
            found["second"] = 5
        return found


class Broken(hl.TrainingHook):
    """Raises on rank 1 when it is time to."""

    name = "broken"

    def __init__(self, point: hl.HookPoint, step: int = 3) -> None:
        self.hook_points = {point}
        self.step = step

    def compute(self, ctx: Any) -> dict[str, Any]:
        if dist.get_rank() == 1 and (ctx.step or 0) >= self.step:
            raise ValueError("the second rank has a bad day")
        return {"fine": 1.0}


def weights(made: hl.Experiment) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in made.model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# -- data ----------------------------------------------------------------------------------------------------


def parts_of_data() -> dict[str, Any]:
    """Share out several kinds of loaders; return the samples of this rank, by kind, for two epochs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    where = {"rank": rank, "ranks": ranks, "seed": 11}
    loaders = {
        "shuffled": DataLoader(data(10), batch_size=2, shuffle=True),
        "in order": DataLoader(data(10), batch_size=3),
        "list": [torch.tensor([number]) for number in range(5)],
    }
    torch.manual_seed(rank)  # the ranks' own streams differ, and have no say
    found: dict[str, Any] = {}
    for kind, loader in loaders.items():
        part = share_loader(loader, **where)
        epochs = []
        for epoch in range(2):
            if kind != "list":
                part.sampler.set_epoch(epoch)
            batches = [one if kind == "list" else one[0][:, 0] * 10 for one in part]
            epochs.append([round(float(value)) for batch in batches for value in batch])
        found[kind] = epochs
        found[f"{kind} again"] = share_loader(part, **where) is part if kind != "list" else True
    return found


class Stream(IterableDataset[Any]):
    """Data that can only be iterated."""

    def __iter__(self) -> Any:
        yield from data(4)


def unshareable() -> str:
    some, again = RandomSampler(data(8), num_samples=3), RandomSampler(data(8), replacement=True)
    loaders = [DataLoader(Stream()), DataLoader(data(8), sampler=some), DataLoader(data(8), sampler=again)]
    loaders.append(DataLoader(data(8), batch_size=None))
    found = []
    for loader in loaders:
        try:
            share_loader(loader, rank=0, ranks=2, seed=0)
            found.append("nothing was raised")
        except OptionError as error:
            found.append(str(error))
    return next((text for text in found if "in its order or shuffled" not in text), found[0])


# -- a run ---------------------------------------------------------------------------------------------------


def reductions() -> dict[str, Any]:
    """Train, and return what rank 0's sink received and what each rank's result is."""
    sink, seen = Records(), []

    def evaluate(model: nn.Module) -> dict[str, Any]:
        seen.append(type(model).__name__)
        return {"val_acc": 0.25 + 0.5 * dist.get_rank(), "name": "own"}

    made = experiment(evaluate=evaluate)
    hook = Local()
    manager = hl.HookManager(hooks=[hook], sinks=[sink])
    result = hl.epoch_loop(made, epochs=2, manager=manager)
    steps = sink.metrics("POST_STEP")
    return {
        "records": [(point, step, sorted(found)) for point, step, found in sink.records],
        "epoch": sink.metrics("POST_EPOCH"),
        "steps": {name: (list(value), value.steps) for name, value in steps.items()},
        "result": (result.steps, result.loss, result.metrics),
        "seen": seen,
        "parameters": hook.seen,
        "names": sorted(manager.get_last_metrics()),
        "synced": [float(value.detach().double().sum()) for value in made.model.module.parameters()],
    }


def stops_together() -> tuple[int, bool]:
    """One rank has enough; both stop after the same step."""
    made = experiment(should_stop=lambda step, metrics: dist.get_rank() == 1 and step == 4)
    result = hl.step_loop(made, steps=STEPS)
    return result.steps, result.stopped_early


def inert() -> dict[str, bool]:
    """Train with and without observers; a hook that draws from the run's own stream is the negative control."""

    class Careless(hl.TrainingHook):
        hook_points = frozenset({hl.HookPoint.POST_STEP})
        pure = True

        def compute(self, ctx: Any) -> None:
            torch.rand(1)

    found: dict[str, Any] = {}
    for name, hooks in {
        "without": None,
        "with": ["norms", "stats", "training_metrics"],
        "careless": [Careless()],
    }.items():
        made = experiment()
        manager = None
        if hooks is not None:
            names = [hook for hook in hooks if isinstance(hook, str)]
            manager = hl.HookManager(names, [h for h in hooks if not isinstance(h, str)], sinks=[Records()])
        hl.step_loop(made, steps=STEPS, manager=manager, snapshot_every=5)
        found[name] = weights(made)
    return {name: same(found[name], found["without"]) for name in ("with", "careless")}


def trains_another_name() -> str:
    """An experiment that trains the model that it made, and not the one that was wrapped, is told so."""
    made = experiment()
    inner = made.model.module

    def train_step(batch: Any) -> Any:
        made.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(inner(batch[0]), batch[1])
        loss.backward()
        made.optimizer.step()
        return loss

    made.train_step = train_step
    return _ended(lambda: hl.step_loop(made, steps=4))


# -- errors --------------------------------------------------------------------------------------------------


def _ended(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


class BrokenAtStart(hl.TrainingHook):
    """Cannot be started on rank 1."""

    name = "broken"
    hook_points = frozenset({hl.HookPoint.POST_EPOCH})

    def start(self, model: Any) -> None:
        """Raise on rank 1."""
        if dist.get_rank() == 1:
            raise ValueError("the second rank has a bad day")

    def compute(self, ctx: Any) -> dict[str, Any]:
        """Return nothing."""
        return {}


def raises_everywhere() -> dict[str, Any]:
    """A hook raises on rank 1, at a step, at the end of an epoch and when it is started, under each policy.

    But not one that ends the run at a step: only that rank ends then, see `raises_at_a_step`.
    """
    found: dict[str, Any] = {}
    cases: dict[str, Any] = {
        "POST_STEP": lambda: Broken(hl.HookPoint.POST_STEP),
        "POST_EPOCH": lambda: Broken(hl.HookPoint.POST_EPOCH),
        "start": BrokenAtStart,
    }
    for case, make in cases.items():
        for policy in ("warn", "disable") if case == "POST_STEP" else ("raise", "warn", "disable"):
            sink = Records()
            manager = hl.HookManager(hooks=[Local(), make()], sinks=[sink], on_error=policy)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", HooklineWarning)
                ended = _ended(lambda manager=manager: hl.epoch_loop(experiment(), epochs=2, manager=manager))
            found[f"{case} {policy}"] = {
                "ended": ended,
                "off": "broken" in manager.plan.left_out,
                "step": manager.global_step,
                "warned": [str(one.message) for one in caught if "bad day" in str(one.message)],
                "log": [one for one in sink.records if "run/error" in one[2]],
                "kept": "local/plain" in sink.metrics("POST_EPOCH") or "local/plain" in sink.metrics("POST_STEP"),
            }
    return found


def other_hooks() -> str:
    """Rank 1 has one hook more."""
    hooks: list[Any] = [Local()]
    if dist.get_rank() == 1:
        hooks.append(Broken(hl.HookPoint.POST_STEP, step=99))
    return _ended(lambda: hl.step_loop(experiment(), steps=4, manager=hl.HookManager(hooks=hooks)))


def all_together() -> dict[str, Any]:
    """Run every case that all ranks come back from."""
    cases = [
        parts_of_data, unshareable, reductions, stops_together, inert,
        trains_another_name, raises_everywhere, other_hooks,
    ]  # fmt: skip
    return run_cases(cases)


# -- a rank that is gone -------------------------------------------------------------------------------------


def raises_in_the_data() -> str:
    """A loader raises on rank 1 alone: rank 0 learns which rank, and why."""

    class Batches(list[Any]):
        def __iter__(self) -> Any:
            for number, batch in enumerate(super().__iter__()):
                if number == 5 and dist.get_rank() == 1:
                    raise OSError("disk on fire")
                yield batch

    made = experiment()
    made.loader = Batches(made.loader)
    return _ended_with_notes(made, [Local()])


def raises_at_a_step() -> str:
    """A hook raises on rank 1 alone, at a step: that rank ends."""
    return _ended_with_notes(experiment(), [Local(), Broken(hl.HookPoint.POST_STEP)])


def _ended_with_notes(made: hl.Experiment, hooks: list[Any]) -> str:
    manager = hl.HookManager(hooks=hooks, sinks=[Records()])
    try:
        hl.step_loop(made, steps=STEPS, manager=manager)
    except Exception as error:
        text = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        if dist.get_rank() == 1:
            sys.stdout.flush()
        return text
    return "went on"


def command_line(*arguments: str) -> tuple[int, str]:
    """``hookline ...`` on this rank; its exit code and what it printed."""
    from hookline.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return main(list(arguments)), printed.getvalue()
