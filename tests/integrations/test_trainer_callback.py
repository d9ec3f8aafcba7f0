"""Hooks in a real Hugging Face Trainer: all points, nothing changed, state in its checkpoints, its logger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers_hosts import metrics_of
from helpers_loops import noting
from helpers_trainer import left_by_trainer, make_trainer, tiny_gpt2, tokens
from helpers_training import differences

import hookline as hl
from hookline.integrations.transformers import STATE_FILE, HooklineCallback
from hookline.phases import known_phase
from hookline.sinks import MemorySink

POINTS = hl.HookPoint


class Sums(hl.TrainingHook):
    """Numbers that depend on all steps before: losses, gradients, their mean, those of the step before."""

    hook_points = {POINTS.PRE_STEP, POINTS.POST_STEP, POINTS.POST_EPOCH}
    needs_grads = needs_prev_step_grads = True

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        if ctx.hook_point is POINTS.PRE_STEP:
            return {"previous": _length(ctx.prev_step_grads)}
        if ctx.hook_point is POINTS.POST_EPOCH:
            return {"mean": _length(ctx.accumulated_grads), "loss": ctx.loss}
        gradient = _length({name: p.grad for name, p in ctx.model.named_parameters() if p.grad is not None})
        self.total = self.total + gradient + ctx.raw("loss")
        return {"total": self.total.clone(), "gradient": gradient, "loss": ctx.loss, "lr": ctx.lr}

    def reset(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def get_state_tensors(self) -> dict[str, Any]:
        return {"total": self.total}

    def set_state_tensors(self, tensors: dict[str, Any]) -> None:
        self.total = tensors["total"]


class Ahead(hl.InterventionHook):
    """Trains on a shuffle of the data, with the Trainer's loss, optimizer and schedule; all of it is undone."""

    hook_points = {POINTS.POST_STEP, POINTS.SNAPSHOT}
    step_schedule = hl.StepSchedule("stride", stride=6)

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, Any]:
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        torch.rand(3)
        return {"weight": model_ctx.model.transformer.wte.weight.norm()}


def _length(gradients: Any) -> torch.Tensor:
    return sum((grad.detach().double().square().sum() for grad in gradients.values()), torch.zeros(())).sqrt()


def _hooked(model: torch.nn.Module, **options: Any) -> tuple[HooklineCallback, MemorySink]:
    sink = MemorySink()
    return HooklineCallback([Sums(), Ahead(), hl.watch(model, every=3)], sinks=[sink], **options), sink


def test_the_run_of_a_trainer_stays_the_same(tmp_path: Path) -> None:
    """20 steps with dropout, AdamW and a schedule, with observers, a watch and interventions that train: equal bits."""
    bare = make_trainer(tmp_path / "bare", eval_dataset=tokens(8), eval_strategy="epoch")
    bare.train()
    expected = left_by_trainer(bare)
    model = tiny_gpt2()
    callback, sink = _hooked(model)
    hooked = make_trainer(tmp_path / "hooked", callback, model=model, eval_dataset=tokens(8), eval_strategy="epoch")
    hooked.train()
    assert hooked.state.global_step == 20
    assert differences(expected, left_by_trainer(hooked)) == []
    assert callback.manager.hooks.fired["Ahead"] == 6
    assert {point for _, point, _ in metrics_of(sink)} == {"PRE_STEP", "POST_STEP", "POST_EPOCH", "SNAPSHOT"}
    assert not any(isinstance(value, torch.nn.Module) for value in vars(callback).values())
    assert "training_step" not in vars(hooked)
    assert "evaluation_loop" not in vars(hooked)


def test_points_contexts_and_phases(tmp_path: Path) -> None:
    """Points come in the order of `HookPoint`; contexts have batch, loss, evaluation; evaluation is a phase."""
    phases: list[Any] = []
    hook = noting()
    model = tiny_gpt2()
    model.register_forward_pre_hook(lambda *_: phases.append((known_phase(), model.training)))
    trainer = make_trainer(
        tmp_path, HooklineCallback([hook], sinks=[]), model=model, num_train_epochs=1, gradient_accumulation_steps=5,
        eval_dataset={"one": tokens(4), "two": tokens(4, 2)}, eval_strategy="epoch",
    )  # fmt: skip
    trainer.train()
    steps = ["PRE_STEP", "POST_STEP"] * 2
    assert hook.points == ["PRE_EPOCH", *steps, "POST_EPOCH", "SNAPSHOT"]
    first, last = hook.at("POST_STEP")
    assert (first.step, first.batch_idx, last.step, last.batch_idx) == (0, 0, 1, 5)
    assert [part["input_ids"].shape for part in last.batch_data] == [(4, 8)] * 5
    assert hook.at("PRE_STEP")[0].batch_data["input_ids"].shape == (4, 8)
    assert 3 < first.loss < 4
    assert first.config is trainer.args
    end = hook.at("POST_EPOCH")[0]
    assert {"one_loss", "two_loss"} <= set(end.eval_metrics)
    assert end.loss == pytest.approx((first.loss + last.loss) / 2)
    assert phases == [("train", True)] * 10 + [("eval", False)] * 2


