"""Trackers that keep a running mean: Fisher information, gradient flow."""

from __future__ import annotations

import math
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch

import hookline as hl
from hookline.metta import trackers
from hookline.observe.host_values import fetch

MEANS = pytest.mark.parametrize(
    "make", [hl.metta.FisherInformationState, hl.metta.GradientFlowState], ids=["fisher", "flow"]
)


def test_fisher_is_a_running_mean_of_squares():
    """g = (1, 2) twice at 0.95: 0.0975 g²."""
    state = hl.metta.FisherInformationState(0.95)
    for _ in range(2):
        state.update("c", "c.weight", torch.tensor([1.0, 2.0]))
    metrics = state.to_metrics()
    assert metrics == pytest.approx(
        {
            "fisher_info/c/c.weight/mean": 0.24375,
            "fisher_info/c/c.weight/trace": 0.4875,
            "fisher_info/c/c.weight/max": 0.39,
            "fisher_info/c/c.weight/dead": 0.0,
        },
        rel=1e-6,
    )


def test_fisher_without_a_name_is_the_weight():
    """update(component, gradient) and update(component, "component.weight", gradient) are one."""
    named, plain = hl.metta.FisherInformationState(), hl.metta.FisherInformationState()
    named.update("c", "c.weight", torch.ones(2))
    plain.update("c", torch.ones(2))
    assert named.to_metrics() == plain.to_metrics() != {}


def test_dead_parameters_are_counted_only_where_there_are_some():
    """One of two parameters without gradient: dead 1, half of the component; another component has no such keys."""
    state = hl.metta.FisherInformationState()
    state.update("c", "c.weight", torch.zeros(3))
    state.update("c", "c.bias", torch.ones(3))
    state.update("d", "d.weight", torch.ones(3))
    metrics = state.to_metrics()
    assert metrics["fisher_info/c/c.weight/dead"] == 1.0
    assert metrics["fisher_info/c/c.bias/dead"] == 0.0
    assert metrics["fisher_info/c/dead_fraction"] == 0.5
    assert metrics["fisher_info/c/dead_count"] == 1.0
    assert not [key for key in metrics if key.startswith("fisher_info/d/dead")]


@MEANS
def test_a_mean_goes_on_after_reset_with_the_components_options(make):
    """Reset empties, the component stays known, and its beta of 0.5 is used in the next epoch."""
    state = make()
    state.register_component("c", beta=0.5)
    for _ in range(2):
        state.update("c", torch.ones(2, 5))
        assert next(value for key, value in state.to_metrics().items() if key.endswith("/mean")) == 0.5
        state.reset()
        assert state.to_metrics() == {}
        assert state.has_component("c")


def test_a_parameter_of_another_shape_starts_anew():
    """The tracker outlives a policy; the next one's layer may be wider."""
    state = hl.metta.FisherInformationState(0.5)
    state.update("c", torch.ones(2))
    state.update("c", torch.ones(3))
    assert state.to_metrics()["fisher_info/c/c.weight/trace"] == 1.5


@pytest.mark.parametrize(
    "gradient", [None, torch.zeros(0), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex64)]
)
def test_fisher_passes_over_what_has_no_squares(gradient):
    """No gradient, an empty one, a sparse one, a complex one."""
    state = hl.metta.FisherInformationState()
    state.update("c", "c.weight", gradient)
    assert state.to_metrics() == {}


@MEANS
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_running_means_are_kept_in_float32_or_better(make, dtype, kept):
    """Adding 5% of one in bfloat16 a hundred times would stop well below one."""
    state = make()
    for _ in range(200):
        state.update("c", torch.ones(1, 1, dtype=dtype))
    [(_, value), *_] = ((key, value) for key, value in state.to_metrics().items() if key.endswith("/mean"))
    assert value == pytest.approx(1 - 0.95**200, rel=1e-5)
    tensors = state._kept["c"].values() if make is hl.metta.FisherInformationState else state._kept.values()
    assert {tensor.dtype for tensor in tensors} == {kept}


@MEANS
def test_a_running_mean_that_begins_in_inference_mode_goes_on_outside(make):
    """Half of one, then half of that and half of one more."""
    state = make(beta=0.5)
    with torch.inference_mode():
        state.update("c", torch.ones(1, 1))
    state.update("c", torch.ones(1, 1))
    assert 0.75 in state.to_metrics().values()


def test_flow_of_ready_sizes():
    """(1, 0, 2): mean .05, unit_0 .05, unit_2 .1, no unit_1, a third blocked."""
    state = hl.metta.GradientFlowState()
    state.update("c", torch.tensor([1.0, 0.0, 2.0]))
    assert state.to_metrics() == pytest.approx(
        {
            "gradient_flow/c/mean": 0.05,
            "gradient_flow/c/unit_0": 0.05,
            "gradient_flow/c/unit_2": 0.1,
            "gradient_flow/c/blocked_fraction": 1 / 3,
            "gradient_flow/c/active_fraction": 2 / 3,
        }
    )


