"""Trackers that keep a running mean: Fisher information, gradient flow."""

from __future__ import annotations

import pytest
import torch

import hookline as hl


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
