"""A watch in two real processes: DDP and FSDP2, with and without an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from helpers_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
CASES = [f"{wrapper} {with_optimizer}" for wrapper in ("ddp", "fsdp2") for with_optimizer in (True, False)]


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    """What rank 0 of `distributed_watch` has seen."""
    first, _ = run_ranks(f"{Path(__file__).with_name('distributed_watch.py')}:all_watched")
    return first


@pytest.mark.parametrize("case", CASES)
def test_a_watched_distributed_run_ends_with_the_same_bits(outcome: dict[str, Any], case: str) -> None:
    """Twenty steps of AdamW with dropout, every second one watched."""
    assert outcome[case]["same"]


@pytest.mark.parametrize("case", CASES)
def test_every_place_is_seen_in_every_due_step(outcome: dict[str, Any], case: str) -> None:
    """Under names without prefixes: outputs, gradients and the gradients of parameters, ten times each."""
    assert outcome[case]["fired"] == [10]
    assert {"4/forward", "4/backward", "4.weight/param_grad"} <= set(outcome[case]["places"])


@pytest.mark.parametrize("case", ["ddp True", "ddp False"])
def test_gradients_of_parameters_are_those_averaged_over_processes(outcome: dict[str, Any], case: str) -> None:
    """At the optimizer's step, and without one at the end of the pass, when DDP has averaged them."""
    told, true = outcome[case]["norm"]
    assert told == pytest.approx(true, rel=1e-4)
