"""The folder of checkpoints: how many, which is newest, what is damaged; other settings, another model, a full disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers_loops import left_by, linear_experiment, rich_experiment
from helpers_training import differences
from helpers_warm import WarmPopen
from torch import nn
from torch.optim import lr_scheduler

import hookline as hl
from hookline.errors import CheckpointError, ResumeError
from hookline.lifecycle import checkpoint_file as module
from hookline.training.checkpoints import Checkpoints, lock_folder


def names(folder: Any) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(*numbers: int) -> list[str]:
    return [f"step_{number:08d}.pt" for number in numbers]


def saved_run(tmp_path: Any, epochs: int = 3, **options: Any) -> Checkpoints:
    """Three steps to an epoch, a checkpoint at the end of each."""
    checkpoints = Checkpoints(tmp_path, **{"every": 1, "keep": 9} | options)
    hl.epoch_loop(linear_experiment(), epochs=epochs, checkpoints=checkpoints)
    return checkpoints


# -- which there are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"every": 1, "keep": 9}, (0, 3, 6, 9, 12)),
        ({"every": 2, "keep": 9}, (0, 6, 12)),
        ({"every": 3, "keep": 9}, (0, 9, 12)),
        ({"every": 1}, (9, 12)),
        ({"every": 1, "keep": 1}, (12,)),
        ({"every_steps": 5, "keep": 9}, (0, 5, 10, 12)),
        ({}, (0, 12)),
    ],
    ids=str,
)
def test_how_often_and_how_many(options, kept, tmp_path):
    """One at the start and one at the end always; the oldest go."""
    hl.epoch_loop(linear_experiment(), epochs=4, checkpoints=Checkpoints(tmp_path, **options))
    assert names(tmp_path) == steps(*kept)


def test_other_wrong_uses_are_refused(tmp_path):
    """A path for Checkpoints, resume= with nowhere to resume from, a new run in the folder of another."""
    with pytest.raises(hl.errors.OptionError, match=r"Checkpoints.*got a str"):
        hl.epoch_loop(linear_experiment(), epochs=1, checkpoints=str(tmp_path))
    with pytest.raises(hl.errors.OptionError, match=r"resume=True.*checkpoints="):
        hl.epoch_loop(linear_experiment(), epochs=1, resume=True)
    saved_run(tmp_path)
    with pytest.raises(ResumeError, match=r"step_00000009.*resume=True"):
        hl.epoch_loop(linear_experiment(), epochs=1, checkpoints=Checkpoints(tmp_path))


# -- damage ---------------------------------------------------------------------------------------------------------


def damage(path: Any) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path):
    """It is told, put aside, and the run ends as it would have."""
    expected = linear_experiment()
    hl.epoch_loop(expected, epochs=4)
    saved_run(tmp_path)
    damage(tmp_path / steps(9)[0])
    (tmp_path / steps(6)[0]).write_bytes(b"")
    experiment = linear_experiment()
    options = {"checkpoints": Checkpoints(tmp_path, keep=9), "resume": True}
    with pytest.warns(hl.HooklineWarning, match=r"(damaged|cannot be read).*continues from step_00000003") as caught:
        result = hl.epoch_loop(experiment, epochs=4, **options)
    assert len(caught) == 2
    assert result.steps == 12
    assert differences(left_by(expected), left_by(experiment)) == []
    assert {f"{name}.damaged" for name in steps(6, 9)} <= set(names(tmp_path))
    assert Checkpoints(tmp_path).newest().name == steps(12)[0]


def test_a_checkpoint_of_another_version_is_named_with_what_to_do(tmp_path):
    """It is whole, so that nothing is put aside, and an older one is not taken in its place."""
    saved_run(tmp_path)
    newest = tmp_path / steps(9)[0]
    data = newest.read_bytes()
    newest.write_bytes(data[:-5] + b"2" + data[-4:])
    before = names(tmp_path)
    with pytest.raises(ResumeError, match=r"version 2.*version 4.*Next: continue with"):
        hl.epoch_loop(linear_experiment(), epochs=4, checkpoints=Checkpoints(tmp_path), resume=True)
    assert [name for name in names(tmp_path) if name not in before] == []
    assert module.is_checkpoint(newest)


def test_a_whole_file_that_is_no_checkpoint_of_a_run_is_refused(tmp_path):
    """A capture that somebody has saved under the name of one, say; before anything is loaded."""
    module.write(tmp_path / steps(9)[0], {"weights": torch.ones(3)})
    with pytest.raises(ResumeError, match=r"step_00000009.* no checkpoint of a run"):
        hl.epoch_loop(linear_experiment(), epochs=4, checkpoints=Checkpoints(tmp_path), resume=True)


def test_when_none_is_whole_all_are_listed(tmp_path):
    """And nothing is touched."""
    saved_run(tmp_path)
    for path in Checkpoints(tmp_path).paths():
        damage(path)
    before = names(tmp_path)
    with pytest.raises(ResumeError, match=r"(?s)None.*step_00000009.*step_00000006.*step_00000003.*step_00000000"):
        hl.epoch_loop(linear_experiment(), epochs=4, checkpoints=Checkpoints(tmp_path), resume=True)
    assert names(tmp_path) == before


# -- other settings, another model ----------------------------------------------------------------------------------


@dataclass
class Config:
    lr: float = 0.1
    epochs: int = 3
    layers: list[int] = field(default_factory=lambda: [4, 4])


def test_other_settings_are_refused_with_what_differs(tmp_path):
    """Unless forced; epochs may grow."""
    hl.epoch_loop(linear_experiment(config=Config()), epochs=3, checkpoints=Checkpoints(tmp_path))
    options = {"checkpoints": Checkpoints(tmp_path), "resume": True}
    other = linear_experiment(config=Config(lr=0.2, layers=[4]))
    with pytest.raises(ResumeError) as caught:
        hl.epoch_loop(other, epochs=3, eval_every=2, **options)
    lines = str(caught.value).splitlines()
    assert {"  config.lr: 0.1 → 0.2", "  config.layers: [4, 4] → [4]", "  loop.eval_every: 1 → 2"} <= set(lines)
    with pytest.raises(ResumeError, match="epochs: 3 → 2"):
        hl.epoch_loop(linear_experiment(config=Config(epochs=2)), epochs=2, **options)
    result = hl.epoch_loop(linear_experiment(config=Config(epochs=5)), epochs=5, **options)
    assert result.steps == 15
    forced = {"checkpoints": Checkpoints(tmp_path, force=True), "resume": True}
    assert hl.epoch_loop(other, epochs=6, **forced).steps == 18


def test_another_model_is_refused_and_nothing_is_loaded(tmp_path):
    """Missing, unknown, of another shape, of another type: named."""
    hl.epoch_loop(rich_experiment(), epochs=1, checkpoints=Checkpoints(tmp_path))

    def experiment_of(change):
        experiment = rich_experiment()
        change(experiment.model)
        experiment.optimizer = torch.optim.AdamW(experiment.model.parameters())
        experiment.scheduler = None
        return experiment

    changes = {
        r"4\.weight was float32 \(3, 16\) and is float32 \(5, 16\)": lambda m: m.__setitem__(4, nn.Linear(16, 5)),
        r"5\.bias was missing": lambda m: m.append(nn.Linear(3, 3)),
        r"4\.bias was float32 \(3,\) and is missing": lambda m: m.__setitem__(4, nn.Identity()),
        r"0\.bias was float32 \(16,\) and is float64 \(16,\)": lambda m: m.double(),
    }
    for message, change in changes.items():
        experiment = experiment_of(change)
        before = {name: value.clone() for name, value in experiment.model.state_dict().items()}
        with pytest.raises(ResumeError, match=f"{message}.*Nothing was loaded"):
            hl.epoch_loop(experiment, epochs=1, checkpoints=Checkpoints(tmp_path), resume=True)
        assert differences(before, experiment.model.state_dict()) == []


def test_another_optimizer_or_loop_is_refused(tmp_path):
    """And nothing is loaded."""
    hl.epoch_loop(rich_experiment(), epochs=1, checkpoints=Checkpoints(tmp_path))
    options = {"checkpoints": Checkpoints(tmp_path), "resume": True}

    def in_groups(model):
        return torch.optim.AdamW([{"params": list(part.parameters())} for part in (model[0], model[1:])])

    others = {
        r"groups of \[6\].*groups of \[2, 4\]": lambda e: {"optimizer": in_groups(e.model)},
        r"The optimizer is another one.*AdamW.*SGD": lambda e: {"optimizer": torch.optim.SGD(e.model.parameters())},
        r"The scheduler is another.*ConstantLR": lambda e: {"scheduler": lr_scheduler.ConstantLR(e.optimizer)},
        "has one for scheduler": lambda e: {"scheduler": None},
    }
    for message, change in others.items():
        experiment = rich_experiment()
        vars(experiment).update(change(experiment))
        with pytest.raises(ResumeError, match=message):
            hl.epoch_loop(experiment, epochs=1, **options)
        assert not experiment.optimizer.state
    with pytest.raises(ResumeError, match=r"epoch loop.*step loop"):
        hl.step_loop(rich_experiment(), steps=1, **options)


# -- faults ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_ever_less_often_and_the_run_goes_on(tmp_path, monkeypatch):
    """Of three failures the first two; the checkpoint of before is intact, and there is room again later."""
    expected = linear_experiment()
    hl.epoch_loop(expected, epochs=5)
    real, calls = module.write, []

    def write(path, tree):
        calls.append(path.name)
        if 2 <= len(calls) <= 4:
            path.with_name(".step_x").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(path, tree)

    monkeypatch.setattr(module, "write", write)
    experiment = linear_experiment()
    match = r"could not be saved after [36] steps.*No space left.*newest checkpoint is step_00000000"
    with pytest.warns(hl.HooklineWarning, match=match) as caught:
        hl.epoch_loop(experiment, epochs=5, checkpoints=Checkpoints(tmp_path, every=1, keep=9))
    assert len(caught) == 2
    assert differences(left_by(expected), left_by(experiment)) == []
    assert [path.name for path in Checkpoints(tmp_path).paths()] == steps(0, 12, 15)


class Keeps(hl.TrainingHook):
    """Has something in its state that no file can hold, from some step on."""

    hook_points = {hl.HookPoint.POST_STEP}

    def __init__(self, since: int) -> None:
        self.since, self.seen = since, 0

    def compute(self, ctx):
        self.seen += 1

    def state_dict(self):
        return {"list": [1, {"deep": print if self.seen >= self.since else None}]}


def test_what_cannot_be_saved_ends_the_run_at_its_start_and_is_told_later(tmp_path):
    """By its place in the tree."""
    manager = hl.HookManager(hooks=[Keeps(0)])
    with pytest.raises(CheckpointError, match=r"manager\.hooks\.Keeps\.list\.1\.deep"):
        hl.epoch_loop(linear_experiment(), epochs=1, manager=manager, checkpoints=Checkpoints(tmp_path / "a"))
    manager = hl.HookManager(hooks=[Keeps(4)])
    checkpoints = Checkpoints(tmp_path / "b", every=1)
    with pytest.warns(hl.HooklineWarning) as caught:
        result = hl.epoch_loop(linear_experiment(), epochs=8, manager=manager, checkpoints=checkpoints)
    told = [str(one.message) for one in caught]
    assert result.steps == 24
    assert checkpoints.newest().name == steps(3)[0]
    assert [text.partition(" steps")[0][-2:].strip() for text in told] == ["6", "9", "15", "24"]
    assert all(re.search(r"Keeps\.list\.1\.deep.*step_00000003", text) for text in told)


# -- one run to a folder --------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_kept_apart(tmp_path):
    """Within a process too; afterwards the folder is free."""
    with lock_folder(tmp_path), pytest.raises(ResumeError, match=rf"process {os.getpid()} writes"):
        hl.epoch_loop(linear_experiment(), epochs=1, checkpoints=Checkpoints(tmp_path))
    saved_run(tmp_path)
    saved_run(tmp_path / "other")


def test_the_lock_of_a_process_that_died_is_taken_over(tmp_path):
    """Killed, with its number still in the file; also where another process has that number by now."""
    held = "import sys, time\nfrom pathlib import Path\n"
    held += "from hookline.training.checkpoints import lock_folder\n"
    held += "lock = lock_folder(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)\n"
    process = WarmPopen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "held"
        with pytest.raises(ResumeError, match=rf"process {process.pid} writes"):
            saved_run(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "lock").read_text() == str(process.pid)
    saved_run(tmp_path)
    (tmp_path / "lock").write_text(str(os.getppid()))  # alive, and none of ours
    hl.epoch_loop(linear_experiment(), epochs=4, checkpoints=Checkpoints(tmp_path), resume=True)