@pytest.mark.parametrize(
    ("shape", "unit_dim"),
    [((5, 3), None), ((5, 7, 3), None), ((5, 3, 4, 2), None), ((5, 3, 7), 1), ((3, 5), 0), ((1, 3), None)],
)
def test_the_size_of_a_gradient_by_unit(shape, unit_dim):
    """The mean over all but batch and units, then the root of the mean square over the batch."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = hl.metta.GradientFlowState(beta=0, unit_dim=unit_dim)
    state.update("c", gradient)
    axis = unit_dim if unit_dim is not None else (1 if len(shape) > 3 else len(shape) - 1)
    rows = gradient.movedim(axis, -1)  # (B, …, units)
    rows = rows.reshape(rows.shape[0], -1, 3).mean(1)
    metrics = state.to_metrics()
    expected = rows.square().mean(0).sqrt().tolist()
    assert [metrics[f"gradient_flow/c/unit_{unit}"] for unit in range(3)] == pytest.approx(expected, rel=1e-12)
    assert "gradient_flow/c/unit_3" not in metrics


def test_a_changed_length_of_sequences_changes_no_unit():
    """(B, 7, 3) and then (B, 5, 3): three units throughout (in Metta seven, then an exception)."""
    state = hl.metta.GradientFlowState(beta=0.5)
    state.update("c", torch.ones(2, 7, 3))
    state.update("c", torch.ones(2, 5, 3))
    metrics = state.to_metrics()
    assert [metrics[f"gradient_flow/c/unit_{unit}"] for unit in range(3)] == [0.75] * 3
    assert metrics["gradient_flow/c/mean"] == 0.75


def test_flow_grows_with_a_wider_gradient_and_leaves_units_alone_that_a_narrower_one_lacks():
    """One unit, then two, then one."""
    state = hl.metta.GradientFlowState(beta=0.5)
    for width in (1, 2, 1):
        state.update("c", torch.ones(width))
    metrics = state.to_metrics()
    assert metrics["gradient_flow/c/unit_0"] == 0.875
    assert metrics["gradient_flow/c/unit_1"] == 0.5


@pytest.mark.parametrize("gradient", [torch.tensor(1.0), torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(0), None])
def test_flow_passes_over_what_has_no_units_or_no_samples(gradient):
    """A single number, no rows, no width, nothing: the running mean stays."""
    state = hl.metta.GradientFlowState()
    state.update("c", torch.ones(2))
    before = state.to_metrics()
    state.update("c", gradient)
    assert state.to_metrics() == before


def test_a_nan_is_shown():
    """A unit whose gradient is not a number is neither blocked nor left out."""
    state = hl.metta.GradientFlowState()
    state.update("c", torch.tensor([math.nan, 0.0]))
    metrics = state.to_metrics()
    assert math.isnan(metrics["gradient_flow/c/unit_0"])
    assert metrics["gradient_flow/c/blocked_fraction"] == 0.5


def test_metrics_are_those_of_one_moment(monkeypatch):
    """Another thread resets while they are put together: dead_fraction is of the parameters that were fetched."""
    state = hl.metta.FisherInformationState()
    for name in ("c.weight", "c.bias"):
        state.update("c", name, torch.zeros(2) if name == "c.bias" else torch.ones(2))

    class Meanwhile(list):
        def __iter__(self):
            thread = threading.Thread(target=state.reset)
            thread.start()
            thread.join()
            return super().__iter__()

    monkeypatch.setattr(trackers, "fetch", lambda tensors: Meanwhile(fetch(tensors)))
    assert state.to_metrics()["fisher_info/c/dead_fraction"] == 0.5
    assert state.to_metrics() == {}


@MEANS
@pytest.mark.parametrize("beta", [np.float64(0.5), np.float32(0.5), np.int64(0), Fraction(1, 2)])
def test_a_number_of_any_make_is_a_beta(make, beta):
    """NumPy's and fractions: kept as a plain float, for the tracker and for a component."""
    state = make(beta)
    assert type(state.beta) is float
    state.register_component("c", beta=beta)
    state.register_component("c", beta=float(beta))
    state.update("c", torch.ones(1))
    assert next(iter(state.to_metrics().values())) == 1 - beta


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1, 1.0, -0.1, float("nan"), "0.9", True])
@pytest.mark.parametrize(
    "make",
    [
        hl.metta.FisherInformationState,
        hl.metta.GradientFlowState,
        hl.metta.attach_fisher_information_hooks,
        hl.metta.attach_gradient_flow_hooks,
    ],
)
def test_a_beta_outside_of_0_to_1_is_refused(make, beta):
    """The message has the value; nought is allowed, one is not."""
    with pytest.raises(hl.errors.OptionError, match="beta= must be at least 0 and less than 1, got " + repr(beta)):
        make(beta=beta)
