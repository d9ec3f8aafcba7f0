"""A run that is stopped and resumed is the run that never stopped: over all kinds of experiments, hooks and all."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers_loops import left_by, linear_experiment, rich_experiment, seed_everything
from helpers_resume import (
    PASS,
    Sampled,
    StopAt,
    make,
    outcome,
    read_records,
    stop_and_go,
    train,
    uninterrupted,
)
from helpers_training import differences
from torch import nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.lifecycle import manager as recording
from hookline.training.checkpoints import Checkpoints


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


def test_an_experiment_may_say_what_its_state_is(tmp_path):
    """Then only that is saved: an object by its attributes, one that tells its state, and one inside a dictionary."""

    class Counter:
        def __init__(self):
            self.count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    class Own(hl.Experiment):
        def __init__(self):
            like = linear_experiment(batches=PASS)
            super().__init__(like.model, like.optimizer, like.loader)
            self.untold, self.asked, self.mixed = 0, Counter(), {"counter": Counter(), "seen": [0]}
            self.object = type("Object", (), {})()
            self.object.count = 0

        @property
        def state(self):
            return {"asked": self.asked, "mixed": self.mixed, "object": vars(self.object)}

        def train_step(self, batch):
            self.untold += 1
            for counter in (self.object, self.asked, self.mixed["counter"]):
                counter.count += 1
            self.mixed["seen"].append(self.object.count)
            return super().train_step(batch)

    experiment, _ = stop_and_go(Own, tmp_path, (6,))
    assert (experiment.object.count, experiment.asked.count, experiment.mixed["counter"].count) == (15, 15, 15)
    assert experiment.mixed["seen"] == list(range(16))
    assert experiment.untold == 8


def test_a_state_that_cannot_be_saved_or_loaded_is_named(tmp_path):
    """At the start, where it costs nothing to mend; and before anything is loaded."""

    class Odd(hl.Experiment):
        odd = iter([1])

        @property
        def state(self):
            return {"odd": self.odd}

    like = linear_experiment(batches=PASS)
    odd = Odd(like.model, like.optimizer, like.loader)
    with pytest.raises(hl.errors.CheckpointError, match=r"odd.*list_iterator"):
        hl.epoch_loop(odd, epochs=1, checkpoints=Checkpoints(tmp_path / "odd"))
    assert list((tmp_path / "odd").glob("*.pt")) == []
    like.ranges = [np.array([slice(0, 1)])]
    with pytest.raises(hl.errors.CheckpointError, match=r"ranges.*array of object"):
        hl.epoch_loop(like, epochs=1, checkpoints=Checkpoints(tmp_path / "odd"))
    first = linear_experiment(batches=PASS)
    first.average = torch.optim.swa_utils.AveragedModel(first.model)
    hl.epoch_loop(first, epochs=1, checkpoints=Checkpoints(tmp_path / "average"))
    second = linear_experiment(batches=PASS)
    before = second.model.weight.clone()
    with pytest.raises(hl.errors.ResumeError, match=r"experiment\.average.*None"):
        hl.epoch_loop(second, epochs=2, checkpoints=Checkpoints(tmp_path / "average"), resume=True)
    assert torch.equal(second.model.weight, before)


def test_a_declared_number_that_nobody_could_set_is_refused_at_the_start(tmp_path):
    """Of an object that is no attribute: a resumed run would set something else. What can be set, or filled, is."""

    class Counts(hl.Experiment):
        declares = "queue"

        def __init__(self):
            like = linear_experiment(batches=PASS)
            super().__init__(like.model, like.optimizer, like.loader)
            self.hidden = type("Queue", (), {"count": 0, "sums": torch.zeros(1)})()

        @property
        def state(self):
            ways = {"queue": self.hidden.count, "count": self.count, "pair": (self.hidden.sums, [self.model])}
            return {self.declares: ways[self.declares]}

        @property
        def count(self):
            return self.hidden.count

        @count.setter
        def count(self, number):
            self.hidden.count = number

        def train_step(self, batch):
            self.hidden.count += 1
            self.hidden.sums = self.hidden.sums + 1
            return super().train_step(batch)

    with pytest.raises(hl.errors.CheckpointError, match=r"state\['queue'\] is.*int.*vars\(self\.queue\)"):
        hl.epoch_loop(Counts(), epochs=1, checkpoints=Checkpoints(tmp_path / "queue"))
    assert list((tmp_path / "queue").glob("*.pt")) == []
    for declares, found in (("count", 15), ("pair", 8)):
        Counts.declares = declares
        experiment, _ = stop_and_go(Counts, tmp_path / declares, (6,))
        assert experiment.hidden.count == found
        assert int(experiment.hidden.sums) == (8 if declares == "count" else 15)
        assert vars(experiment).keys() == vars(Counts()).keys()


@pytest.mark.parametrize(
    "late", [lambda model: torch.optim.SGD(model.parameters(), lr=0.1), lambda model: {"a": Mode.WARM}]
)
def test_an_object_that_is_made_on_the_way_is_refused_with_what_to_do(tmp_path, late):
    """A resumed run has nothing to load it into. One that is made before goes on."""

    def experiment_with(made: Any) -> hl.Experiment:
        def on_epoch_end(epoch, metrics):
            experiment.critic = late(experiment.model) if experiment.critic is None else experiment.critic

        experiment = linear_experiment(batches=PASS, on_epoch_end=on_epoch_end)
        experiment.critic = made and late(experiment.model)
        return experiment

    hl.epoch_loop(experiment_with(None), epochs=3, checkpoints=Checkpoints(tmp_path, every=1))
    with pytest.raises(hl.errors.ResumeError, match=r"experiment\.critic.*None.*Next: make it before"):
        hl.epoch_loop(experiment_with(None), epochs=4, checkpoints=Checkpoints(tmp_path), resume=True)
    hl.epoch_loop(experiment_with(True), epochs=4, checkpoints=Checkpoints(tmp_path), resume=True)


class Mode(enum.Enum):
    """What an experiment is doing."""

    WARM = 1
    FULL = 2


class Pair(NamedTuple):
    """Two sums."""

    steps: int
    loss: torch.Tensor


def kept_experiment(total: int = 3) -> hl.Experiment:
    """An experiment whose attributes are of many kinds; some change while it trains."""
    experiment = linear_experiment(batches=PASS)
    experiment.total, experiment.shape, experiment.odd = total, torch.Size((2, 3)), slice(0, 1)
    experiment.mode, experiment.sums = Mode.WARM, Pair(0, torch.zeros(1))
    return experiment


def note_epoch(experiment: hl.Experiment) -> hl.TrainingHook:
    """Return a hook that changes what the experiment keeps."""

    class Notes(hl.TrainingHook):
        name = "notes"
        hook_points = {hl.HookPoint.POST_EPOCH}

        def compute(self, ctx):
            experiment.mode = Mode.FULL
            experiment.sums = Pair(experiment.sums.steps + 1, experiment.sums.loss + 2)
            return {}

    return Notes()


def test_what_the_experiment_holds_goes_on_but_for_devices_and_paths(tmp_path):
    """Members of enums, named tuples and shapes are held; where a run is, the resumed program says."""
    first = kept_experiment()
    first.where = {"device": torch.device("cuda"), "folder": tmp_path, "left": 3}
    first.frozen, first.wide = np.frombuffer(b"abcd", np.uint8), torch.ones(1).expand(3)
    manager = hl.HookManager(hooks=[note_epoch(first)])
    hl.epoch_loop(first, epochs=1, manager=manager, checkpoints=Checkpoints(tmp_path))
    second = kept_experiment(total=6)
    second.where = {"device": torch.device("cpu"), "folder": tmp_path / "b", "left": 4}
    second.frozen, second.wide = np.frombuffer(b"abcd", np.uint8), torch.ones(1).expand(3)
    hl.epoch_loop(second, epochs=2, checkpoints=Checkpoints(tmp_path), resume=True)
    assert (second.mode, second.sums.steps, float(second.sums.loss)) == (Mode.FULL, 1, 2.0)
    assert (type(second.sums), second.shape, second.total) == (Pair, torch.Size((2, 3)), 3)
    assert second.where == {"device": torch.device("cpu"), "folder": tmp_path / "b", "left": 3}


def test_a_member_of_an_enum_needs_the_enum_to_be_loaded(tmp_path):
    """It is refused before anything is loaded, and not put there as something else."""
    first = kept_experiment()
    manager = hl.HookManager(hooks=[note_epoch(first)])
    hl.epoch_loop(first, epochs=1, manager=manager, checkpoints=Checkpoints(tmp_path))
    second = kept_experiment()
    second.mode = None
    before = second.model.weight.clone()
    with pytest.raises(hl.errors.ResumeError, match=r"experiment\.mode.*None"):
        hl.epoch_loop(second, epochs=2, checkpoints=Checkpoints(tmp_path), resume=True)
    assert torch.equal(second.model.weight, before)


class Drifts(nn.Module):
    """Draws from a generator of its own, and counts its calls in an attribute that it declares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(8)
        self.calls = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state)

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
    """Generators, the extra state of modules, and what a dataset counts."""

    def make_experiment():
        seed_everything()
        model = Drifts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return hl.Experiment(model, optimizer, DataLoader(Counts(8 * PASS), batch_size=8, shuffle=True))

    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, stops)
    assert differences(left_by(expected), left_by(experiment)) == []
    assert experiment.model.calls == expected.model.calls == 15
    assert torch.equal(experiment.model.generator.get_state(), expected.model.generator.get_state())


