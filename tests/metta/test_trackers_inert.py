"""A tracked run ends with the same bits as one that is not, and each of several ranks has its own numbers."""

from __future__ import annotations

import functools
from collections import OrderedDict

import pytest
import torch
import torch.distributed
from helpers_house import differences
from helpers_ranks import run_ranks
from helpers_trackers import BUILDERS, make_tool, new_trainer, train
from torch import Tensor, nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:Component 'body' gave ReLUGradientFlowState nothing")
"""Its input is data, so no gradient comes out of it; that this is said is tested in test_builders."""


@functools.cache
def bare(compiled: bool = False) -> dict[str, Tensor]:
    """What the run leaves behind without trackers."""
    return train(hl.metta.TrainTool(), compiled=compiled)[0]


def test_training_with_all_trackers_twice_ends_with_the_same_bits():
    """Every tracker on every component, each registered twice; the numbers are those of once."""
    left, metrics = train(make_tool(*BUILDERS, times=2))
    assert differences(left, bare()) == []
    assert metrics == train(make_tool(*BUILDERS))[1]


@pytest.mark.slow
def test_compiled_training_with_all_trackers_ends_with_the_same_bits():
    """Under aot_eager, in one graph, each registered twice; the numbers are those of once in an eager run."""
    left, metrics = train(make_tool(*BUILDERS, times=2), steps=3, compiled=True)
    assert differences(left, train(hl.metta.TrainTool(), steps=3, compiled=True)[0]) == []
    assert metrics == pytest.approx(train(make_tool(*BUILDERS), steps=3)[1], rel=1e-4, abs=1e-6)


def test_a_builder_that_draws_a_random_number_is_found_out():
    """Control: the comparison sees one draw in one hook, in the random stream and in the weights."""
    tool = hl.metta.TrainTool()
    drawn: list[Tensor] = []
    tool.add_training_hook("body", lambda name, context: lambda module, args, output: drawn.append(torch.rand(())))
    found = differences(train(tool)[0], bare())
    assert "random" in found
    assert "state head.0.weight" in found


def metrics_under_wrappers() -> dict[str, dict[str, float]]:
    """Train two micro-batches on this rank under DDP, FSDP2 or neither; return the metrics by wrapper."""
    from torch.distributed.fsdp import fully_shard

    def shard(policy):
        for module in (*policy.components.values(), policy):
            fully_shard(module)
        return policy

    found = {}
    wrappers = {"plain": lambda policy: policy, "ddp": nn.parallel.DistributedDataParallel, "fsdp2": shard}
    for name, wrap in wrappers.items():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        model, trainer = wrap(hl.metta.PolicyAutoBuilder(OrderedDict(body=body, head=nn.Linear(4, 2)))), new_trainer()
        with make_tool("relu", "fisher", "flow", "relu flow").attached(policy=model, trainer=trainer):
            for part in (1.0, 2.0):
                model(torch.full((2, 3), part + torch.distributed.get_rank())).square().sum().backward()
            found[name] = hl.metta.StatsReporter(trainer.context).on_epoch_end()
    return found


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.slow
def test_a_wrapped_policy_has_the_numbers_of_a_plain_one_in_each_process():
    """Two processes, different data: activations and gradients are local, before anybody averages or shards them."""
    ranks = run_ranks(metrics_under_wrappers)
    assert ranks[0]["plain"] != ranks[1]["plain"]
    for found in ranks:
        assert len(found["plain"]) > 30
        assert found["ddp"] == pytest.approx(found["plain"], rel=1e-5)
        assert found["fsdp2"] == pytest.approx(found["plain"], rel=1e-5)
