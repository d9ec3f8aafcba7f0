"""What ranks do in the tests of checkpoints of several ranks; called in processes by `helpers_ranks`."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers_ranks import run_cases
from rank_run_scenarios import Net, Records, data, experiment
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import hookline as hl
from hookline.training.ranks import share_experiment

EPOCHS = 3
STOPS_AT = 17
"""The step that a run ends in the middle of an epoch by: there are 12 in each."""


class Draws(hl.TrainingHook):
    """Keeps a sum that is the same on all ranks, and one that is not."""

    name = "draws"
    hook_points = frozenset({hl.HookPoint.POST_STEP})

    def __init__(self) -> None:
        self.total = torch.zeros(1)
        self.own = torch.zeros(1)

    def compute(self, ctx: Any) -> dict[str, Any]:
        self.total += ctx.step
        self.own += float(torch.rand(1)) + float(np.random.rand())
        return {"total": self.total, "own": self.own}

    def get_state_tensors(self) -> dict[str, Any]:
        return {"total": self.total, "own": self.own}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        self.total, self.own = tensors["total"], tensors["own"]


class Stop(hl.TrainingHook):
    """Ends the run by what it is given, at a step."""

    name = "stop"
    hook_points = frozenset({hl.HookPoint.POST_STEP})

    def __init__(self, step: int | None, act: Any) -> None:
        self.step, self.act = step, act

    def compute(self, ctx: Any) -> None:
        if ctx.step == self.step:
            self.act()


def sharded(*, seed: int = 3) -> hl.Experiment:
    """Return an experiment whose model is sharded by FSDP2."""
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model.body)
    fully_shard(model)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    made = hl.Experiment(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    share_experiment(made, rank=dist.get_rank(), ranks=dist.get_world_size(), seed=3)
    torch.manual_seed(seed + 1000 * dist.get_rank())
    return made


def local(made: hl.Experiment) -> dict[str, Any]:
    """Return what this rank has of weights, buffers and optimizer, as bytes."""
    tensors = dict(made.model.state_dict())
    for index, state in made.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{key}": value for key, value in state.items()}
    parts = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in tensors.items()}
    return {name.removeprefix("module."): value.detach().numpy().tobytes() for name, value in parts.items()}


def train(
    made: hl.Experiment, folder: str, *, stop: Any = None, resume: bool = False, epochs: int = EPOCHS, **options: Any
) -> Any:
    """Train with hooks and checkpoints; return weights, records and result."""
    sink = Records()
    hooks: list[Any] = [Draws(), Stop(STOPS_AT if stop is not None else None, stop), "norms"]
    names = [hook for hook in hooks if isinstance(hook, str)]
    manager = hl.HookManager(names, hooks[:2], sinks=[sink], **options)
    checkpoints = hl.Checkpoints(folder, every_steps=8)
    try:
        result = hl.epoch_loop(made, epochs=epochs, manager=manager, checkpoints=checkpoints, resume=resume)
    except (RuntimeError, hl.errors.ResumeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        manager.close()
    hooks_now = manager.state_dict()["hooks"]
    return {"weights": local(made), "records": sink.records, "steps": result.steps, "hooks": hooks_now}


def _fail() -> None:
    raise RuntimeError("stopped here")


def _compared(whole: Any, resumed: Any) -> dict[str, Any]:
    return {
        "weights": whole["weights"] == resumed["weights"],
        "steps": (whole["steps"], resumed["steps"]),
        "hooks": repr(whole["hooks"]) == repr(resumed["hooks"]),
        "records": repr(whole["records"][-2:]) == repr(resumed["records"][-2:]),
    }


def goes_on(folder: str) -> dict[str, Any]:
    """Train, end in the middle of an epoch, resume; under DDP and FSDP2. The other seed must differ."""
    found: dict[str, Any] = {}
    for name, make in {"ddp": experiment, "fsdp": sharded}.items():
        whole = train(make(), f"{folder}/{name}/whole")
        ended = train(make(), f"{folder}/{name}/ended", stop=_fail)
        resumed = train(make(), f"{folder}/{name}/ended", resume=True)
        found[name] = _compared(whole, resumed) | {"ended": ended}
        found[f"{name} files"] = sorted(path.name for path in Path(folder, name, "whole").glob("step_*"))
        found[f"{name} damaged"] = _go_on_damaged(make(), Path(folder, name, "whole")) == whole["weights"]
        if name == "fsdp":
            found["other"] = train(sharded(seed=4), f"{folder}/{name}/other")["weights"] == whole["weights"]
    return found


def _go_on_damaged(made: hl.Experiment, folder: Path) -> Any:
    """Change a bit of each file of the newest checkpoint, and resume: return the weights at the end."""
    if dist.get_rank() == 0:
        for file in (folder / "step_00000036.ranks").rglob("*[0-9]*.*"):  # each that holds tensors
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(made, str(folder), resume=True)["weights"]


def signalled(folder: str) -> dict[str, Any]:
    """SIGTERM to one rank: both stop after the same step, saved; then they go on."""

    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = train(experiment(), f"{folder}/signal whole")
    stopped = train(experiment(), f"{folder}/signal", stop=stop)
    resumed = train(experiment(), f"{folder}/signal", resume=True)
    return {"stopped": stopped["steps"], **_compared(whole, resumed)}


def all_resumed(folder: str) -> dict[str, Any]:
    """Run every case that all ranks come back from."""

    def run_goes_on() -> Any:
        return goes_on(folder)

    def run_signalled() -> Any:
        return signalled(folder)

    return run_cases([run_goes_on, run_signalled])


def begin_and_die(folder: str) -> Any:
    """Train whole in one folder; in another one, rank 1 is killed in the middle. Return also the log, and how long."""
    whole = train(experiment(), f"{folder}/whole")

    def kill() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    log, began = Path(folder, "records.jsonl"), time.monotonic()
    ended = train(experiment(), f"{folder}/killed", stop=kill, log=log, flush_every=4)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return whole, ended, lines, time.monotonic() - began


def go_on(folder: str, where: str, epochs: int = EPOCHS) -> Any:
    """Resume a run; return what it warned of, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(experiment(), f"{folder}/{where}", resume=True, epochs=epochs)
    return found, [str(one.message) for one in caught]
