"""A loop that hookline does not own, driven with a `HostRun`; metrics by name and step, however they were flushed."""

from __future__ import annotations

from typing import Any

import torch
from helpers_resume import Draws, Elsewhere, NeedsAll, Remembers

import hookline as hl
from hookline.integrations import HostRun
from hookline.records import StepSeries
from hookline.sinks import MemorySink

__all__ = ["every_hook", "metrics_of", "train_by_hand"]


def every_hook() -> list[hl.TrainingHook]:
    """Hooks at all points: observers with state, draws, interventions, and all that a loop may keep for them."""
    return [Remembers(), Draws(), Elsewhere(), NeedsAll()]


def metrics_of(sink: MemorySink) -> dict[tuple[str, str, int], Any]:
    """All metrics of a sink: by name, point, and step (of other points: epoch); no matter when they were flushed.

    Without those of the clock.
    """
    found: dict[tuple[str, str, int], Any] = {}
    for record in sink.records:
        point = record.hook_point.name
        for name, value in record.metrics.items():
            if name.startswith("resources/"):
                continue
            series = (
                zip(value.steps, value, strict=True) if isinstance(value, StepSeries) else [(record.position, value)]
            )
            for step, one in series:
                assert (name, point, step) not in found, "written twice"
                found[name, point, step] = one
    return found


def train_by_hand(
    experiment: hl.Experiment, run: HostRun | None, *, epochs: int, first: int = 0, save_after: int | None = None
) -> Any:
    """Train as a foreign trainer does: gradients are cleared right after the step, before it says that it is over.

    With `save_after`, stop after that many steps in all, and return the state of hooks.
    """
    model, optimizer, scheduler = experiment.model, experiment.optimizer, experiment.scheduler
    model.train()
    step = first
    if run is not None:
        run.begin_run(
            model, optimizer, step=first, scheduler=scheduler, scheduler_per="epoch", loader=experiment.loader,
            loss_fn=experiment.loss_fn, config=experiment.config,
        )  # fmt: skip
    for epoch in range(first // len(experiment.loader), epochs):
        if run is not None:
            run.begin_epoch(epoch)
        for batch in experiment.loader:
            if run is not None:
                run.begin_step(step, batch=batch)
            loss = experiment.loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            if run is not None:
                run.hold_gradients()
            optimizer.zero_grad()
            step += 1
            if run is not None:
                run.end_step(loss=loss)
            if step == save_after:
                return None if run is None else run.state_dict()
        if run is not None:
            run.finish_steps()
        scheduler.step()
        _evaluate(experiment, run)
        if run is not None:
            run.end_epoch()
    if run is not None:
        run.end_run()
    return None


def _evaluate(experiment: hl.Experiment, run: HostRun | None) -> None:
    streams = torch.get_rng_state()
    if run is not None:
        run.begin_evaluation()
    experiment.model.eval()
    with torch.no_grad():
        x, target = experiment.loader.dataset.tensors
        metrics = {"val_acc": float((experiment.model(x).argmax(1) == target).float().mean())}
    experiment.model.train()
    torch.set_rng_state(streams)
    if run is not None:
        run.end_evaluation(metrics)
