"""A run that is stopped and resumed is the run that never stopped: over all kinds of experiments, hooks and all."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers_loops import linear_experiment, rich_experiment, seed_everything
from helpers_resume import PASS, Sampled, left_by_both, make, outcome, read_records, stop_and_go, train
from helpers_training import differences
from torch import nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.training.checkpoints import Checkpoints


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

    expected, experiment = left_by_both(make_experiment, tmp_path, stops)
    assert experiment.model.calls == expected.model.calls == 15
    assert torch.equal(experiment.model.generator.get_state(), expected.model.generator.get_state())


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

    _, experiment = left_by_both(make_experiment, tmp_path, (3, 7))
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

    _, experiment = left_by_both(make_experiment, tmp_path, (7,))
    assert experiment.model[0].weight.requires_grad


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
