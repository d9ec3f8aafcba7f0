"""A run that is stopped and resumed is the run that never stopped: over all kinds of data, experiments and settings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers_loops import differences, left_by, linear_experiment, rich_experiment, seed_everything
from helpers_resume import Sampled, make, outcome, read_records, train
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

import hookline as hl
from hookline.errors import ResumeError
from hookline.training import metric_output as recording
from hookline.training.checkpoints.checkpoints import Checkpoints

BATCHES = 5


class StopAt(hl.TrainingHook):
    """Presses Ctrl-C after some steps of the run."""

    hook_points = {hl.HookPoint.POST_STEP}
    pure = True

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def compute(self, ctx: hl.RunDataContext) -> None:
        if ctx.step in self.steps:
            signal.raise_signal(signal.SIGINT)


def stop_and_go(
    make_experiment: Callable[[], Any], tmp_path: Any, stops: tuple[int, ...], loop: str = "epoch", **options: Any
) -> tuple[Any, hl.training.LoopResult]:
    """Train until it is done, stopped after these steps, each time by another process as far as one can tell."""
    length = {"epochs": 3} if loop == "epoch" else {"steps": 3 * BATCHES, "snapshot_every": 4}
    left, times = stops, len(stops)
    for number in range(times + 1):
        experiment = make_experiment()
        if number:  # streams stand elsewhere in another process
            torch.rand(17), np.random.rand(3)
        manager = hl.HookManager(hooks=[StopAt(*left)])
        run = hl.epoch_loop if loop == "epoch" else hl.step_loop
        checkpoints = Checkpoints(tmp_path / "checkpoints", **options)
        result = run(experiment, manager=manager, checkpoints=checkpoints, resume=True, **length)
        if result.interrupted is None:
            assert number == times
            return experiment, result
        assert result.interrupted == "SIGINT"
        left = tuple(step for step in left if step > manager.global_step)
    raise AssertionError("it was stopped more often than it was to be")


def uninterrupted(make_experiment: Callable[[], Any], loop: str = "epoch") -> tuple[Any, hl.training.LoopResult]:
    experiment = make_experiment()
    if loop == "epoch":
        return experiment, hl.epoch_loop(experiment, epochs=3)
    return experiment, hl.step_loop(experiment, steps=3 * BATCHES, snapshot_every=4)


def with_loader(loader: Callable[[], Any], **options: Any) -> Callable[[], hl.Experiment]:
    """An experiment over data of some kind."""

    def make_experiment() -> hl.Experiment:
        experiment = rich_experiment(evaluate=None, **options)
        experiment.loader = loader()
        return experiment

    return make_experiment


def dataset() -> Sampled:
    return Sampled(8 * BATCHES)


class Counting(Sampler):
    """Counts its passes itself, and takes another order in each."""

    def __init__(self, size: int) -> None:
        self.size, self.passes = size, 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(np.random.RandomState(self.passes).permutation(self.size).tolist())

    def __len__(self) -> int:
        return self.size


class KnowsItsPlace:
    """A loader that can tell where it is, as torchdata's does; it cannot be iterated from the start again."""

    def __init__(self) -> None:
        data = torch.Generator().manual_seed(4)
        self.batches = [
            (torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)) for _ in range(3 * BATCHES)
        ]
        self.passes = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < BATCHES:
            self.at += 1
            yield self.batches[self.passes * BATCHES + self.at - 1]
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at = state["passes"], state["at"]


class Drawing:
    """Can only be iterated; draws its batches from the stream of the run."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(BATCHES):
            yield torch.randn(8, 6), torch.randint(3, (8,))


class CountsItself:
    """A loader of one's own with a length, which takes another order in each pass, by its own count."""

    def __init__(self) -> None:
        self.data, self.passes = dataset(), 0

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        order = np.random.RandomState(self.passes).permutation(len(self.data))[index * 8 : index * 8 + 8]
        return self.data.x[order], self.data.y[order]

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return (self[index] for index in range(BATCHES))


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [
        (torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g))
        for g in (torch.Generator().manual_seed(9),)
        for _ in range(BATCHES)
    ],
    "shuffled by the stream of the run": lambda: DataLoader(dataset(), batch_size=8, shuffle=True),
    "with replacement": lambda: DataLoader(
        dataset(),
        batch_size=8,
        sampler=RandomSampler(dataset(), replacement=True, generator=torch.Generator().manual_seed(1)),
    ),
    "batch sampler": lambda: DataLoader(
        dataset(), batch_sampler=BatchSampler(RandomSampler(dataset()), 8, drop_last=True)
    ),
    "sampler that counts": lambda: DataLoader(dataset(), batch_size=8, sampler=Counting(8 * BATCHES)),
    "in order, with noise": lambda: DataLoader(dataset(), batch_size=8, sampler=SequentialSampler(dataset())),
    "two workers": lambda: DataLoader(
        dataset(), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "that knows its place": KnowsItsPlace,
    "that counts itself": CountsItself,
}


