"""A real Hugging Face Trainer on a tiny random GPT-2 with dropout, AdamW and a schedule; nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

__all__ = ["TOKENS", "left_by_trainer", "make_trainer", "tiny_gpt2", "tokens"]

TOKENS = 31


def tiny_gpt2() -> nn.Module:
    """Two layers, 16 wide, dropout 0.1; the same weights each time."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokens(count: int = 40, seed: int = 1) -> list[dict[str, Tensor]]:
    """Random sequences of 8 tokens, each its own label."""
    stream = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, TOKENS, (count, 8), generator=stream)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(
    folder: Path, *callbacks: Any, model: nn.Module | None = None, cls: type | None = None, **options: Any
) -> transformers.Trainer:
    """Ten steps an epoch: 40 sequences, four in a batch; other arguments of `TrainingArguments` in `options`."""
    datasets = {"train_dataset": options.pop("train_dataset", tokens())}
    if "eval_dataset" in options:
        datasets["eval_dataset"] = options.pop("eval_dataset")
    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2,
        "lr_scheduler_type": "linear", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no", "seed": 7,
    }  # fmt: skip
    args = transformers.TrainingArguments(**settings | options)
    model = tiny_gpt2() if model is None else model
    return (cls or transformers.Trainer)(model, args, callbacks=list(callbacks), **datasets)


def left_by_trainer(trainer: transformers.Trainer) -> dict[str, Tensor]:
    """Weights, optimizer, schedule and all random streams, to the last bit."""
    left = {f"weight {name}": value.clone() for name, value in trainer.model.state_dict().items()}
    state = trainer.optimizer.state_dict()["state"]
    left |= {
        f"optimizer {i} {key}": torch.as_tensor(value).clone() for i, s in state.items() for key, value in s.items()
    }
    left["lr"] = torch.tensor(trainer.lr_scheduler.get_last_lr(), dtype=torch.float64)
    left["steps"] = torch.tensor(trainer.state.global_step)
    left["torch"] = torch.get_rng_state()
    left["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    left["python"] = torch.tensor(random.getstate()[1])
    return left
