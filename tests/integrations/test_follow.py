"""`follow`: one line before a loop fires hooks in it; the loop stays as it is, to the last bit."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_follow import Counting, Loop, Seen
from helpers_training import nested_differences
from helpers_warm import run_warm
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline as hl
from hookline.debug import FlightRecorder, read_flight
from hookline.errors import LifecycleError, OptionError, UnhookableError

POINTS = hl.HookPoint


class Nudge(Seen):
    """The negative control: an observer that writes to the model."""

    def compute(self, ctx: hl.RunDataContext) -> dict[str, Any]:
        with torch.no_grad():
            ctx.model[0].weight[0, 0] += 1e-7
        return super().compute(ctx)


class TrainsAnEpoch(hl.InterventionHook):
    name = "trains"
    hook_points = {POINTS.PRE_EPOCH, POINTS.PRE_STEP, POINTS.POST_STEP, POINTS.POST_EPOCH}
    step_schedule = hl.StepSchedule("stride", stride=5)

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
        gradients = model_ctx.run_training_epoch()
        return {"norm": float(sum(g.square().sum() for g in gradients.values()))}


def _plain() -> dict[str, Any]:
    return Loop().train().left()


FULL = ("loader", "loss_fn", "scheduler")


@pytest.mark.parametrize("parts", [(), ("loader",), FULL], ids=["bare", "loader", "full"])
def test_the_loop_is_the_same_to_the_last_bit(parts: Iterable[str], tmp_path: Path) -> None:
    """Also with a log, and so with a flight recorder."""
    loop = Loop()
    hooks = [Seen(), "norms", TrainsAnEpoch()] if parts == FULL else [Seen(), "norms"]
    with loop.follow(hooks, log=tmp_path / "log.jsonl", **{name: getattr(loop, name) for name in parts}) as run:
        loop.train()
    assert nested_differences(loop.left(), _plain()) == []
    assert run.manager.hooks.fired["flight_recorder"] > 20
    assert run.manager.hooks.fired["seen"] > 40
    if parts == FULL:
        assert run.manager.hooks.fired["trains"] > 10


@pytest.mark.parametrize(("hook", "is_inert"), [(Seen, True), (Nudge, False)])
def test_the_report_at_the_end_changes_no_bit_of_a_loop_that_goes_on(hook: Any, is_inert: bool) -> None:
    """Of 7 steps the last two come after the report of step 4: they are reported when the loop is left."""
    loop, seen = Loop(), hook()
    if not is_inert:  # the negative control writes at the very last report alone
        seen.loop_points = {"step": {POINTS.SNAPSHOT: (5, None)}}
    with loop.follow([seen], loader=loop.loader, loop="step", snapshot_every=4):
        loop.train(epochs=1)
    assert [place[2] for place in seen.places() if place[0] == "SNAPSHOT"] == ([0, 4, 6] if is_inert else [6])
    loop.train(epochs=2)
    assert (nested_differences(loop.left(), _plain()) == []) is is_inert


@pytest.mark.parametrize("clips", [True, False])
def test_norms_has_the_gradient_of_a_whole_step_before_and_after_clipping(clips: bool) -> None:
    """Of all its batches, with biases; what clips may be a function of the user's own."""
    loop, sink, norms = Loop(), hl.sinks.MemorySink(), []
    with loop.follow(["norms"], sinks=[sink]):
        for _ in range(3):
            for _ in range(4):
                loop.model(torch.randn(8, 6)).square().mean().backward()
            grads = [each.grad for each in loop.model.parameters()]
            before = float(torch.cat([grad.flatten() for grad in grads]).norm())
            for grad in grads if clips else ():
                grad.mul_(1e-3)
            norms.append((before, before * 1e-3 if clips else before))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    for name, expected in zip(("grad_norm", "grad_norm_clipped"), zip(*norms, strict=True), strict=True):
        found = [each for record in sink.records for each in record.metrics.get(f"norms/{name}", ())]
        assert found == pytest.approx(expected, rel=1e-4)


