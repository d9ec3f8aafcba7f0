"""The bridge from a host's events to a manager: the same metrics as in the loops of hookline, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_hosts import every_hook, metrics_of, train_by_hand
from helpers_loops import left_by, noting, rich_experiment
from helpers_resume import Remembers
from helpers_training import differences
from torch import nn

import hookline as hl
from hookline.errors import LifecycleError, OptionError
from hookline.integrations import HostRun
from hookline.phases import known_phase
from hookline.sinks import MemorySink

EPOCHS = 5
STEPS = 25


class MeanGradient(hl.TrainingHook):
    """The length of the mean gradient since the last report."""

    hook_points = {hl.HookPoint.SNAPSHOT}
    needs_grads = True

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        return {"norm": sum(grad.norm() for grad in ctx.accumulated_grads.values())}


def _experiment() -> hl.Experiment:
    experiment = rich_experiment()

    def evaluate(model: nn.Module) -> dict[str, Any]:
        x, target = experiment.loader.dataset.tensors
        return {"val_acc": float((model(x).argmax(1) == target).float().mean())}

    experiment.evaluate = evaluate
    return experiment


def _by_epoch_loop() -> tuple[hl.Experiment, MemorySink]:
    experiment, sink = _experiment(), MemorySink()
    watch = hl.watch(experiment.model, optimizer=experiment.optimizer, every=2)
    manager = hl.HookManager(["training_metrics"], [*every_hook(), watch], [sink])
    hl.epoch_loop(experiment, epochs=EPOCHS, manager=manager)
    watch.remove()
    return experiment, sink


def _by_hand(**options: Any) -> tuple[hl.Experiment, MemorySink]:
    experiment, sink = _experiment(), MemorySink()
    watch = hl.watch(experiment.model, optimizer=experiment.optimizer, every=2)
    train_by_hand(experiment, HostRun([*every_hook(), watch], sinks=[sink], **options), epochs=EPOCHS)
    watch.remove()
    return experiment, sink


def test_a_foreign_loop_gives_the_metrics_of_the_epoch_loop() -> None:
    """Observers with state, interventions, a watch and the evaluation: every metric is equal, at the same step."""
    _, ours = _by_epoch_loop()
    _, theirs = _by_hand(flush_every=7)
    expected, found = metrics_of(ours), metrics_of(theirs)
    assert found.keys() == expected.keys()
    assert found == expected
    assert {point for _, point, _ in found} == {point.name for point in hl.HookPoint}


def test_the_weights_of_a_foreign_loop_stay_the_same() -> None:
    """Trained with every kind of hook and without any: weights, optimizer and streams are equal, bit for bit."""
    bare = _experiment()
    train_by_hand(bare, None, epochs=EPOCHS)
    hooked, _ = _by_hand()
    assert differences(left_by(bare), left_by(hooked)) == []


@pytest.mark.parametrize("stop", [3, 10, 13])
def test_a_resumed_run_continues_its_hooks(stop: int) -> None:
    """Interrupted in the first epoch, after the last step of one and inside one: metrics are those of a whole run."""

    def saved(stop: int | None) -> tuple[Any, MemorySink, hl.Experiment]:
        experiment, sink = _experiment(), MemorySink()
        experiment.loader = Batches(experiment.loader)
        run = HostRun([Remembers(), MeanGradient()], sinks=[sink], loop="epoch")
        return train_by_hand(experiment, run, epochs=EPOCHS, save_after=stop), sink, experiment

    _, whole, _ = saved(None)
    state, before, experiment = saved(stop)
    later = HostRun([Remembers(), MeanGradient()], sinks=[before], loop="epoch")
    later.load_state_dict(state)
    experiment.loader.skip = stop % len(experiment.loader)
    if not experiment.loader.skip:  # the host goes on after that epoch
        experiment.scheduler.step()
    train_by_hand(experiment, later, epochs=EPOCHS, first=stop)
    found, expected = metrics_of(before), metrics_of(whole)
    if stop == 10:  # and does not evaluate it
        del expected["eval/val_acc", "POST_EPOCH", 1], expected["training_metrics/val_acc", "POST_EPOCH", 1]
    assert found == expected


class Batches:
    """The batches of a loader in a fixed order; a trainer that resumes skips some, once."""

    def __init__(self, loader: Any) -> None:
        self.dataset, self.skip = loader.dataset, 0
        self._batches = list(loader)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        skip, self.skip = self.skip, 0
        return iter(self._batches[skip:])


def test_the_step_loop_gives_the_metrics_of_step_loop() -> None:
    """With loop="step", POST_STEP and SNAPSHOT fire as in `step_loop`, mean gradients between snapshots included."""

    def hooks() -> list[Any]:
        return [Remembers(), MeanGradient()]

    ours, theirs = MemorySink(), MemorySink()
    experiment = rich_experiment(evaluate=None, scheduler_per="step")
    manager = hl.HookManager(["training_metrics"], hooks(), [ours])
    hl.step_loop(experiment, steps=STEPS, snapshot_every=4, manager=manager)

    other = rich_experiment(evaluate=None)
    run = HostRun(hooks(), sinks=[theirs], loop="step", snapshot_every=4)
    run.begin_run(other.model, other.optimizer, loader=other.loader)
    for epoch in range(STEPS // len(other.loader)):
        run.begin_epoch(epoch)
        for batch in other.loader:
            run.begin_step(batch=batch)
            other.optimizer.zero_grad()
            loss = other.loss_fn(other.model, batch)
            loss.backward()
            other.optimizer.step()
            other.scheduler.step()
            run.end_step(loss=loss)
        run.end_epoch()
    run.end_run()
    assert metrics_of(theirs) == metrics_of(ours)


@pytest.mark.parametrize("fails", [False, True])
def test_steps_after_the_last_snapshot_are_reported_at_the_end(fails: bool) -> None:
    """Once, with the mean gradient of those steps, also where a step has begun that is never made."""
    hook = noting("SNAPSHOT")
    hook.needs_grads = True
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = HostRun([hook], loop="step", snapshot_every=4)
    run.begin_run(model, optimizer)
    for step in range(7):
        run.begin_step()
        optimizer.zero_grad()
        (model.weight.sum() * step).backward()
        run.end_step(loss=float(step))
    run.begin_step()
    run.end_run(ValueError("a bad day") if fails else None)
    run.end_run()
    assert [(ctx.step, ctx.loss) for ctx in hook.contexts] == [(0, 0.0), (4, 4.0), (6, 6.0)]
    means = [ctx.accumulated_grads["weight"].tolist() for ctx in hook.contexts]
    assert means == [[[0.0, 0.0]], [[2.5, 2.5]], [[5.5, 5.5]]]
    assert run.manager.global_step == 6


def test_phases_are_told_and_left() -> None:
    """Within a step the phase is train, within an evaluation eval, elsewhere none; also after an error."""
    model = nn.Linear(2, 1)
    run = HostRun()
    run.begin_run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.begin_epoch(0)
    run.begin_step()
    assert known_phase() == "train"
    run.end_step()
    assert known_phase() is None
    run.begin_evaluation()
    assert known_phase() == "eval"
    run.end_evaluation({"loss": 1.0})
    assert known_phase() is None
    run.begin_step()
    run.end_run(RuntimeError("the host failed"))
    assert known_phase() is None
    assert not run.is_running


def test_a_failed_run_leaves_its_metrics_and_no_hooks() -> None:
    """Whatever ends a run: step metrics are written, hooks finished; the same object begins another run."""
    sink, model = MemorySink(), nn.Linear(2, 1)
    watch = hl.watch(model)
    run = HostRun([noting("POST_STEP"), watch], sinks=[sink])
    for _ in range(2):
        run.begin_run(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.begin_epoch(0)
        run.begin_step()
        run.end_step(loss=1.0)
        run.end_run(KeyboardInterrupt())
        run.end_run()
    watch.remove()
    assert [record.metrics["noting/seen"] for record in sink.records if "noting/seen" in record.metrics] == [[1], [2]]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda run: run.begin_run(nn.Linear(2, 1), None), OptionError, "without an optimizer"),
        (lambda run: run.begin_run("model", None), OptionError, r"nn\.Module that is trained; got"),
        (lambda run: run.begin_epoch(0), LifecycleError, "none has begun"),
        (lambda run: run.end_step(), LifecycleError, "has not begun"),
        (lambda run: HostRun(loop="batch"), OptionError, "'epoch' or 'step'"),
        (lambda run: HostRun(["norms"], manager=hl.HookManager()), OptionError, "hooks= was given beside"),
        (lambda run: run.load_state_dict({}), LifecycleError, "has no loop"),
    ],
)
def test_what_is_missing_is_said(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call(HostRun())


def test_a_run_file_serves_a_host(tmp_path: Any) -> None:
    """Names, their arguments, a spec and a sink come from one file; what it says of training is passed over."""
    (tmp_path / "run.yaml").write_text(
        "experiment: mod_arithmetic\nseed: 3\n"
        "hooks: {names: [norms, stats], config: {stats: {targets: '2', every: 1}}, on_error: warn}\n"
        "specs: [{name: stats, target_modules: ['0'], hook_factory: 'hookline.factories:activation_stats'}]\n"
        "sinks: {jsonl: true, others: [memory, {sink: 'own.py:Own', options: {path: OWN}}]}\n".replace(
            "OWN", str(tmp_path / "own.jsonl")
        )
    )
    (tmp_path / "own.py").write_text("from hookline.sinks import JSONLSink\nclass Own(JSONLSink):\n    pass\n")
    experiment, sink = rich_experiment(), MemorySink()
    run = HostRun(run_file=tmp_path / "run.yaml", sinks=[sink])
    run.manager.set_run_context(run_dir=str(tmp_path), strategy="host")
    assert list(run.manager.hooks) == ["training_metrics", "norms", "stats", "resources"]
    train_by_hand(experiment, run, epochs=2)
    run.close()
    names = {name for record in sink.records for name in record.metrics}
    assert {"training_metrics/loss", "norms/total_norm"} <= names
    assert "stats/2/forward/std" in names
    assert (tmp_path / "host.jsonl").read_text().count("\n") == len(sink.records)
    assert (tmp_path / "own.jsonl").read_text() == (tmp_path / "host.jsonl").read_text()
    assert not experiment.model[0]._forward_hooks


def test_a_scheduled_hook_sees_the_gradients_that_the_host_has_cleared() -> None:
    """They are held at the steps at which it is due."""
    experiment, seen = _experiment(), {}

    class Looks(hl.TrainingHook):
        hook_points = {hl.HookPoint.POST_STEP}
        step_schedule = hl.StepSchedule("stride", stride=4)

        def compute(self, ctx: hl.RunDataContext) -> None:
            seen[ctx.step] = [parameter.grad is not None for parameter in experiment.model.parameters()]

    train_by_hand(experiment, HostRun(manager=hl.HookManager(hooks=[Looks()])), epochs=2)
    assert list(seen) == [0, 4, 8]
    assert all(all(grads) for grads in seen.values())
