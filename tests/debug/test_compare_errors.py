"""The error measures are right, whatever the dtype, and what is not finite is told apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hookline.debug.compare.judge import parse_thresholds
from hookline.debug.compare.key import Fingerprint
from hookline.debug.compare.measure import sketch_errors, tensor_errors
from hookline.errors import OptionError


def _pair(dtype: torch.dtype, count: int = 150_001) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    a = torch.randn(count, generator=source, dtype=torch.float64)
    return a.to(dtype), (a + 1e-2 * torch.randn(count, generator=source, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_measures_are_those_of_float64_over_several_blocks(dtype: torch.dtype) -> None:
    """Each is computed here by its definition, with the sum of products that the block-wise one avoids."""
    a, b = _pair(dtype)
    x, y = a.double(), b.double()
    found = tensor_errors(a, b)
    assert found.max_abs == pytest.approx((x - y).abs().max().item(), rel=1e-6)
    assert found.mean_abs == pytest.approx((x - y).abs().mean().item(), rel=1e-5)
    assert found.rel_l2 == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-5)
    assert found.rel_diff == pytest.approx((1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item(), rel=1e-4, abs=1e-12)
    assert found.rms_a == pytest.approx(x.square().mean().sqrt().item(), rel=1e-5)
    assert not found.is_equal
    assert tensor_errors(a, a.clone()).is_equal


def test_what_is_not_finite_in_one_alone_is_an_error_and_in_both_is_none() -> None:
    """NaN beside NaN is equal; NaN beside a number, or the other infinity, is not."""
    nan, inf = math.nan, math.inf
    both = tensor_errors(torch.tensor([nan, inf, 1.0, 2.0]), torch.tensor([nan, inf, 1.0, 2.5]))
    assert (both.mismatched, both.bad_a, both.bad_b, both.max_abs) == (0, 2, 2, 0.5)
    one = tensor_errors(torch.tensor([1.0, inf, 1.0]), torch.tensor([nan, -inf, 1.0]))
    assert (one.mismatched, one.bad_a, one.bad_b, one.rel_l2) == (2, 1, 2, inf)
    same = tensor_errors(torch.tensor([nan, 3.0]), torch.tensor([nan, 3.0]))
    assert same.is_equal
    assert same.norm_a == 3


def test_an_estimate_from_sketches_is_near_the_error_and_says_so() -> None:
    """Signs in groups, as traces have them; within a factor of 2 for this seed, and no more is promised."""
    a, b = _pair(torch.float64, 4096)
    signs = torch.randint(0, 2, (4096,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1

    def of(x: Tensor) -> Fingerprint:
        sketch = (x * signs).view(-1, 16).sum(0)
        return Fingerprint(4096, x.mean().item(), x.norm().item(), x.abs().max().item(), 0, 0, hash(x.sum().item()),
                           tuple(sketch.tolist()))  # fmt: skip

    exact = tensor_errors(a, b)
    found = sketch_errors(of(a), of(b), same_dtype=True)
    assert found.is_estimate
    assert exact.rel_l2 / 2 < found.rel_l2 < 2 * exact.rel_l2
    assert sketch_errors(of(a), of(a), same_dtype=True).is_equal
    without = sketch_errors(replace(of(a), sketch=()), replace(of(b), sketch=()), same_dtype=True)
    assert without.rel_l2 <= exact.rel_l2  # the norms alone: no more than a lower bound
    assert without.is_blind


@pytest.mark.parametrize("text", ["no sign", "=1", "a=", "a=rel:x", "a=rel:1,b"])
def test_a_threshold_that_says_nothing_is_refused(text: str) -> None:
    """With what to write instead."""
    with pytest.raises(OptionError, match="--threshold"):
        parse_thresholds([text])
