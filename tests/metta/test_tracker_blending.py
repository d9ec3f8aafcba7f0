"""Trackers that keep a running mean: Fisher information, gradient flow."""

from __future__ import annotations

import pytest
import torch

import hookline as hl


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