def test_with_the_loader_every_pass_in_training_mode_is_an_epoch() -> None:
    loop, seen = Loop(), Seen()
    next(iter(loop.loader))  # many scripts look at one batch first: no epoch
    with loop.follow([seen], loader=loop.loader):
        next(iter(loop.loader))
        loop.train(2)
    expected: list[tuple[str, int, int | None]] = []
    for epoch in range(2):
        first = epoch * 7
        expected.append(("PRE_EPOCH", epoch, first - 1 if first else None))
        for step in range(first, first + 7):
            expected += [("PRE_STEP", epoch, step), ("POST_STEP", epoch, step)]
        expected += [("POST_EPOCH", epoch, first + 6), ("SNAPSHOT", epoch, first + 6)]
    assert seen.places() == expected
    steps = [ctx for ctx in seen.contexts if ctx.hook_point is POINTS.POST_STEP]
    assert [ctx.loss for ctx in steps] == loop.losses
    assert [ctx.batch_idx for ctx in steps] == [*range(7)] * 2
    assert all(len(ctx.batch_data) == 2 for ctx in steps)
    means = [ctx.loss for ctx in seen.contexts if ctx.hook_point is POINTS.POST_EPOCH]
    assert means == pytest.approx([sum(loop.losses[:7]) / 7, sum(loop.losses[7:]) / 7])


def test_without_a_loader_everything_is_epoch_0_and_the_end_ends_it() -> None:
    loop, seen = Loop(), Seen()
    run = loop.follow([seen])
    loop.train(1)
    assert [place for place in seen.places() if not place[0].endswith("STEP")] == [("PRE_EPOCH", 0, None)]
    run.close()
    run.close()
    assert seen.places()[-2:] == [("POST_EPOCH", 0, 6), ("SNAPSHOT", 0, 6)]
    assert run.metrics["seen/step"] == 6.0
    assert "training_metrics/loss" in run.metrics
    before = len(seen.contexts)
    loop.train(1)
    assert len(seen.contexts) == before


def test_after_the_end_nothing_of_it_is_left() -> None:
    def replaced() -> list[Any]:
        return [torch.autograd.backward, DataLoader.__iter__]

    loop, before = Loop(), replaced()
    run = loop.follow([Seen()], loader=loop.loader)
    assert not any(now is own for now, own in zip(replaced(), before, strict=True))
    run.close()
    assert all(now is own for now, own in zip(replaced(), before, strict=True))
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not loop.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("takes_one_more", [False, True])
def test_a_pass_that_the_loop_leaves_early_ends_when_the_next_begins(takes_one_more: bool) -> None:
    """Also where the loop has taken a batch that it does not train on: the step that had begun is of the next epoch."""
    loop, seen = Loop(), Seen()
    with loop.follow([seen], loader=loop.loader):
        for _ in range(2):
            for number, batch in enumerate(loop.loader):
                if number == 3:
                    break
                loop.loss_fn(loop.model, batch).backward()
                loop.optimizer.step()
                if number == 2 and not takes_one_more:
                    break
    ends = [place for place in seen.places() if place[0] in ("PRE_EPOCH", "POST_EPOCH")]
    assert [place[:2] for place in ends] == [("PRE_EPOCH", 0), ("POST_EPOCH", 0), ("PRE_EPOCH", 1), ("POST_EPOCH", 1)]
    steps = [place[1:] for place in seen.places() if place[0] == "POST_STEP"]
    assert steps == [(step // 3, step) for step in range(6)]
    batches = [ctx.batch_idx for ctx in seen.contexts if ctx.hook_point is POINTS.POST_STEP]
    assert batches == [0, 1, 2] * 2


def test_batches_that_are_accumulated_make_one_step_with_one_loss() -> None:
    loop, seen = Loop(), Seen()
    parts: list[float] = []
    with loop.follow([seen], loader=loop.loader):
        for number, batch in enumerate(loop.loader):
            loss = loop.loss_fn(loop.model, batch) / 3
            loss.backward()
            parts.append(float(loss.detach()))
            if number % 3 == 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    steps = [ctx for ctx in seen.contexts if ctx.hook_point is POINTS.POST_STEP]
    assert [ctx.loss for ctx in steps] == pytest.approx([sum(parts[:3]), sum(parts[3:6])])
    assert [len(ctx.batch_data) for ctx in steps] == [3, 3]


def test_a_run_with_a_log_has_a_flight_recorder_which_names_all_batches_of_the_step(tmp_path: Path) -> None:
    """Beside the log, at a NaN in the second of two batches; a recorder that was given is not doubled."""
    for number, hooks in enumerate(([], [FlightRecorder(keep=2)], "flight_recorder")):
        loop = Loop()
        with loop.follow(hooks, loader=loop.loader, log=tmp_path / str(number) / "log.jsonl"):
            for index, (x, y) in enumerate(loop.loader):
                loop.loss_fn(loop.model, (x * float("nan") if index == 3 else x, y)).backward()
                if index % 2:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
        flight = read_flight(tmp_path / str(number) / "flight_recorder.json")
        assert "in step 1" in flight.reason
        assert [step["batch"] for step in flight.steps] == ["0 to 1 of epoch 0", "2 to 3 of epoch 0"]


def test_a_step_that_a_scaler_skips_is_none_and_losses_come_without_the_scale() -> None:
    loop, seen = Loop(), Seen()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    told: list[float] = []
    with loop.follow([seen], scaler=scaler):
        for number, batch in enumerate(loop.loader):
            loop.optimizer.zero_grad()
            loss = loop.loss_fn(loop.model, batch) * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            told += [] if number == 2 else [float(loss.detach())]
    steps = [ctx for ctx in seen.contexts if ctx.hook_point is POINTS.POST_STEP]
    assert len(steps) == 6
    assert [ctx.loss for ctx in steps] == pytest.approx(told)


def test_an_optimizer_that_calls_a_closure_many_times_makes_one_step() -> None:
    loop, seen = Loop(), Seen()
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=4)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loop.model(torch.ones(4, 6)).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    with hl.follow(loop.model, optimizer, [seen]):
        optimizer.step(closure)
    assert len(losses) > 1
    assert [ctx.loss for ctx in seen.contexts if ctx.hook_point is POINTS.POST_STEP] == losses[:1]


def test_of_two_optimizers_the_last_one_ends_a_step() -> None:
    loop, seen = Loop(), Seen()
    first = torch.optim.SGD(loop.model[0].parameters(), 0.1)
    last = torch.optim.SGD(loop.model[4].parameters(), 0.1)
    with hl.follow(loop.model, [first, last], [seen]):
        for batch in loop.loader:
            loop.loss_fn(loop.model, batch).backward()
            first.step()
            last.step()
    assert len([place for place in seen.places() if place[0] == "POST_STEP"]) == 7


def test_what_the_loop_says_of_its_loss_counts_more_than_backward() -> None:
    loop, seen = Loop(), Seen()
    with loop.follow([seen]) as run:
        loop.loss_fn(loop.model, next(iter(loop.loader))).backward()
        run.loss(0.25)
        loop.optimizer.step()
        loop.optimizer.step()
    assert [ctx.loss for ctx in seen.contexts if ctx.hook_point is POINTS.POST_STEP] == [0.25, None]


def _untimed(metrics: Any) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith("resources/")}


