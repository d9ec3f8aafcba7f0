"""Trackers under DDP and FSDP2: each process counts what it has seen itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed
from helpers_waiting import PATIENCE
from helpers_warm import run_warm

SCRIPT = Path(__file__).with_name("trackers_distributed.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.slow
def test_a_wrapped_policy_has_the_numbers_of_a_plain_one_in_each_process(tmp_path):
    """Two processes, different data: activations and gradients are local, before anybody averages or shards them."""
    done = run_warm(
        [sys.executable, str(SCRIPT), str(tmp_path / "meet")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [json.loads((tmp_path / f"meet.{rank}").read_text()) for rank in range(2)]
    assert ranks[0]["plain"] != ranks[1]["plain"]
    for found in ranks:
        assert len(found["plain"]) > 30
        assert found["ddp"] == pytest.approx(found["plain"], rel=1e-5)
        assert found["fsdp2"] == pytest.approx(found["plain"], rel=1e-5)
