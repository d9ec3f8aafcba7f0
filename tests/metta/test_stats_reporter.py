"""StatsReporter: everything is reported once at the end of an epoch, and starts anew."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hookline as hl


def full_context() -> hl.metta.ComponentContext:
    """Every tracker with one update, put in from last to first."""
    context = hl.metta.ComponentContext()
    for key, state in reversed(
        {
            "relu_activation_state": hl.metta.ReLUActivationState(),
            "fisher_information_state": hl.metta.FisherInformationState(),
            "saturated_activation_state_tanh": hl.metta.SaturatedActivationState("tanh"),
            "saturated_activation_state_sigmoid": hl.metta.SaturatedActivationState("sigmoid"),
            "gradient_flow_state": hl.metta.GradientFlowState(),
            "relu_gradient_flow_state": hl.metta.ReLUGradientFlowState(),
        }.items()
    ):
        state.update("c", torch.ones(1))
        context.model_metrics[key] = state
    return context


class Noting:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.taken = []

    def emit(self, metrics, epoch, hook_point):
        self.taken.append((metrics, epoch, hook_point))


class Failing:
    """A sink that does not work."""

    def emit(self, metrics, epoch, hook_point):
        raise OSError("disk full")


def test_the_order_is_that_of_the_source_whatever_the_order_in_the_context():
    """Dead neurons, ReLU, Fisher, tanh, sigmoid, gradient flow, ReLU gradient flow."""
    metrics = hl.metta.StatsReporter(full_context(), policy=nn.Linear(1, 1)).on_epoch_end()
    groups = list(dict.fromkeys("/".join(key.split("/")[:2]) for key in metrics))
    assert groups == [
        "weights/dead_neurons",
        "activations/relu",
        "fisher_info/c",
        "activations/tanh",
        "activations/sigmoid",
        "gradient_flow/c",
        "gradient_flow/relu",
    ]


def test_a_tracker_of_ones_own_is_reported_after_the_others():
    """Anything with to_metrics and reset; what has neither is passed over."""

    class Own:
        resets = 0

        def to_metrics(self):
            return {"own/value": 3.0}

        def reset(self):
            self.resets += 1

    context, own = full_context(), Own()
    context.model_metrics = {"own": own, "notes": ["text"], **context.model_metrics}
    metrics = hl.metta.StatsReporter(context).on_epoch_end()
    assert list(metrics)[-1] == "own/value"
    assert own.resets == 1


def test_a_sink_that_fails_does_not_keep_the_others_from_theirs(caplog):
    """It is logged with its name; metrics come back, trackers are reset."""
    context, sink = full_context(), Noting()
    with caplog.at_level(logging.ERROR, logger="hookline"):
        metrics = hl.metta.StatsReporter(context, sinks=[Failing(), sink]).on_epoch_end(3)
    assert [taken for taken, _, _ in sink.taken] == [metrics]
    assert metrics != {}
    assert "Failing could not take the metrics of epoch 3" in caplog.text
    assert "disk full" in caplog.text
    assert context.model_metrics["gradient_flow_state"].to_metrics() == {}


def test_a_sink_that_cannot_be_flushed_hides_neither_the_others_nor_the_error_of_training(caplog):
    """As at a full disk."""

    class Sink(hl.sinks.MemorySink):
        flushed = 0

        def flush(self):
            Sink.flushed += 1
            raise OSError("disk full")

    def loss(policy, batch):
        raise ZeroDivisionError

    tool = hl.metta.TrainTool(nn.Linear(1, 1), [torch.ones(1, 1)], loss, sinks=[Sink(), Sink()])
    with pytest.raises(ZeroDivisionError):
        tool.invoke()
    assert Sink.flushed == caplog.text.count("Sink could not be flushed") == 2
