"""A run that is stopped and resumed is the run that never stopped: over all kinds of data and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers_loops import left_by, rich_experiment
from helpers_resume import PASS, NeedsAll, Sampled, StopAt, left_by_both, uninterrupted, with_loader
from helpers_training import differences
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

import hookline as hl
from hookline.training.checkpoints import Checkpoints


def dataset() -> Sampled:
    return Sampled(8 * PASS)


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
            (torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)) for _ in range(3 * PASS)
        ]
        self.passes = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < PASS:
            self.at += 1
            yield self.batches[self.passes * PASS + self.at - 1]
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at = state["passes"], state["at"]


class CountsItself:
    """A loader of one's own with a length, which takes another order in each pass, by its own count."""

    def __init__(self) -> None:
        self.data, self.passes = dataset(), 0

    def __len__(self) -> int:
        return PASS

    def __getitem__(self, index: int) -> Any:
        order = np.random.RandomState(self.passes).permutation(len(self.data))[index * 8 : index * 8 + 8]
        return self.data.x[order], self.data.y[order]

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return (self[index] for index in range(PASS))


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [
        (torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g))
        for g in (torch.Generator().manual_seed(9),)
        for _ in range(PASS)
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
    "sampler that counts": lambda: DataLoader(dataset(), batch_size=8, sampler=Counting(8 * PASS)),
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
    left_by_both(make_experiment, tmp_path, (1, PASS - 1, PASS, 2 * PASS + 1), loop)


def test_workers_that_persist_are_started_without_a_draw(tmp_path):
    """They are there from the first pass on; to start them in a later one must not move the stream."""

    class Fixed(Sampled):
        def __getitem__(self, index):
            return self.x[index], self.y[index]

    make_experiment = with_loader(
        lambda: DataLoader(
            Fixed(8 * PASS),
            batch_size=8,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
    )
    left_by_both(make_experiment, tmp_path, (2, PASS + 1), every=1)


@pytest.mark.product(1, options={"accumulate": {"accumulate": 2}, "clip": {"clip_norm": 0.1}}, loop=["epoch", "step"])
def test_settings_of_the_step_make_no_difference(options, loop, tmp_path):
    """With two batches to a step, a pass of five has three steps."""
    make_experiment = with_loader(LOADERS["shuffled by the stream of the run"], **options)
    left_by_both(make_experiment, tmp_path, (1, 2, 4), loop)


def test_a_loader_made_for_each_epoch_is_made_again(tmp_path):
    """From the stream that it was made from, by a generator of the experiment's own."""

    class Curriculum(hl.Experiment):
        def __init__(self):
            like = rich_experiment()
            super().__init__(like.model, like.optimizer, scheduler=like.scheduler)
            self.generator = torch.Generator().manual_seed(5)

        def get_loader(self, epoch):
            order = torch.randperm(8 * PASS, generator=self.generator)
            data = dataset()
            return [(data.x[rows] + torch.randn(1), data.y[rows]) for rows in order.split(8)]

        def loss_fn(self, model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])

    expected, experiment = left_by_both(Curriculum, tmp_path, (2, 4, 8))
    assert torch.equal(expected.generator.get_state(), experiment.generator.get_state())


class Endless(IterableDataset):
    """Nobody knows what it will give."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(8 * PASS):
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


def test_a_hook_that_may_go_back_to_before_the_epoch_has_it_done_again(tmp_path):
    """It is said once; the run ends as it would have, and the hook has seen the same."""
    make_experiment = with_loader(lambda: DataLoader(Sampled(8 * PASS), batch_size=8))
    seen = [uninterrupted(make_experiment)[0]]
    found: list[list[Any]] = []
    for stops in ((-1,), (2, 8, -1)):
        for stop in stops:
            experiment, hook = make_experiment(), NeedsAll()
            manager = hl.HookManager(hooks=[StopAt(stop), hook], sinks=[sink := hl.sinks.MemorySink()])
            expect = nullcontext() if stop < 0 else pytest.warns(hl.HooklineWarning, match=r"before the epoch")
            options = {"manager": manager, "checkpoints": Checkpoints(tmp_path / str(len(stops)))}
            with expect:
                hl.epoch_loop(experiment, epochs=3, resume=True, **options)
        seen.append(experiment)
        last = [record.metrics for record in sink.records if record.epoch == 2]
        found.append([metrics["needs_all/before"] for metrics in last if "needs_all/before" in metrics])
    assert differences(left_by(seen[0]), left_by(seen[1])) == []
    assert differences(left_by(seen[1]), left_by(seen[2])) == []
    assert found[0] == found[1] != []
