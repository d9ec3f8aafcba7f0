"""A watch inside the Trainer of transformers: its optimizer is wrapped, and it evaluates in the middle of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hookline as hl


class Watching(TrainerCallback):
    """Watches with the optimizer that callbacks are handed."""

    watch: hl.observe.Watch | None = None
    optimizer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer = kwargs["optimizer"]
        self.watch = hl.watch(kwargs["model"], "transformer.h.0", optimizer=self.optimizer)


def train(folder: Path, callback: TrainerCallback | None) -> torch.Tensor:
    """Four optimizer steps of two micro-batches each, with an evaluation after every other; the weights."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (16, 8))]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callbacks = [] if callback is None else [callback]
    Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:6], callbacks=callbacks).train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:transformers")
def test_a_callbacks_optimizer_is_taken_and_evaluations_are_left_out(tmp_path: Path) -> None:
    """Steps are those of the optimizer inside, and the run ends with the bits of one that nobody watched."""
    callback = Watching()
    watched = train(tmp_path, callback)
    assert type(callback.optimizer).__name__ == "AcceleratedOptimizer"
    assert callback.watch is not None
    report = callback.watch.report()
    assert report["steps"] == 4
    assert report["fired"]["transformer.h.0/forward"] == 8
    assert report["fired"]["transformer.h.0/backward"] == 8
    assert report["fired"]["transformer.h.0.ln_1.weight/param_grad"] == 4
    assert report["left_out"] == 6
    callback.watch.remove()
    assert torch.equal(watched, train(tmp_path, None))