@pytest.mark.parametrize(
    ("stop", "strategy"),
    [
        pytest.param(10, "steps", marks=pytest.mark.slow),
        pytest.param(10, "epoch", marks=pytest.mark.slow),
        (13, "steps"),
    ],
)
def test_a_resumed_trainer_continues_its_hooks(tmp_path: Path, stop: int, strategy: str) -> None:
    """Killed after a checkpoint and resumed by another process: metrics are those of the run that went through."""

    class Dies(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop:
                raise KeyboardInterrupt

    def trainer(folder: str, sink: MemorySink, *others: Any) -> transformers.Trainer:
        model = tiny_gpt2()
        callback = HooklineCallback([Sums(), hl.watch(model, every=2)], sinks=[sink])
        return make_trainer(
            tmp_path / folder, callback, *others, model=model, save_strategy=strategy, save_steps=stop,
            eval_dataset=tokens(4), eval_strategy="no" if (stop, strategy) == (10, "steps") else "epoch",
        )  # fmt: skip

    # Saved after the last step of an epoch, the Trainer never evaluates that epoch: its own run would differ.
    whole, sink = MemorySink(), MemorySink()
    trainer("whole", whole).train()
    stopped = trainer("stopped", sink, Dies())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    next(one for one in stopped.callback_handler.callbacks if isinstance(one, HooklineCallback)).close()
    assert (tmp_path / "stopped" / f"checkpoint-{stop}" / STATE_FILE).is_file()
    trainer("stopped", sink).train(resume_from_checkpoint=True)
    assert _untimed(metrics_of(sink)) == _untimed(metrics_of(whole))


def _untimed(metrics: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in metrics.items() if "second" not in key[0] and "runtime" not in key[0]}


def test_metrics_go_to_the_trainers_logger(tmp_path: Path) -> None:
    """report_to="trainer": its log history has them at its own steps, those of steps as their mean."""
    callback = HooklineCallback([Sums()], report_to="trainer")
    trainer = make_trainer(tmp_path, callback, logging_strategy="steps", logging_steps=5, num_train_epochs=1)
    trainer.train()
    logged = [(line["step"], line["Sums/loss"]) for line in trainer.state.log_history if "Sums/gradient" in line]
    own = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [step for step, _ in logged] == [5, 10]
    assert [loss for _, loss in logged] == pytest.approx(own, abs=1e-3)
    assert any("Sums/mean" in line for line in trainer.state.log_history)
    assert not (tmp_path / "hookline").exists()


def test_a_hook_that_raises_ends_the_training_and_leaves_nothing_on_the_model(tmp_path: Path) -> None:
    class Fails(hl.TrainingHook):
        hook_points = {POINTS.POST_STEP}

        def compute(self, ctx: hl.RunDataContext) -> None:
            raise ZeroDivisionError("in the hook")

    trainer = make_trainer(tmp_path, HooklineCallback([Fails()], sinks=[]), num_train_epochs=1)
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        trainer.train()
    assert known_phase() is None
    assert "training_step" not in vars(trainer)
    assert trainer.state.global_step == 1


def test_a_failing_trainer_ends_the_run(tmp_path: Path) -> None:
    """An error in the Trainer's own step: metrics of steps so far are written, and nothing stays attached."""

    class Breaks(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                raise RuntimeError("out of memory")
            return super().training_step(*args, **kwargs)

    sink = MemorySink()
    trainer = make_trainer(tmp_path, HooklineCallback([Sums()], sinks=[sink]), cls=Breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert [step for name, point, step in metrics_of(sink) if name == "Sums/total"] == [0, 1, 2]
    assert known_phase() is None


def test_a_trainer_that_fails_outside_of_a_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data end with an error: what is done at the end of the process writes the metrics, and so does close()."""
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", at_exit.append)

    class Ends(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield from tokens(12)
            raise OSError("the disk is gone")

    sink = MemorySink()
    callback = HooklineCallback([Sums()], sinks=[sink])
    trainer = make_trainer(tmp_path, callback, train_dataset=Ends(), max_steps=9)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()
    assert metrics_of(sink) == {}
    at_exit[-1]()
    made = trainer.state.global_step
    assert made >= 2
    assert [step for name, _, step in metrics_of(sink) if name == "Sums/total"] == list(range(made))
    assert "training_step" not in vars(trainer)
    callback.close()
    callback.close()


def test_an_intervention_leaves_the_sums_of_the_trainer_alone(tmp_path: Path) -> None:
    """A Trainer that counts while it computes a loss, as those of TRL do, logs the same with interventions."""

    class Counts(transformers.Trainer):
        tokens = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._metrics = getattr(self, "_metrics", {"train": []})
            self._metrics["train"].append(int(inputs["input_ids"].sum()))
            self.tokens += inputs["input_ids"].numel()
            return super().compute_loss(model, inputs, *args, **kwargs)

    counted = []
    for callbacks in ([], [HooklineCallback([Ahead()], sinks=[])]):
        trainer = make_trainer(tmp_path, *callbacks, cls=Counts, num_train_epochs=1)
        trainer.train()
        counted.append((trainer.tokens, trainer._metrics))
    assert counted[0] == counted[1]