@pytest.mark.parametrize("resumes", [False, True])
def test_a_log_that_holds_another_run_is_told(resumes: bool, tmp_path: Path) -> None:
    """Not where that run goes on, though its state be loaded after a batch was fetched."""
    log = tmp_path / "records.jsonl"
    loop = Loop()
    with loop.follow(["norms"], log=log) as run:
        loop.train(1)
        state = run.state_dict()
    loop = Loop()
    with warnings.catch_warnings(record=True) as told, loop.follow(["norms"], log=log, loader=loop.loader) as run:
        warnings.simplefilter("always")
        next(iter(loop.loader))
        if resumes:
            run.load_state_dict(state)
        loop.train(1)
    assert any("holds an earlier run" in str(each.message) for each in told) is not resumes


def test_hook_state_goes_into_the_checkpoint_of_the_loop_and_back() -> None:
    whole = Loop()
    with whole.follow(["norms", Counting()], loader=whole.loader) as run:
        whole.train(4)
        expected = run.state_dict()["manager"]["hooks"], run.step, run.epoch, _untimed(run.metrics)
    first = Loop()
    with first.follow(["norms", Counting()], loader=first.loader) as run:
        first.train(2)
        saved = [part.state_dict() for part in (first.model, first.optimizer, first.scheduler, run)]
        random = torch.get_rng_state()
    second = Loop()
    with second.follow(["norms", Counting()], loader=second.loader) as run:
        for part, state in zip((second.model, second.optimizer, second.scheduler, run), saved, strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(random)
        second.train(2)
        found = run.state_dict()["manager"]["hooks"], run.step, run.epoch, _untimed(run.metrics)
        assert nested_differences(found, expected) == []
    assert nested_differences(second.left()["state"], whole.left()["state"]) == []
    with pytest.raises(LifecycleError, match="has no loop"):
        run.load_state_dict({})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda loop: hl.follow(loop.optimizer, loop.model), OptionError, "nn.Module first"),
        (lambda loop: hl.follow(loop.model, []), OptionError, "empty list"),
        (lambda loop: hl.follow(loop.model, loop.scheduler), UnhookableError, "torch.optim.Optimizer"),
        (lambda loop: loop.follow([], loader=[1, 2]), UnhookableError, "DataLoader"),
        (lambda loop: loop.follow([], sinks=[], manager=hl.HookManager()), OptionError, "manager="),
        (lambda loop: loop.follow([], loadr=[1]), OptionError, r"Did you mean 'loader'.*snapshot_every.*flush_every"),
        (lambda loop: loop.follow([], sinks=["csv"]), OptionError, "CSVSink.*TensorBoardSink"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(call: Callable[[Loop], Any], error: Any, text: str) -> None:
    loop, backward = Loop(), torch.autograd.backward
    with pytest.raises(error, match=text):
        call(loop)
    assert torch.autograd.backward is backward
    assert not loop.optimizer._optimizer_step_pre_hooks


SCRIPT = """
import atexit, sys, torch, hookline as hl
class Log(hl.sinks.JSONLSink):  # as that of W&B, whose run ends with the process
    has_ended = False
    def write(self, record):
        if not Log.has_ended:
            super().write(record)
atexit.register(setattr, Log, "has_ended", True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
class Ends(hl.TrainingHook):
    name = "ends"
    hook_points = {hl.HookPoint.POST_EPOCH}
    def compute(self, ctx):
        return {"loss": ctx.loss}
hl.follow(model, optimizer, [Ends], sinks=[Log(sys.argv[1])])
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
if len(sys.argv) > 2:
    raise RuntimeError("the script fails")
"""


@pytest.mark.parametrize(
    "fails", [pytest.param(False, id="ends", marks=pytest.mark.slow), pytest.param(True, id="fails")]
)
def test_a_script_that_never_closes_it_loses_nothing(fails: bool, tmp_path: Any) -> None:
    file = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", SCRIPT, str(file), *(["fail"] if fails else [])]
    done = run_warm(command, capture_output=True, text=True, takes_down=True)
    assert done.returncode == int(fails), done.stderr
    assert ("ends/loss" in file.read_text() if file.exists() else False) is not fails


@pytest.mark.slow
def test_steps_of_a_compiled_optimizer_are_seen() -> None:
    loop, seen = Loop(), Seen()
    step = torch.compile(loop.optimizer.step, backend="eager")
    with loop.follow([seen]):
        for batch in loop.loader:
            loop.optimizer.zero_grad()
            loop.loss_fn(loop.model, batch).backward()
            step()
    assert len([place for place in seen.places() if place[0] == "POST_STEP"]) == 7
    torch.compiler.reset()


def test_batches_that_are_fetched_ahead_or_in_evaluation_mode_belong_to_the_right_epoch() -> None:
    loop, seen = Loop(), Seen()
    loader = DataLoader(loop.loader.dataset, 5)  # six batches

    def ahead() -> Any:
        batches = iter(loader)
        waiting = next(batches)
        for batch in batches:
            yield waiting
            waiting = batch
        yield waiting

    with loop.follow([seen], loader=loader):
        for _ in range(3):
            for number, batch in enumerate(ahead()):
                loop.model.train()  # as the Trainer of Hugging Face does: with the step, not before the batch
                loop.loss_fn(loop.model, batch).backward()
                if number % 2:
                    loop.optimizer.step()
            loop.model.eval()
    ends = [place for place in seen.places() if place[0] in ("PRE_EPOCH", "POST_EPOCH")]
    assert ends[::2] == [("PRE_EPOCH", 0, None), ("PRE_EPOCH", 1, 2), ("PRE_EPOCH", 2, 5)]
    assert ends[1::2] == [("POST_EPOCH", 0, 2), ("POST_EPOCH", 1, 5), ("POST_EPOCH", 2, 8)]


@pytest.mark.parametrize("is_fetched_at_once", [True, False])
def test_steps_after_the_end_of_a_pass_are_together_one_epoch(is_fetched_at_once: bool) -> None:
    loop, seen = Loop(), Seen()

    def step(batch: Any) -> None:
        loop.loss_fn(loop.model, batch).backward()
        loop.optimizer.step()

    with loop.follow([seen], loader=loop.loader):
        batches = list(loop.loader) if is_fetched_at_once else []
        for batch in batches or loop.loader:
            step(batch)
        for again in batches or [batch] * 5:
            step(again)
    ends = [epoch for name, epoch, _ in seen.places() if name == "POST_EPOCH"]
    assert ends == [0, 1]


def _train_with_scaler(*, follow: bool) -> Any:
    loop, scaler = Loop(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    parts = {"scaler": scaler, "loader": loop.loader, "loss_fn": loop.loss_fn}
    run = loop.follow([TrainsAnEpoch()], **parts) if follow else None
    for batch in [*loop.loader, *loop.loader, *loop.loader]:
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss_fn(loop.model, batch)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    if run is not None:
        run.close()
        assert run.manager.hooks.fired["trains"] > 4
    return loop.left(), scaler.state_dict()


def test_an_intervention_trains_with_the_scaler_of_the_loop_and_leaves_it_as_it_was() -> None:
    assert nested_differences(_train_with_scaler(follow=True), _train_with_scaler(follow=False)) == []


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_an_evaluation_inside_of_the_loop_is_no_training(when: str) -> None:
    """A watch counts what it counts without being followed, wherever the loop evaluates."""

    def train(*, followed: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        loader = DataLoader(torch.randn(6, 4), batch_size=2)
        watch = hl.watch(model, "0", on="forward", stats=["mean", "max"])

        def evaluate() -> None:
            model.eval()
            with torch.no_grad():
                model(torch.full((5, 4), 1000.0))
            model.train()

        with hl.follow(model, optimizer, [], loader=loader) if followed else contextlib.nullcontext():
            for batch in loader:
                if when == "before the step":
                    evaluate()
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if when == "after the step":
                    evaluate()
        metrics = watch.to_metrics()
        watch.remove(quiet=True)
        return metrics

    alone = train(followed=False)
    assert alone["0/forward/max"] < 10
    assert train(followed=True) == alone


class _TrainsOneMore(hl.InterventionHook):
    """Train one epoch more, and return where the weights are then."""

    name = "one_more"
    hook_points = {hl.HookPoint.POST_EPOCH}

    def intervene(self, run_ctx: hl.RunDataContext, model_ctx: Any) -> dict[str, float]:
        model_ctx.run_training_epoch()
        return {"weights": _sum_of(model_ctx.model)}


def _sum_of(model: nn.Module) -> float:
    return float(sum(each.detach().double().sum() for each in model.parameters()))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_an_intervention_trains_as_the_loop_does(accumulate: int, per: str) -> None:
    """What a guarded epoch finds after epoch 0 is what epoch 1 does: as many batches a step, as many of the scheduler.

    A scheduler that is stepped for epochs is put back by the loop itself after the hook, so its rate is made the same.
    """
    torch.manual_seed(0)
    model, rows, sink = nn.Linear(4, 1), torch.utils.data.DataLoader(torch.randn(16, 4), 2), hl.sinks.MemorySink()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rate = (lambda number: 1 / (1 + number)) if per == "step" else (lambda number: 1.0 if number < 2 else 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    ends = []
    options = {"loader": rows, "scheduler": scheduler, "scheduler_per": per, "accumulate": accumulate}
    with hl.follow(model, optimizer, [_TrainsOneMore()], loss_fn=loss_fn, sinks=[sink], **options):
        for _ in range(2):
            for number, batch in enumerate(rows, 1):
                (loss_fn(model, batch) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    if per == "step":
                        scheduler.step()
                    optimizer.zero_grad()
            if per == "epoch":
                scheduler.step()
            ends.append(_sum_of(model))
    assert dict(sink.series("one_more/weights"))[0] == ends[1]


def test_a_watch_among_the_hooks_reads_gradients_before_the_step() -> None:
    """Two batches a step: the gradient that the optimizer takes, once a step, and not that of each backward."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch, own = hl.watch(model, on=["param_grad"]), hl.watch(model, on=["param_grad"], optimizer=optimizer)
    norms = []
    with hl.follow(model, optimizer, [watch], sinks=[], snapshot_every=0):
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(3, 4)).square().mean().backward()
            assert model.weight.grad is not None
            norms.append(float(model.weight.grad.norm()))
            optimizer.step()
            optimizer.zero_grad()
        counted, expected = watch.to_metrics(), own.to_metrics()
    assert counted == expected
    assert counted["weight/param_grad/norm"] == pytest.approx((sum(one * one for one in norms) / 3) ** 0.5)
    assert (watch.steps, watch.report()["step"]) == (3, "the optimizer's step")
    for one in (watch, own):
        one.remove()
