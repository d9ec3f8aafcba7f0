"""clip_gradients and freeze: what they bound, in every precision, and that they can be seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


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


def test_hooks_on_parameters_are_seen() -> None:
    """find names them and assert_no_hooks minds them, until they are removed; foreign ones are foreign."""
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.freeze(model, "0"):
        assert "freeze (parameters)" in repr(hl.find(model))
        with pytest.raises(hl.HooksLeftError, match="freeze"):
            hl.assert_no_hooks(model)
    hl.assert_no_hooks(model, foreign=True)
    model[0].weight.register_post_accumulate_grad_hook(print)
    hl.assert_no_hooks(model)
    with pytest.raises(hl.HooksLeftError, match="print"):
        hl.assert_no_hooks(model, foreign=True)


@pytest.mark.parametrize("bound", [0, -1.0, float("nan"), "a"])
def test_a_bound_that_is_none_is_refused(bound: object) -> None:
    """Before anything is attached."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="above 0"):
        hl.clip_gradients(model, value=bound)
    hl.assert_no_hooks(model, foreign=True)