@pytest.mark.product(1, name=list(LOADERS), loop=["epoch", "step"])
def test_data_go_on_where_they_were(name, loop, tmp_path):
    """In the middle of a pass, right after its last step, and in the next one."""
    make_experiment = with_loader(LOADERS[name])
    expected, expected_result = uninterrupted(make_experiment, loop)
    experiment, result = stop_and_go(make_experiment, tmp_path, (1, BATCHES - 1, BATCHES, 2 * BATCHES + 1), loop)
    assert differences(left_by(expected), left_by(experiment)) == []
    assert result == expected_result


def test_workers_that_persist_are_started_without_a_draw(tmp_path):
    """They are there from the first pass on; to start them in a later one must not move the stream."""

    class Fixed(Sampled):
        def __getitem__(self, index):
            return self.x[index], self.y[index]

    make_experiment = with_loader(
        lambda: DataLoader(
            Fixed(8 * BATCHES),
            batch_size=8,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
    )
    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, (2, BATCHES + 1), every=1)
    assert differences(left_by(expected), left_by(experiment)) == []


@pytest.mark.product(1, options={"accumulate": {"accumulate": 2}, "clip": {"clip_norm": 0.1}}, loop=["epoch", "step"])
def test_settings_of_the_step_make_no_difference(options, loop, tmp_path):
    """With two batches to a step, a pass of five has three steps."""
    make_experiment = with_loader(LOADERS["shuffled by the stream of the run"], **options)
    expected, expected_result = uninterrupted(make_experiment, loop)
    experiment, result = stop_and_go(make_experiment, tmp_path, (1, 2, 4), loop)
    assert differences(left_by(expected), left_by(experiment)) == []
    assert result == expected_result


def test_a_loader_made_for_each_epoch_is_made_again(tmp_path):
    """From the stream that it was made from, by a generator of the experiment's own."""

    class Curriculum(hl.Experiment):
        def __init__(self):
            like = rich_experiment()
            super().__init__(like.model, like.optimizer, scheduler=like.scheduler)
            self.generator = torch.Generator().manual_seed(5)

        def get_loader(self, epoch):
            order = torch.randperm(8 * BATCHES, generator=self.generator)
            data = dataset()
            return [(data.x[rows] + torch.randn(1), data.y[rows]) for rows in order.split(8)]

        def loss_fn(self, model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])

    expected, _ = uninterrupted(Curriculum)
    experiment, _ = stop_and_go(Curriculum, tmp_path, (2, 4, 8))
    assert differences(left_by(expected), left_by(experiment)) == []
    assert torch.equal(expected.generator.get_state(), experiment.generator.get_state())