def test_a_plain_object_that_is_written_to_goes_on(tmp_path):
    """A dataclass on the experiment, written in place, or exchanged for another."""

    @dataclass
    class Progress:
        steps: int = 0
        best: list[float] = field(default_factory=list)

    class Own(hl.Experiment):
        def __init__(self):
            like = linear_experiment(batches=PASS)
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
        same = None

        def __init__(self):
            super().__init__()
            del self.same

        def train_step(self, batch):
            self.progress = Progress(self.progress.steps + 1)
            return hl.Experiment.train_step(self, batch)

    experiment, _ = stop_and_go(Exchanged, tmp_path / "exchanged", (6, 8))
    assert experiment.progress == Progress(15)


def test_modules_may_record_in_an_evaluation_that_a_resumed_run_begins_with(tmp_path):
    """Before its first step: the manager is in the step that was made last."""

    class Evaluates(hl.Experiment):
        def evaluate(self, model):
            return {"mean": model(torch.ones(2, 2)).mean()}

    def go_on(press: bool) -> hl.sinks.MemorySink:
        like, sink = linear_experiment(batches=PASS), hl.sinks.MemorySink()
        experiment = Evaluates(like.model, like.optimizer, like.loader)
        experiment.model.register_forward_hook(lambda module, args, output: hl.record("seen", output.detach().mean()))
        manager = hl.HookManager(hooks=[StopAt(PASS - 1 if press else -1)], sinks=[sink])
        options = {"checkpoints": Checkpoints(tmp_path), "resume": True}
        result = hl.epoch_loop(experiment, epochs=2, manager=manager, **options)
        assert (result.interrupted is not None) is press
        return sink

    go_on(press=True)
    recording.RECORDER.output = None  # as in another process
    assert "seen" in go_on(press=False).latest


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
        data = [(torch.randn(8, 4).bfloat16(), torch.randn(8, 2).bfloat16()) for _ in range(PASS)]
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
    assert Checkpoints(tmp_path).newest().name == "step_00000008.pt"


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
        data = [(torch.randint(10, (6, 2)), torch.randint(2, (6,))) for _ in range(PASS)]
        return hl.Experiment(model, torch.optim.SparseAdam([model[0].weight], lr=0.1), data)

    expected, _ = uninterrupted(make_experiment)
    experiment, _ = stop_and_go(make_experiment, tmp_path, (3, 7))
    assert torch.equal(expected.model[0].weight, experiment.model[0].weight)
    assert torch.equal(expected.model[0].weight.grad.to_dense(), experiment.model[0].weight.grad.to_dense())
