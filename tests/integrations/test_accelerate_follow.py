"""Hooks in a loop that Accelerate has prepared: steps, checkpoints, trackers, and nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from helpers_hosts import metrics_of
from helpers_loops import noting, rich_experiment, seed_everything
from helpers_resume import Remembers

from hookline.integrations.accelerate import follow
from hookline.sinks import MemorySink


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Loop:
    """Eight batches an epoch, in a fixed order; dropout, BatchNorm, AdamW, a scheduler, accumulation."""

    def __init__(self, hooks: Any = None, *, accumulate: int = 1, folder: Path | None = None, **options: Any) -> None:
        experiment = rich_experiment(batches=8)
        experiment.model[3].p = options.pop("dropout", 0.3)
        seed_everything(5)
        log_with = options.pop("log_with", None)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, project_dir=folder and str(folder), log_with=log_with
        )
        if log_with:
            self.accelerator.init_trackers("project", config={"lr": 1e-2})
        loader = torch.utils.data.DataLoader(experiment.loader.dataset, batch_size=8)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            experiment.model, experiment.optimizer, loader, experiment.scheduler
        )
        self.run = None
        if hooks is not None:
            self.run = follow(
                self.accelerator, self.model, self.optimizer, hooks, loader=self.loader, loss_fn=_loss,
                scheduler=self.scheduler, **options,
            )  # fmt: skip

    def train(self, epochs: int = 3, *, skip: int = 0, stop: int | None = None) -> None:
        """Train; leave `skip` batches of the first epoch out, and stop after `stop` batches in all."""
        done = 0
        for epoch in range(epochs):
            loader = self.accelerator.skip_first_batches(self.loader, skip) if skip and not epoch else self.loader
            for x, y in loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(_loss(self.model, (x, y)))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                done += 1
                if done == stop:
                    return

    def left(self) -> dict[str, torch.Tensor]:
        """Weights, optimizer and streams."""
        model, optimizer = self.model, self.optimizer.optimizer
        left = {name: value.clone() for name, value in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            left |= {f"{key} {name}": torch.as_tensor(value) for key, value in optimizer.state[parameter].items()}
        return left | {"torch": torch.get_rng_state(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def test_steps_that_are_left_out_are_none() -> None:
    """Four batches make a step: 2 steps an epoch, with all four batches; the loss is their mean."""
    hook = noting("POST_STEP")
    loop = Loop([hook], sinks=[], accumulate=4)
    loop.train(1)
    loop.run.close()
    assert [(ctx.step, len(ctx.batch_data)) for ctx in hook.contexts] == [(0, 4), (1, 4)]
    assert all(0.3 < ctx.loss < 3 for ctx in hook.contexts)


def test_hook_state_is_in_the_checkpoint_of_accelerate(tmp_path: Path) -> None:
    """Saved in the middle of an epoch, loaded by other objects: metrics are those of the run that went through.

    Without dropout: a loader that skips batches draws from the stream, so that the host's own run would differ.
    """
    whole, sink = MemorySink(), MemorySink()
    through = Loop([Remembers()], sinks=[whole], dropout=0.0, folder=tmp_path / "through")
    through.train(2)
    through.run.close()
    stopped = Loop([Remembers()], sinks=[sink], dropout=0.0)
    stopped.train(2, stop=5)
    stopped.accelerator.save_state(str(tmp_path / "saved"))
    stopped.run.close()  # what it writes after it was saved is dropped
    resumed = Loop([Remembers()], sinks=[sink], dropout=0.0)
    resumed.accelerator.load_state(str(tmp_path / "saved"))
    resumed.train(2, skip=5)
    resumed.run.close()
    assert metrics_of(sink) == metrics_of(whole)
    assert "skip_first_batches" not in vars(resumed.accelerator)


def test_metrics_go_to_the_trackers_that_are_open(tmp_path: Path) -> None:
    """With a TensorBoard tracker, hooks write into its run: one folder, one file of events, no second writer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop = Loop([Remembers()], log_with="tensorboard", folder=tmp_path, loop="epoch")
    loop.train(1)
    loop.run.close()
    loop.accelerator.end_training()
    files = [path for path in tmp_path.rglob("events.out.tfevents*") if path.stat().st_size]
    (folder,) = {path.parent for path in files if path.parent.name == "project"}
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("remembers/fired")] == [*range(8), 7]
