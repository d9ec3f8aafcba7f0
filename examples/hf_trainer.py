"""Hooks in a Hugging Face Trainer: a hook of your own, a built-in one, a watch and an intervention.

The Trainer is used as always; the callback is the only line more. The weights at the end are those without hooks.
"""

from __future__ import annotations

import tempfile

import torch
import transformers

import hookline as hl
from hookline.integrations.transformers import HooklineCallback


class LossAhead(hl.InterventionHook):
    """Ask what the loss of the batch would be after another step along its gradient; the step is undone."""

    hook_points = frozenset({hl.HookPoint.POST_STEP})
    step_schedule = hl.StepSchedule("stride", stride=10)

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: hl.ModelDataContext) -> dict[str, float]:
        now = model_ctx.batch_loss()
        model_ctx.apply_perturbation(model_ctx.compute_batch_gradients(), -0.3)
        return {"now": float(now), "ahead": float(model_ctx.batch_loss())}


def train(*callbacks: transformers.TrainerCallback, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Train a small GPT-2 on random text for 30 steps; return its weights."""
    rows = torch.randint(2, 31, (120, 12), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, per_device_train_batch_size=8, num_train_epochs=2, learning_rate=1e-2, use_cpu=True,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=list(callbacks))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return {name: value.clone() for name, value in model.state_dict().items()}


def new_model() -> torch.nn.Module:
    """Make the model, with the same weights each time."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def main() -> None:
    """Train twice, with and without hooks."""
    without = train(model=new_model())

    model, sink = new_model(), hl.sinks.MemorySink()
    watch = hl.watch(model, "transformer.h.#", every=5)
    with_hooks = train(HooklineCallback([LossAhead(), "norms", watch], sinks=[sink]), model=model)
    watch.remove()

    for (_, now), (_, ahead) in zip(sink.series("LossAhead/now"), sink.series("LossAhead/ahead"), strict=True):
        for step, one, other in zip(now.steps, now, ahead, strict=True):
            print(f"step {step:2}: loss {one:.3f}, after another step {other:.3f}")
    for epoch, norm in sink.series("norms/total_norm"):
        rms = dict(sink.series("watch/transformer.h.1/forward/rms"))[epoch]
        print(f"epoch {epoch}: length of the mean gradient {norm:.3f}, outputs of the last block {rms:.3f}")
    same = all(torch.equal(without[name], with_hooks[name]) for name in without)
    print(f"the weights are {'the same as' if same else 'others than'} without hooks, to the last bit")


if __name__ == "__main__":
    main()
