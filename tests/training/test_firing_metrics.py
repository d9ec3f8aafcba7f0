"""What becomes of the metrics of a firing: checked, brought to the host, buffered by step, handed to sinks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from helpers_hooks import fire, observer
from torch import nn

from hookline.errors import MetricError
from hookline.lifecycle.manager import HookManager
from hookline.sinks.memory_sink import MemorySink
from hookline.when import HookPoint, StepSchedule

PRE_EPOCH, PRE_STEP, POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint


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


def test_what_is_buffered_at_the_end_goes_out_with_the_sinks():
    """Nothing lost."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", POST_STEP, returns={"x": 1})], sinks=[sink])
    manager.advance_step()
    fire(manager, POST_STEP)
    manager.flush_sinks()
    assert sink.latest == {"a/x": [1]}


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


def test_the_loops_own_metrics_go_out_beside_those_of_hooks():
    """At once, with the step they belong to."""
    sink = MemorySink()
    HookManager(sinks=[sink]).emit_metrics({"eval/loss": torch.tensor(0.5)}, 12, SNAPSHOT)
    assert [(r.metrics, r.epoch, r.hook_point) for r in sink.records] == [({"eval/loss": 0.5}, 12, SNAPSHOT)]


@pytest.mark.parametrize(("loop_type", "epoch", "place"), [(None, 4, 4), ("epoch", 4, 4), ("step", None, 0)])
def test_a_record_is_placed_by_epoch_or_in_the_step_loop_by_step(loop_type, epoch, place):
    """Step 0 included."""
    sink = MemorySink()
    manager = HookManager(hooks=[observer("a", SNAPSHOT, returns={"x": 1})], sinks=[sink], loop_type=loop_type)
    fire(manager, SNAPSHOT, epoch=4, step=0)
    assert [(record.epoch, record.position) for record in sink.records] == [(epoch, place)]


def test_a_loop_that_counts_its_steps_itself_tells_them_by_the_position():
    """Without advance_step() the manager knows no step; before the first step the position is 0, and there is none."""
    sink = MemorySink()
    manager = HookManager(sinks=[sink], loop_type="step")
    manager.emit_metrics({"eval/loss": 2.0}, 0, SNAPSHOT)
    manager.emit_metrics({"eval/loss": 0.5}, 12, SNAPSHOT)
    assert [(record.epoch, record.step, record.position) for record in sink.records] == [
        (None, None, 0),
        (None, 12, 12),
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
