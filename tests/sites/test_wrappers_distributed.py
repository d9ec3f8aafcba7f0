"""DDP and FSDP2 in two real processes: clean names, every kind fires, nothing is changed, parameters are followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from helpers_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)

LAYERS = ["layers.0", "layers.1"]
WATCHED = ["head.bias", "head.weight", "layers.0.module.weight", "layers.1.module.weight"]


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """What both ranks of `distributed_wrappers` have seen, as rank 0 tells it; through JSON, which has no tuples."""
    first, _ = run_ranks(f"{Path(__file__).with_name('distributed_wrappers.py')}:all_wrapped")
    return json.loads(json.dumps(first))


def test_both_ranks_have_seen_the_same(outcome):
    """Names, counts, and what a random number changed; what differs is shown with both ranks' versions."""
    assert outcome["differ"] == {}


# -- DDP -----------------------------------------------------------------------------------------------------


def test_names_in_a_ddp_model_carry_no_prefix(outcome):
    """A child of one's own that is called ``module`` keeps its name; raw names are taken too."""
    names = outcome["ddp names"]
    assert names["all"][:4] == ["", "layers", "layers.0", "layers.0.module"]
    assert not [name for name in names["all"] if name.startswith("module")]
    assert names["raw"] == names["own attribute"] == ["layers.0.module", "layers.1.module"]
    assert names["predicate"] == ["layers.0.module", "layers.1.module", "head"]
    assert not names["table"]


def test_every_kind_fires_in_ddp_training(outcome):
    """Three steps of two layers; the model itself once a step, and once more when it is called without DDP."""
    run = outcome["ddp run"]
    assert run["fired"] == {"forward_pre": 6, "forward": 6, "backward": 6, "param_grad": 6, "model": 3}
    assert run["last step"] == 3
    assert run["names"]["backward"] == LAYERS
    assert run["names"]["param_grad"] == ["layers.0.module.weight", "layers.1.module.weight"]
    assert run["names"]["model"] == [""]
    assert run["sites"] == ["", "layers.0", "layers.0.module.weight", "layers.1", "layers.1.module.weight"]
    assert run["attached"] == run["attached to the inner one"] == 5


def test_observers_leave_ddp_training_as_it_is_to_the_last_bit(outcome):
    """Twenty steps with dropout, BatchNorm and AdamW: weights, statistics and random stream."""
    assert outcome["ddp inert"]["observed"] == []


def test_the_comparison_notices_one_random_number(outcome):
    """The control: a hook that draws one leaves other weights behind."""
    assert {"random", "module.head.weight"} <= set(outcome["ddp inert"]["disturbed"])


@pytest.mark.parametrize("way", ["DDP(compile)", "compile(DDP)"])
def test_ddp_and_compile_go_together_either_way_round(outcome, way):
    """Clean names, two forwards of two layers, and any of the prefixes in a raw name."""
    run = outcome["ddp compiled"][way]
    assert run["names"] == LAYERS
    assert run["fired"] == [4, 2, 1]
    assert run["raw"] == [["layers.0"]] * 3


# -- FSDP2 ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fsdp reshard", "fsdp keep"])
def sharded(request, outcome) -> dict[str, Any]:
    """With parameters given back after the forward, and with parameters kept until the backward."""
    return outcome[request.param]


def test_hooks_attached_before_sharding_follow_the_parameters(sharded):
    """Once per parameter and step, with the gradient of the shard, like hooks that were attached afterwards."""
    assert [name for name, _, _ in sharded["early"]] == sorted(WATCHED * 3)
    assert all(is_shard for _, is_shard, _ in sharded["early"])
    assert sharded["early"] == sharded["late"]
    assert sharded["left on the old ones"] == 0


def test_hooks_attached_while_parameters_are_gathered_go_onto_the_shards(sharded):
    """What the module shows then is not what gets the gradient in the end."""
    assert sharded["gathered"] == [["head.weight", True]]


def test_names_and_receipts_stay_those_of_the_model(sharded):
    """Nothing is lost or counted twice on the way."""
    assert sorted(sharded["names"]) == WATCHED
    assert sharded["matched, attached"] == [4, 4]
    assert sharded["names found"] == LAYERS


def test_what_was_frozen_before_sharding_stays_frozen(sharded):
    """Three steps of AdamW do not move it."""
    assert sharded["frozen"]


@pytest.mark.parametrize(
    ("way", "parameters"), [(0, ["layers.0.module.weight", "head.bias"]), (1, ["layers.0._flat_param"])]
)
def test_fsdp_of_old_is_a_wrapper_like_any_other(outcome, way, parameters):
    """Clean names of modules and of the parameters it shows; hooks fire on what is inside."""
    run = outcome["fsdp1"][way]
    assert run["names"][:4] == ["", "layers", "layers.0", "layers.0.module"]
    assert run["raw"] == ["layers.0.module", "layers.1.module"]
    assert run["fired"] == {"forward": 4, "backward": 4, "model": 2}
    assert set(parameters) <= set(run["parameters"])
