"""clip_gradients and freeze: what they bound, in every precision, and that they can be seen."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hookline as hl


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def run_backward(model: nn.Module) -> None:
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1.0, 1e-3])
def test_a_norm_is_bounded_in_every_precision(dtype: torch.dtype, bound: float) -> None:
    """Gradients whose norm does not fit into their own precision come out scaled, not zeroed or unbounded."""
    layer = nn.Linear(8, 8, bias=False).to(dtype)
    with hl.clip_gradients(layer, norm=bound):
        layer.weight.backward(torch.full((8, 8), 3e4, dtype=dtype))
    norm = layer.weight.grad.double().norm().item()
    assert norm == pytest.approx(bound, rel=2 * torch.finfo(dtype).eps + 1e-6)


@pytest.mark.parametrize("limit", [{"value": 0.5}, {"norm": 0.5}])
def test_sparse_gradients_are_bounded_and_stay_sparse(limit: dict[str, float]) -> None:
    """An embedding with sparse gradients takes both bounds."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    with hl.clip_gradients(model, "0", **limit):
        (model(torch.tensor([1, 1, 2])) * 100).sum().backward()
    grad = model[0].weight.grad
    assert grad.is_sparse
    assert grad.to_dense().abs().max() <= 0.5
    assert grad.to_dense().abs().max() > 0


# -- all or nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", [hl.freeze, lambda *args: hl.clip_gradients(*args, norm=1.0)])
def test_a_lazy_layer_is_refused_and_nothing_else_is_touched(switch) -> None:
    """The error names the parameters and what to do; gradients that were there are still there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls lazy modules experimental
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    model[0].weight.grad = torch.ones(2, 2)
    with pytest.raises(hl.errors.UnhookableError, match=r"'1.weight', '1.bias': lazy.*after the first forward"):
        switch(model, "*")
    assert model[0].weight.grad is not None
    hl.assert_no_hooks(model)
    hl.assert_no_hooks(model[0], foreign=True)


def test_freezing_drops_the_gradients_that_are_there() -> None:
    """So that a step right after it moves nothing."""
    model = make_model()
    run_backward(model)
    with hl.freeze(model, "0"):
        assert model[0].weight.grad is None
        assert model[2].weight.grad is not None
