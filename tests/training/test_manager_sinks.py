"""What a manager hands to its log and its sinks, and what it keeps of them for a resumed run."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_hooks import fire, observer
from helpers_sinks import Slow
from helpers_training import differences, plain_step, train

from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.manager import HookManager
from hookline.records.log import Context, read_log
from hookline.records.sink import MetricSink, Record
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint

PRE_STEP, POST_STEP, POST_EPOCH, SNAPSHOT = (
    HookPoint.PRE_STEP, HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT,
)  # fmt: skip


class Keeps(MetricSink):
    """Keeps whole records."""

    def __init__(self) -> None:
        self.seen: list[Record] = []

    def write(self, record: Record) -> None:
        self.seen.append(record)


def hooks():
    """One at every step, one at the end of an epoch."""
    return [
        observer("step", POST_STEP, do=lambda ctx: {"x": torch.tensor(float(ctx.step))}),
        observer("epoch", POST_EPOCH, do=lambda ctx: {"y": ctx.epoch}),
    ]


def run(manager: HookManager, first: int = 0, steps: int = 6, *, per_epoch: int = 3, rest=lambda step: None) -> None:
    """Some steps, with epochs of three."""
    for step in range(first, steps):
        epoch = step // per_epoch
        manager.advance_step(epoch)
        fire(manager, POST_STEP, epoch, step=step)
        rest(step)
        if (step + 1) % per_epoch == 0:
            manager.flush_step_metrics(epoch)
            fire(manager, POST_EPOCH, epoch)


def test_records_say_which_moment_of_which_run_they_are_of(monkeypatch):
    """Step, epoch, point, strategy, rank and time; the metrics of steps with their numbers."""
    monkeypatch.setenv("RANK", "3")
    sink = Keeps()
    manager = HookManager(hooks=hooks(), sinks=[sink])
    manager.emit_metrics({"eval/loss": 1.0}, 0, SNAPSHOT)
    manager.set_run_context(strategy="random")
    run(manager, steps=3)
    manager.emit_metrics({"eval/loss": 0.5}, 7, SNAPSHOT)
    before, steps, epoch, last = sink.seen
    assert (before.step, before.strategy, before.epoch, before.rank) == (None, None, 0, 3)
    assert (steps.step, steps.strategy, steps.epoch, steps.hook_point) == (2, "random", 0, POST_STEP)
    assert steps.metrics == {"step/x": [0.0, 1.0, 2.0]}
    assert steps.metrics["step/x"].steps == [0, 1, 2]
    assert (epoch.step, epoch.epoch, epoch.hook_point, epoch.metrics) == (2, 0, POST_EPOCH, {"epoch/y": 0})
    assert (last.step, last.epoch) == (2, 7)
    assert all(abs(record.time - time.time()) < 60 for record in sink.seen)


def test_a_manager_writes_a_log_of_its_own_and_closes_it(tmp_path):
    """Also when the block is left by an error; what was buffered is in it."""
    manager = HookManager(hooks=hooks(), log=tmp_path / "records.jsonl")

    def interrupted() -> None:
        with manager as entered:
            assert entered is manager
            manager.set_run_context(strategy="a")
            run(manager, steps=3)
            manager.advance_step(1)
            fire(manager, POST_STEP, 1, step=3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    context, *records = read_log(tmp_path)
    assert isinstance(context, Context)
    assert [record.metrics for record in records] == [{"step/x": [0.0, 1.0, 2.0]}, {"epoch/y": 0}, {"step/x": [3.0]}]
    assert records[-1].metrics["step/x"].steps == [3]
    assert manager.fan_out.log == tmp_path / "records.jsonl"


@pytest.mark.parametrize(("every", "expected"), [
    (1, [[0], [1], [2], [3], [4], [5]]),
    (2, [[0, 1], [2], [3], [4, 5]]),
    (4, [[0, 1, 2], [3], [4, 5]]),
    (None, [[0, 1, 2], [3, 4, 5]]),
])  # fmt: skip
def test_step_metrics_go_out_every_so_many_steps_and_at_the_end_of_epochs(every, expected):
    """Counted in steps of the whole run; each flush belongs to the epoch of its steps."""
    sink = Keeps()
    manager = HookManager(hooks=hooks(), sinks=[sink], flush_every=every)
    run(manager)
    flushed = [record for record in sink.seen if record.hook_point is POST_STEP]
    assert [record.metrics["step/x"].steps for record in flushed] == expected
    assert [record.epoch for record in flushed] == [steps[-1] // 3 for steps in expected]
    assert [record.step for record in flushed] == [steps[-1] for steps in expected]


def test_in_the_step_loop_a_flush_belongs_to_its_last_step():
    """Also if only ``record`` has left something, and no hook has fired."""
    sink = Keeps()
    manager = HookManager(sinks=[sink], flush_every=3, loop_type="step")
    for step in range(7):
        manager.advance_step()
        manager.output.record("train/loss", float(step))
    assert [(record.epoch, record.step, record.metrics) for record in sink.seen] == [
        (None, 2, {"train/loss": [0.0, 1.0, 2.0]}),
        (None, 5, {"train/loss": [3.0, 4.0, 5.0]}),
    ]


@pytest.mark.parametrize("stop", [2, 4, 5])
@pytest.mark.parametrize("flush_every", [None, 2])
def test_a_resumed_manager_leaves_the_files_of_one_that_never_stopped(tmp_path, stop, flush_every):
    """Killed some steps after the checkpoint; log, step log and JSONL are the same but for the time."""

    def made(folder: Path) -> HookManager:
        return HookManager(
            hooks=hooks(), sinks=[JSONLSink(folder / "m.jsonl")], log=folder / "records.jsonl",
            step_metrics_log=folder / "steps.jsonl", flush_every=flush_every,
        )  # fmt: skip

    def files(folder: Path) -> list[object]:
        lines = (folder / "records.jsonl").read_text().splitlines()[1:]  # the first has the time and the place
        log = [{**json.loads(line), "time": 0} for line in lines]
        return [log, (folder / "m.jsonl").read_text(), (folder / "steps.jsonl").read_text()]

    with made(tmp_path / "whole") as whole:
        run(whole, steps=12)
    states = {}

    def killed() -> None:  # without a close, as a kill leaves it
        manager = made(tmp_path / "killed")
        run(manager, steps=8, rest=lambda step: states.update({step: manager.state_dict()}))

    killed()
    with made(tmp_path / "killed") as resumed:
        resumed.load_state_dict(states[stop])
        if (stop + 1) % 3 == 0:  # the epoch's end came after the state was taken
            resumed.flush_step_metrics(stop // 3)
            fire(resumed, POST_EPOCH, stop // 3)
        run(resumed, first=stop + 1, steps=12)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


# -- the run is the same -------------------------------------------------------------------------------------------


def observed(manager: HookManager, spoil=lambda: None):
    """A step with a manager."""

    def step(model, x, target):
        manager.advance_step(0)
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        manager.fire(POST_STEP, lambda: RunDataContext(POST_STEP, 0, model=model, loss=loss))
        manager.fire(POST_EPOCH, lambda: RunDataContext(POST_EPOCH, 0, model=model, loss=loss))
        spoil()

    return step


def watching():
    """Hooks that read the model."""
    norms = lambda ctx: {"norm": ctx.model[0].weight.norm(), "all": ctx.model[0].weight}  # noqa: E731
    return [observer("step", POST_STEP, do=norms), observer("epoch", POST_EPOCH, do=norms)]


def test_a_run_with_log_sinks_and_helper_process_ends_as_one_without(tmp_path):
    """Weights, optimizer and random streams, to the last bit; and there were records of every step."""
    plain = train(plain_step, steps=24)
    state = random.getstate()
    sinks = [JSONLSink(tmp_path / "m.jsonl"), MemorySink(), Slow(str(tmp_path / "slow.txt"))]
    with HookManager(hooks=watching(), sinks=sinks, log=tmp_path / "records.jsonl", flush_every=5) as manager:
        hooked = train(observed(manager), steps=24)
    assert differences(plain, hooked) == []
    assert random.getstate() == state
    assert manager.fan_out.errors == {}
    assert len(list(read_log(tmp_path))) == 24 + 5
    assert len((tmp_path / "slow.txt").read_text().splitlines()) == 24 + 5 + 1
