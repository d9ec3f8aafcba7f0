"""The Trainer with what it wraps around models and where it logs: DDP, compile, TensorBoard, W&B."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_ranks import run_ranks
from helpers_trainer import make_trainer
from trainer_scenarios import train_with_and_without

from hookline.integrations.transformers import HooklineCallback


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


def test_metrics_join_the_wandb_run_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """report_to="trainer" beside the Trainer's own W&B: the run that is open gets them, and no second one begins."""
    import wandb

    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    make_trainer(
        tmp_path, HooklineCallback(["norms"], report_to="trainer"), report_to="wandb", num_train_epochs=1,
        logging_strategy="steps", logging_steps=5,
    ).train()  # fmt: skip
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert "train/norms/total_norm" in summary
    assert "train/loss" in summary
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