class Endless(IterableDataset):
    """Nobody knows what it will give."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(8 * BATCHES):
            yield torch.randn(6), torch.randint(3, ())


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_data_that_can_only_be_iterated_begin_the_pass_anew(loop, tmp_path):
    """It is said once; the epoch is done again from its start, and the run ends as it would have."""
    make_experiment = with_loader(lambda: DataLoader(Endless(), batch_size=8))
    expected, _ = uninterrupted(make_experiment, loop)
    run, length = (hl.epoch_loop, {"epochs": 3}) if loop == "epoch" else (hl.step_loop, {"steps": 15})
    for stop in (2, 8, -1):
        experiment = make_experiment()
        options = {"manager": hl.HookManager(hooks=[StopAt(stop)]), "checkpoints": Checkpoints(tmp_path)}
        expect = nullcontext() if stop < 0 else pytest.warns(hl.HooklineWarning, match=r"DataLoader.*middle of a pass")
        with expect as caught:
            result = run(experiment, resume=True, **options, **length)
        assert stop < 0 or (len(caught), result.interrupted) == (1, "SIGINT")
    assert (result.interrupted, result.steps) == (None, 15)
    assert differences(left_by(expected), left_by(experiment)) == []


def test_data_that_are_said_to_come_again_are_gone_through_again(tmp_path):
    """``replay=True``: no warning, and the middle of the pass is the middle of the pass."""
    make_experiment = with_loader(Drawing)
    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, (2, 8), replay=True)
    assert differences(left_by(expected), left_by(experiment)) == []


def test_data_that_have_become_fewer_are_noticed(tmp_path):
    """Instead of skipping over what is not there."""
    hl.epoch_loop(
        linear_experiment(batches=4),
        epochs=1,
        manager=hl.HookManager(hooks=[StopAt(2)]),
        checkpoints=Checkpoints(tmp_path),
    )
    with pytest.raises(ResumeError, match=r"after 3 steps.*data for 2"):
        hl.epoch_loop(linear_experiment(batches=2), epochs=1, checkpoints=Checkpoints(tmp_path), resume=True)


# -- experiments ---------------------------------------------------------------------------------------------------


def test_two_optimizers_in_a_list_and_a_plain_object_go_on(tmp_path):
    """Duck typing: a step of its own, no loader, state in lists and dictionaries."""

    class Adversaries:
        optimizer = scheduler = scaler = None

        def __init__(self):
            torch.manual_seed(0)
            self.maker, self.judge = nn.Linear(2, 3), nn.Linear(3, 1)
            self.model = nn.ModuleDict({"maker": self.maker, "judge": self.judge})
            self.optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.maker, self.judge)]
            self.best = {"loss": float("inf"), "at": None}
            self.last = torch.zeros(3)
            self.array = np.zeros(2)

        def train_step(self, batch):
            real, made = torch.randn(8, 3), self.maker(torch.randn(8, 2))
            for optimizer, sign, fake in ((self.optimizers[1], 1, made.detach()), (self.optimizers[0], -1, made)):
                optimizer.zero_grad()
                loss = sign * (self.judge(fake).mean() - self.judge(real).mean())
                loss.backward()
                optimizer.step()
            if loss.item() < self.best["loss"]:
                self.best |= {"loss": loss.item(), "at": len(self.best)}
            self.last.copy_(made[0].detach())
            self.array += loss.item()
            return loss

    def left(experiment):
        states = [optimizer.state_dict()["state"] for optimizer in experiment.optimizers]
        tensors = {f"{n} {i} {k}": v for n, state in enumerate(states) for i, s in state.items() for k, v in s.items()}
        tensors |= experiment.model.state_dict() | {"last": experiment.last}
        return tensors | {"best": torch.tensor(experiment.best["loss"]), "array": torch.from_numpy(experiment.array)}

    expected, _ = uninterrupted(Adversaries, "step")
    experiment, _ = stop_and_go(Adversaries, tmp_path, (0, 3, 9), "step")
    assert differences(left(expected), left(experiment)) == []
    assert experiment.best == expected.best


def test_an_experiment_that_tells_its_own_state_is_asked(tmp_path):
    """Then its attributes are not looked at."""

    class Own(hl.Experiment):
        def __init__(self):
            like = linear_experiment(batches=BATCHES)
            super().__init__(like.model, like.optimizer, like.loader)
            self.told, self.untold = 0, 0

        def train_step(self, batch):
            self.told += 1
            self.untold += 1
            return super().train_step(batch)

        def state_dict(self):
            return {"told": self.told}

        def load_state_dict(self, state):
            self.told = state["told"]

    experiment, _ = stop_and_go(Own, tmp_path, (6,))
    assert (experiment.told, experiment.untold) == (15, 8)


class Drifts(nn.Module):
    """Draws from a generator of its own, and counts its calls in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.layer(x) * (1 + self.calls * 0.1) + torch.randn(3, generator=self.generator)


