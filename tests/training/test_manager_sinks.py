"""What becomes of the metrics of a firing: checked, brought to the host, buffered by step, handed to log and sinks."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_hooks import fire, observer
from torch import nn

from hookline.errors import MetricError
from hookline.lifecycle.manager import HookManager
from hookline.records.log import Context, read_log
from hookline.sinks.jsonl_sink import JSONLSink
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint, StepSchedule

PRE_EPOCH, PRE_STEP, POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint


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
    sink = MemorySink()
    manager = HookManager(hooks=hooks(), sinks=[sink])
    manager.emit_metrics({"eval/loss": 1.0}, 0, SNAPSHOT)
    manager.set_run_context(strategy="random")
    run(manager, steps=3)
    manager.emit_metrics({"eval/loss": torch.tensor(0.5)}, 7, SNAPSHOT)
    before, steps, epoch, last = sink.records
    assert (before.step, before.strategy, before.epoch, before.rank) == (None, None, 0, 3)
    assert (steps.step, steps.strategy, steps.epoch, steps.hook_point) == (2, "random", 0, POST_STEP)
    assert steps.metrics == {"step/x": [0.0, 1.0, 2.0]}
    assert steps.metrics["step/x"].steps == [0, 1, 2]
    assert (epoch.step, epoch.epoch, epoch.hook_point, epoch.metrics) == (2, 0, POST_EPOCH, {"epoch/y": 0})
    assert (last.step, last.epoch, last.metrics) == (2, 7, {"eval/loss": 0.5})
    assert all(abs(record.time - time.time()) < 60 for record in sink.records)


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
    sink = MemorySink()
    manager = HookManager(hooks=hooks(), sinks=[sink], flush_every=every)
    run(manager)
    flushed = [record for record in sink.records if record.hook_point is POST_STEP]
    assert [record.metrics["step/x"].steps for record in flushed] == expected
    assert [record.epoch for record in flushed] == [steps[-1] // 3 for steps in expected]
    assert [record.step for record in flushed] == [steps[-1] for steps in expected]


def test_in_the_step_loop_a_flush_belongs_to_its_last_step():
    """Also if only ``record`` has left something, and no hook has fired."""
    sink = MemorySink()
    manager = HookManager(sinks=[sink], flush_every=3, loop_type="step")
    for step in range(7):
        manager.advance_step()
        manager.output.record("train/loss", float(step))
    assert [(record.epoch, record.step, record.metrics) for record in sink.records] == [
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


def test_metrics_of_an_epoch_go_out_at_once_on_the_host():
    """Numbers of every library; tensors as numbers, whatever they are in, also those that are not simply in a row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give quantized tensors up
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
    found = {
        "number": (1.5, 1.5),
        "long": (np.longdouble(1.5), 1.5),
        "longs": (np.array([1.5], dtype=np.longdouble), [1.5]),
        "int": (np.int32(3), 3),
        "yes": (np.bool_(True), True),
        "tensor": (torch.tensor(2.5, dtype=torch.float64), 2.5),
        "half": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        "vector": (torch.tensor([1, 2]), [1, 2]),
        "sparse": (torch.eye(2).to_sparse(), [[1.0, 0.0], [0.0, 1.0]]),
        "quantized": (quantized, [1.0, 1.0]),
        "list": ([torch.tensor(1.0), 2], [1.0, 2]),
        "nested": ({"a": {"b": torch.tensor(True)}}, {"a": {"b": True}}),
        "nan": (float("nan"), None),
        "words": ("phase two", "phase two"),
    }
    sink = MemorySink()
    returns = {name: returned for name, (returned, _) in found.items()}
    fire(HookManager(hooks=[observer("a", returns=returns)], sinks=[sink]), POST_EPOCH, epoch=3)
    (record,) = sink.records
    assert (record.epoch, record.hook_point) == (3, POST_EPOCH)
    nan = record.metrics.pop("a/nan")
    assert nan != nan
    assert record.metrics == {f"a/{name}": expected for name, (_, expected) in found.items() if name != "nan"}


