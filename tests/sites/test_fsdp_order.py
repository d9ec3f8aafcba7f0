"""On an FSDP2 module our hooks run between its own: parameters are whole in every hook of ours."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch.distributed
from helpers_waiting import PATIENCE
from helpers_warm import run_warm

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)

SCRIPT = """
import json, os, socket, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.fsdp import fully_shard
import hookline as hl

store = os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
torch.manual_seed(0)
late = sys.argv[1] == "late"
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
plain.load_state_dict(model.state_dict())
log = []

def note(tag):
    def hook(module, *args):
        log.append([tag, type(module.weight).__name__ if hasattr(module, "weight") else "none",
                    isinstance(getattr(module, "weight", None), DTensor)])
    return hook

def hooks():
    out = []
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        for observe in (False, True):
            tag = f"{kind} {'observe' if observe else 'edit'}"
            out.append(hl.attach(model, nn.Linear, note(tag), on=kind, observe=observe))
    out.append(hl.attach(model, nn.Linear, note("forward prepend"), prepend=True))
    out.append(hl.attach(model, nn.Linear, note("forward_pre prepend"), on="forward_pre", prepend=True))
    return out

handles = [] if late else hooks()
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
fully_shard(model, mesh=mesh)
if late:
    handles = hooks()
x = torch.randn(3, 4)
losses = []
for step in range(2):
    loss = model(x).pow(2).sum()
    loss.backward()
    losses.append(loss.item())
    if step == 0:
        first, log = log, []
expected = plain(x).pow(2).sum()
expected.backward()
expected2 = plain(x).pow(2).sum(); expected2.backward()
same = all(torch.equal(a.grad.full_tensor(), b.grad) for a, b in zip(model.parameters(), plain.parameters()))
for handle in handles:
    handle.remove()
hl.assert_no_hooks(model)
left = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
sharded = all(isinstance(p, DTensor) for p in model.parameters())
after = model(x).pow(2).sum().item()
print(json.dumps({"first": first, "second": log, "losses": losses, "expected": expected.item(), "same": same,
                  "left": left, "sharded": sharded, "after": after}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["early", "late"])
def outcome(request):
    """What a process with one rank sees, with our hooks attached before or after ``fully_shard``."""
    done = run_warm(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), request.param],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("tag", ["forward_pre edit", "forward_pre observe", "forward_pre prepend"])
@pytest.mark.parametrize("step", ["first", "second"])
def test_pre_hooks_run_after_its_pre_forward(outcome, step, tag):
    """Parameters are gathered: whole tensors, not shards."""
    sharded = [is_shard for each, _, is_shard in outcome[step] if each == tag]
    assert sharded == [False, False]


@pytest.mark.parametrize("tag", ["forward edit", "forward observe", "forward prepend"])
@pytest.mark.parametrize("step", ["first", "second"])
def test_post_hooks_run_before_its_post_forward(outcome, step, tag):
    """Parameters are still gathered, for edits and observers alike."""
    sharded = [is_shard for each, _, is_shard in outcome[step] if each == tag]
    assert sharded == [False, False]


@pytest.mark.parametrize("tag", ["backward_pre edit", "backward_pre observe", "backward edit", "backward observe"])
@pytest.mark.parametrize("step", ["first", "second"])
def test_gradient_hooks_fire_once_per_module(outcome, step, tag):
    """Two layers, one firing each."""
    assert len([each for each, _, _ in outcome[step] if each == tag]) == 2


def test_the_run_is_that_of_the_plain_model(outcome):
    """Loss and gradients are those of the same model without sharding and without hooks."""
    assert outcome["losses"][0] == outcome["expected"]
    assert outcome["same"]


def test_removal_leaves_its_hooks_alone(outcome):
    """Its own hooks stay, one at each end, parameters are shards again, and the model runs as before."""
    assert outcome["left"][0] >= 1
    assert outcome["left"][1] == outcome["left"][3] == 2
    assert outcome["left"][2] == 0
    assert outcome["sharded"]
    assert outcome["after"] == outcome["expected"]