class Counts(Sampled):
    """Counts what is read of it."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads = self.reads + 1
        x, y = super().__getitem__(index)
        return x * (1 + self.reads * 0.01), y


@pytest.mark.parametrize("stops", [(1,), (7, 11)])
def test_what_modules_and_datasets_keep_besides_goes_on(stops, tmp_path):
    """Generators and counters that are in no state dict."""

    def make_experiment():
        seed_everything()
        model = Drifts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return hl.Experiment(model, optimizer, DataLoader(Counts(8 * BATCHES), batch_size=8, shuffle=True))

    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, stops)
    assert differences(left_by(expected), left_by(experiment)) == []
    assert experiment.model.calls == expected.model.calls == 15
    assert torch.equal(experiment.model.generator.get_state(), expected.model.generator.get_state())


def test_a_plain_object_that_is_written_to_goes_on(tmp_path):
    """A dataclass on the experiment, in place; one that was exchanged for another cannot be, and is named."""

    @dataclass
    class Progress:
        steps: int = 0
        best: list[float] = field(default_factory=list)

    class Own(hl.Experiment):
        def __init__(self):
            like = linear_experiment(batches=BATCHES)
            super().__init__(like.model, like.optimizer, like.loader)
            self.progress = self.same = Progress()

        def train_step(self, batch):
            result = super().train_step(batch)
            self.progress.steps += 1
            self.progress.best.append(float(result.loss))
            return result

    expected, _ = uninterrupted(Own)
    experiment, _ = stop_and_go(Own, tmp_path / "in place", (6, 8))
    assert experiment.progress == expected.progress
    assert experiment.same is experiment.progress

    class Exchanged(Own):
        def train_step(self, batch):
            self.progress = Progress(self.progress.steps + 1)
            return hl.Experiment.train_step(self, batch)

    with pytest.warns(hl.HooklineWarning, match=r"experiment\.progress has changed.*Progress"):
        hl.epoch_loop(Exchanged(), epochs=1, checkpoints=Checkpoints(tmp_path / "exchanged"))


def test_modules_may_record_in_an_evaluation_that_a_resumed_run_begins_with(tmp_path):
    """Before its first step: the manager is in the step that was made last."""

    class Evaluates(hl.Experiment):
        def evaluate(self, model):
            return {"mean": model(torch.ones(2, 2)).mean()}

    def go_on(press: bool) -> hl.sinks.MemorySink:
        like, sink = linear_experiment(batches=BATCHES), hl.sinks.MemorySink()
        experiment = Evaluates(like.model, like.optimizer, like.loader)
        experiment.model.register_forward_hook(lambda module, args, output: hl.record("seen", output.detach().mean()))
        manager = hl.HookManager(hooks=[StopAt(BATCHES - 1 if press else -1)], sinks=[sink])
        options = {"checkpoints": Checkpoints(tmp_path), "resume": True}
        result = hl.epoch_loop(experiment, epochs=2, manager=manager, **options)
        assert (result.interrupted is not None) is press
        return sink

    go_on(press=True)
    recording.set_recorder(None)  # as in another process
    assert "seen" in go_on(press=False).latest


def test_what_was_not_changed_is_not_saved_and_what_cannot_be_is_named(tmp_path):
    """Data on the experiment stay out of the file; an attribute that changed and cannot be kept is warned of once."""

    class Odd(hl.Experiment):
        def __init__(self):
            like = linear_experiment(batches=BATCHES)
            super().__init__(like.model, like.optimizer, like.loader)
            self.data = torch.randn(1000, 1000)
            self.rows = [torch.randn(1000) for _ in range(100)]
            self.teacher = nn.Linear(500, 500).requires_grad_(False).eval()
            self.odd = None

        def train_step(self, batch):
            self.odd = iter([1])
            return super().train_step(batch)

    with pytest.warns(hl.HooklineWarning, match=r"experiment\.odd has changed.*list_iterator") as caught:
        hl.epoch_loop(Odd(), epochs=2, checkpoints=(kept := Checkpoints(tmp_path, every=1)))
    assert len(caught) == 1
    assert kept.nbytes < 50_000


@pytest.mark.parametrize("kind", ["plateau", "one cycle", "sequential", "lambda"])
def test_schedulers_of_all_kinds_go_on(kind, tmp_path):
    """By epoch and by step; inside one another; with a function."""
    schedulers = torch.optim.lr_scheduler

    def make_experiment():
        experiment = rich_experiment(evaluate=None)
        optimizer = experiment.optimizer = torch.optim.AdamW(experiment.model.parameters(), lr=1e-2, amsgrad=True)
        experiment.scheduler = {
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
            "one cycle": lambda: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=15),
            "sequential": lambda: schedulers.SequentialLR(
                optimizer, [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [1]
            ),
            "lambda": lambda: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        }[kind]()
        return experiment

    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, (1, 4, 7, 12))
    assert differences(left_by(expected), left_by(experiment)) == []


def test_state_that_is_wider_than_its_parameter_stays_so(tmp_path):
    """An optimizer that keeps float32 for bfloat16 parameters: torch would narrow it when it loads."""

    class Wide(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                master = self.state[parameter].setdefault("master", parameter.float())
                master -= 1e-3 * parameter.grad.float()
                parameter.copy_(master)

    def make_experiment():
        torch.manual_seed(0)
        model = nn.Linear(4, 2).bfloat16()
        data = [(torch.randn(8, 4).bfloat16(), torch.randn(8, 2).bfloat16()) for _ in range(BATCHES)]
        return hl.Experiment(model, Wide(model.parameters(), lr=1e-3), data)

    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, (3, 7))
    assert differences(left_by(expected), left_by(experiment)) == []
    assert experiment.optimizer.state[experiment.model.weight]["master"].dtype is torch.float32


def test_modes_and_frozen_parameters_are_part_of_the_run(tmp_path):
    """What was thawed on the way is thawed."""

    def make_experiment():
        experiment = rich_experiment(evaluate=None, on_epoch_end=lambda epoch, metrics: thaw(experiment.model))
        experiment.model[0].weight.requires_grad_(False)
        experiment.model[1].eval()
        return experiment

    def thaw(model):
        model[0].weight.requires_grad_(True)
        model[1].train()

    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, (7,))
    assert differences(left_by(expected), left_by(experiment)) == []
    assert experiment.model[0].weight.requires_grad


# -- the whole of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_run_that_is_saved_at_every_step_is_the_run_without(loop, tmp_path):
    """Saving is inert: weights, streams, hooks, interventions, a watch, every record."""
    found = []
    for number, options in enumerate(({}, {"checkpoints": Checkpoints(tmp_path / "kept", every_steps=1)})):
        folder = tmp_path / str(number)
        folder.mkdir()
        experiment, manager = make(folder)
        result = train(loop, experiment, manager, **options)
        manager.close()
        found.append((outcome(experiment, manager), read_records(folder), result))
    (plain, plain_records, plain_result), (saved, records, result) = found
    assert differences(plain, saved) == []
    assert records == plain_records
    assert result == plain_result
    assert options["checkpoints"].count >= 25


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_a_finished_run_says_so_and_one_that_is_asked_for_more_goes_on(loop, tmp_path):
    """And comes to the same as one that was asked for all of it from the beginning."""

    def run(experiment, much, **options):
        if loop == "epoch":
            return hl.epoch_loop(experiment, epochs=much, **options)
        return hl.step_loop(experiment, steps=much * 5, snapshot_every=4, **options)

    expected = rich_experiment()
    run(expected, 4)
    first = run(rich_experiment(), 2, checkpoints=Checkpoints(tmp_path))
    experiment = rich_experiment()
    with pytest.warns(hl.HooklineWarning, match="complete: 10 steps"):
        again = run(experiment, 2, checkpoints=Checkpoints(tmp_path), resume=True)
    assert again == first
    experiment = rich_experiment()
    result = run(experiment, 4, checkpoints=Checkpoints(tmp_path), resume=True)
    assert result.steps == 20
    assert differences(left_by(expected), left_by(experiment)) == []


def test_a_run_that_has_had_enough_stays_so(tmp_path):
    """Early stopping is remembered."""

    def make_experiment():
        return linear_experiment(should_stop=lambda epoch, metrics: epoch == 1)

    first = hl.epoch_loop(make_experiment(), epochs=9, checkpoints=Checkpoints(tmp_path))
    assert (first.stopped_early, first.epochs) == (True, 2)
    with pytest.warns(hl.HooklineWarning, match="complete: 6 steps"):
        again = hl.epoch_loop(make_experiment(), epochs=9, checkpoints=Checkpoints(tmp_path), resume=True)
    assert again == first


def test_epochs_and_steps_that_hooks_see_go_on(tmp_path):
    """No epoch is shown twice, none is left out, and step numbers have no gap."""
    seen = []

    class Sees(hl.TrainingHook):
        hook_points = {hl.HookPoint.PRE_EPOCH, hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH}

        def compute(self, ctx):
            seen.append((ctx.hook_point.name, ctx.epoch, ctx.step))

    def run(*stops):
        seen.clear()
        for stop in (*stops, -1):
            manager = hl.HookManager(hooks=[Sees(), StopAt(stop)])
            options = {"checkpoints": Checkpoints(tmp_path / str(stops)), "resume": True}
            hl.epoch_loop(linear_experiment(), epochs=3, manager=manager, **options)
        return list(seen)

    assert run() == run(0, 2, 3)


def test_a_trainer_is_resumed_by_the_same_options(tmp_path):
    """It hands them on to the loop; what it has reported of each epoch is part of its state."""

    def trained(epochs, **options):
        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        trainer = hl.metta.Trainer(policy, [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(3)])
        trainer.train(epochs=epochs, checkpoints=Checkpoints(tmp_path, every=1), **options)
        return trainer

    first = trained(2)
    assert first.result.steps == 6
    second = trained(3, resume=True)
    assert (second.result.steps, len(second.metrics)) == (9, 3)


def test_trackers_that_cannot_tell_what_they_counted_are_named(tmp_path):
    """In the middle of an epoch; at its end they are empty."""
    tool_options = {"checkpoints": Checkpoints(tmp_path, every_steps=2)}
    policy = hl.metta.PolicyAutoBuilder({"actor": nn.Sequential(nn.Linear(4, 1), nn.ReLU())})
    trainer = hl.metta.Trainer(policy, [(torch.randn(4, 4), torch.rand(4, 1)) for _ in range(3)])
    hook = hl.metta.attach_relu_activation_hooks()("actor", trainer.context)
    match = r"'relu_activation_state' counted.*not saved"
    rule = policy.register_component_hook_rule(component_name="actor", hook=hook)
    with rule, pytest.warns(hl.HooklineWarning, match=match) as caught:
        trainer.train(epochs=2, **tool_options)
    assert len(caught) == 1


def test_hooks_may_come_and_go(tmp_path):
    """A run that was saved without a manager goes on with one, at the step where it was; and the other way round."""
    seen = []

    class Sees(hl.TrainingHook):
        hook_points = {hl.HookPoint.POST_STEP}

        def compute(self, ctx):
            seen.append(ctx.step)

    hl.step_loop(linear_experiment(), steps=4, checkpoints=Checkpoints(tmp_path))
    options = {"checkpoints": Checkpoints(tmp_path), "resume": True}
    result = hl.step_loop(linear_experiment(), steps=7, manager=hl.HookManager(hooks=[Sees()]), **options)
    assert (seen, result.steps) == ([4, 5, 6], 7)
    assert hl.step_loop(linear_experiment(), steps=8, **options).steps == 8
    assert Checkpoints(tmp_path).newest().name == "step_00000008.safetensors"


def test_a_run_that_began_elsewhere_is_saved_by_its_steps(tmp_path):
    """``first_step`` is part of the count."""
    experiment = linear_experiment()
    hl.step_loop(experiment, steps=8, first_step=5, checkpoints=Checkpoints(tmp_path))
    assert [path.name[5:13] for path in Checkpoints(tmp_path).paths()] == ["00000005", "00000008"]
    result = hl.step_loop(linear_experiment(), steps=9, checkpoints=Checkpoints(tmp_path), resume=True)
    assert result.steps == 4


def test_fewer_epochs_than_were_begun_leave_the_checkpoint_alone(tmp_path):
    """Forced, in the middle of an epoch: there is nothing to do, and nothing is saved over it."""
    manager = hl.HookManager(hooks=[StopAt(4)])
    hl.epoch_loop(linear_experiment(), epochs=3, manager=manager, checkpoints=Checkpoints(tmp_path))
    before = Checkpoints(tmp_path).newest().read_bytes()
    with pytest.warns(hl.HooklineWarning, match="complete"):
        hl.epoch_loop(linear_experiment(), epochs=1, checkpoints=Checkpoints(tmp_path, force=True), resume=True)
    assert Checkpoints(tmp_path).newest().read_bytes() == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own SparseAdam
def test_sparse_gradients_go_on(tmp_path):
    """Of an embedding, with a hook that may look at them."""

    def make_experiment():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2).requires_grad_(False))
        data = [(torch.randint(10, (6, 2)), torch.randint(2, (6,))) for _ in range(BATCHES)]
        return hl.Experiment(model, torch.optim.SparseAdam([model[0].weight], lr=0.1), data)

    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, (3, 7))
    assert torch.equal(expected.model[0].weight, experiment.model[0].weight)
    assert torch.equal(expected.model[0].weight.grad.to_dense(), experiment.model[0].weight.grad.to_dense())