def test_metrics_of_steps_are_buffered_with_their_steps_and_go_out_when_flushed():
    """As lists, PRE_STEP and POST_STEP apart, each value with its step; nothing is left."""
    sink = MemorySink()
    every, third = (observer(name, PRE_STEP, POST_STEP, do=lambda ctx: {"x": ctx.step}) for name in ("a", "b"))
    third.step_schedule = StepSchedule("stride", stride=3)
    manager = HookManager(hooks=[every, third], sinks=[sink])
    for step in range(4):
        manager.advance_step()
        fire(manager, PRE_STEP, step=step)
        fire(manager, POST_STEP, step=step)
    assert sink.records == []
    manager.flush_step_metrics(epoch=7)
    assert [(record.hook_point, record.epoch) for record in sink.records] == [(PRE_STEP, 7), (POST_STEP, 7)]
    for record in sink.records:
        assert record.metrics == {"a/x": [0, 1, 2, 3], "b/x": [0, 3]}
        assert record.metrics["a/x"].steps == [0, 1, 2, 3]
        assert record.metrics["b/x"].steps == [0, 3]
    manager.flush_step_metrics(epoch=8)
    manager.flush_sinks()
    assert len(sink.records) == 2


def test_a_tensor_is_kept_as_it_was_when_it_was_returned():
    """Though it is a weight, or a view of one, that goes on changing until the flush."""
    sink = MemorySink()
    model = nn.Linear(1, 1)
    buffer = torch.zeros(())

    def returned(ctx):
        return {"bias": model.bias, "view": model.weight[0, 0], "buffer": buffer}

    manager = HookManager(hooks=[observer("a", POST_STEP, do=returned)], sinks=[sink])
    for step in range(3):
        with torch.no_grad():
            model.bias.fill_(step)
            model.weight.fill_(10 * step)
            buffer.fill_(100 * step)
        manager.advance_step()
        fire(manager, POST_STEP)
    manager.flush_step_metrics(0)
    assert sink.latest == {
        "a/bias": [[0.0], [1.0], [2.0]],
        "a/view": [0.0, 10.0, 20.0],
        "a/buffer": [0.0, 100.0, 200.0],
    }


def test_a_loop_that_counts_its_steps_itself_tells_them_by_the_position():
    """Without advance_step() the manager knows no step; before the first step the position is 0, and there is none."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", SNAPSHOT, returns={"x": 1})], sinks=[sink], loop_type="step")
    manager.emit_metrics({"eval/loss": 2.0}, 0, SNAPSHOT)
    manager.emit_metrics({"eval/loss": 0.5}, 12, SNAPSHOT)
    fire(manager, SNAPSHOT, epoch=4, step=0)
    assert [(record.epoch, record.step, record.position) for record in sink.records] == [
        (None, None, 0),
        (None, 12, 12),
        (None, 0, 0),
    ]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"x": object()}, r"'bad' returned an object as 'x', which no sink can write"),
        ({"x": [1, nn.Linear(1, 1)]}, r"a Linear as 'x'"),
        ({"x": torch.tensor(1j)}, r"a complex tensor as 'x'"),
        ({"x": torch.ones(1, device="meta")}, "meta"),
        ({"x": {None: 1}}, r"a dictionary with a NoneType as a key"),
        ({3: 1.0}, r"by the name 3; names of metrics are strings"),
        (1.0, r"'bad' returned a float; metrics are a dictionary"),
    ],
)
def test_a_metric_that_no_sink_can_write_is_an_error_that_names_the_hook(returned, words):
    """Those of other hooks go out nevertheless."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("good", returns={"x": 1}), observer("bad", returns=returned)], sinks=[sink])
    with pytest.raises(MetricError, match=words):
        fire(manager, POST_EPOCH)
    assert sink.latest == {"good/x": 1}
