"""A digest sees every bit of a tensor of any layout, and of all that a run goes on from."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from hookline.guard.digest import changed, dense, digest, run_digest

X = torch.tensor([[1.0, 0.0], [-2.0, 3.0]])


def _nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return torch.nested.nested_tensor([x[0], x[1, :1]])


@pytest.mark.parametrize(
    "laid",
    [lambda x: x, Tensor.t, Tensor.to_sparse, Tensor.bfloat16, _nested, lambda x: torch.complex(x, x).conj()],
    ids=["plain", "transposed", "sparse", "bfloat16", "nested", "conjugated"],
)
def test_one_number_changes_the_digest_of_any_layout(laid):
    """And a copy does not; the dtype and the sign of zero count."""
    other = X.clone()
    other[0, 0] = 1.5
    assert digest(laid(X)) == digest(laid(X.clone())) != digest(laid(other))
    assert digest(laid(X)) != digest(laid(X.double())) or laid is Tensor.bfloat16
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))


def test_dense_has_the_numbers_of_a_tensor_or_says_that_there_are_none():
    """Zeros of a sparse one; nothing of meta tensors and of parameters that are not made yet."""
    sparse, nested = dense(X.to_sparse()), dense(_nested(X))
    assert sparse is not None
    assert nested is not None
    assert torch.equal(sparse, X)
    assert nested.tolist() == [1.0, 0.0, -2.0]
    assert dense(torch.ones(2, device="meta")) is None
    assert dense(nn.LazyLinear(2).weight) is None


def test_a_run_is_told_apart_by_each_thing_that_its_next_step_depends_on():
    """Causes stand before effects."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    before = run_digest([model], [optimizer])
    assert changed(before, run_digest([model], [optimizer])) == []
    torch.rand(1)
    model.eval()
    model[1].running_mean += 1  # type: ignore[operator]
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.state[model[0].weight]["exp_avg"][0, 0] += 1e-6
    assert changed(before, run_digest([model], [optimizer])) == [
        "random stream of torch", "mode of the model", "mode of 0", "mode of 1", "buffer 1.running_mean",
        "AdamW's lr of group 0", "AdamW's exp_avg of 0.weight",
    ]  # fmt: skip
