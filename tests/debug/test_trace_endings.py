"""How a trace ends: by ``kill -9``, Ctrl-C, an exception or a full disk; what was written before can be read."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from helpers_waiting import PATIENCE
from torch import nn

from hookline.debug import read_trace
from hookline.debug.trace.start_trace import trace
from hookline.errors import TraceError

KINDS = ("output", "input+output", "output+output_grad", "output_grad", "input_grad", "param_grad", "output+param_grad")
MODES = ("forward", "optimizer", "manual", "no_grad")

KILLED = """
import os, signal, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from hookline.debug.trace.start_trace import trace

folder, modes, kinds = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
trace(nn.Sequential(model[0]), to=f"{folder}/laid", kinds="parameter").remove()
alive = []
for mode in modes:
    for kind in kinds:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        made = {"forward": "forward", "no_grad": "forward", "manual": "manual", "optimizer": optimizer}[mode]
        running = trace(model, to=f"{folder}/{mode}-{kind}", tensors="1", kinds=kind.split("+"), step=made)
        alive.append(running)
        for step in range(3):
            with torch.set_grad_enabled(mode != "no_grad"):
                found = model(torch.ones(2, 4, requires_grad=True))
            if mode != "no_grad":
                found.sum().backward()
            if step < 2:
                optimizer.step()
                if mode == "manual":
                    running.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_steps_before_the_last_one(tmp_path):
    """``kill -9`` in the third step leaves two at least, whatever a step is and whatever is traced."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), " ".join(MODES), " ".join(KINDS)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    for mode in MODES:
        for kinds in KINDS:
            name = f"{mode}-{kinds}"
            folder = read_trace(tmp_path / name)
            assert any("was not closed" in each for each in folder.problems)
            wanted = {each for each in kinds.split("+") if mode != "no_grad" or not each.endswith("grad")}
            for kind in wanted:
                steps = {each.step for each in folder.records if each.kind == kind}
                assert steps >= {0, 1}, (name, kind, steps)
            stored = [each for each in folder.records if each.tensor is not None]
            assert bool(stored) == any(kind != "param_grad" for kind in wanted), name
            assert all(folder.tensor(each).shape == (2, 4) for each in stored)
    with pytest.raises(TraceError, match="has a trace already"):
        trace(nn.Linear(2, 2), to=tmp_path / "forward-output")
    laid = {each.site: each.placements for each in read_trace(tmp_path / "laid").records}
    assert laid["0.bias"] is None
    weight = laid["0.weight"]
    assert weight is not None
    assert (weight.placements, weight.mesh_names, weight.mesh_shape, weight.coordinate) == (
        ("Shard(0)",),
        ("tp",),
        (1,),
        (0,),
    )
    assert weight.full_shape == (4, 4)
