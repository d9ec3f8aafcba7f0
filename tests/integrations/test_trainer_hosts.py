"""The Trainer with what it wraps around models and where it logs: DDP, compile, TensorBoard, W&B."""

from __future__ import annotations

from pathlib import Path

from helpers_ranks import run_ranks
from trainer_scenarios import train_with_and_without


def test_under_ddp_the_run_stays_the_same_and_names_are_plain(tmp_path: Path) -> None:
    """Two processes, 20 steps: equal weights with and without hooks, on both ranks; names without ``module.``."""
    first, second = run_ranks(
        train_with_and_without, str(tmp_path), ranks=2, initialize=False, imports=["transformers.trainer"]
    )
    for found in (first, second):
        digest, wrapper, steps = found["hooked"]
        assert wrapper == "DistributedDataParallel"
        assert steps == 20
        assert found["bare"][0] == digest
    assert first["hooked"][0] == second["hooked"][0]
    assert "GradientLengths/transformer.wte.weight" in first["names"]
    assert "watch/transformer.h.1/forward/mean" in first["names"]
    assert not any("module." in name for name in first["names"])
    assert (first["records"] > 0, second["records"]) == (True, 0), "rank 0 writes"
