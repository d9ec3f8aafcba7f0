"""Operators between a tensor and a number: a hooked kernel gives the same bits and the same types as torch's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hookline as hl

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
NUMBERS = [0.1, 2.5, -3.3e5, 3, -2, 2**40, True, 1j, float("inf"), float("nan"), 1e-40]
OPERATIONS: dict[str, Callable[[Tensor, complex], Tensor]] = {
    "x + n": lambda x, n: x + n,
    "n + x": lambda x, n: n + x,
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,
    "x * n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "n / x": lambda x, n: n / x,
    "x // n": lambda x, n: x // n,
    "x % n": lambda x, n: x % n,
    "x ** n": lambda x, n: x**n,
    "x < n": lambda x, n: x < n,
    "x == n": lambda x, n: x == n,
    "x & n": lambda x, n: x & n,
    "x += n": lambda x, n: x.clone().add_(n),
    "x *= n": lambda x, n: x.clone().mul_(n),
    "x /= n": lambda x, n: x.clone().div_(n),
    "add(x, n, alpha=2)": lambda x, n: torch.add(x, n, alpha=2),
    "where(x > 0, x, n)": lambda x, n: torch.where(x > 0, x, n),
    "copysign(x, n)": torch.copysign,
    "xlogy(x, n)": torch.xlogy,
}


def outcome(operation: Callable[[Tensor, complex], Tensor], x: Tensor, number: complex) -> tuple[object, ...]:
    """Type, shape and bits of the result and of the gradient, or the kind of error."""
    facts: tuple[object, ...] = ()
    try:
        y = operation(x, number)
        facts = (y.dtype, y.shape, y.untyped_storage().tolist())
        if x.dtype.is_floating_point and y.dtype.is_floating_point:
            leaf = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(operation(leaf, number).sum(), leaf)
            facts += (grad.dtype, grad.untyped_storage().tolist())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        facts += (type(error),)
    return facts


def outcomes() -> dict[tuple[object, ...], tuple[object, ...]]:
    found = {}
    for (name, operation), dtype, number, shape in itertools.product(
        OPERATIONS.items(), DTYPES, NUMBERS, [(), (5,), (3, 1)]
    ):
        values = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 4 - 1
        x = (values.abs() * 10).to(dtype) if dtype is torch.uint8 else values.to(dtype)
        found[name, dtype, repr(number), shape] = outcome(operation, x, number)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about casts of complex numbers
@pytest.mark.parametrize(
    "target", [pytest.param("aten.*", marks=pytest.mark.full), ["aten.add", "aten.mul", "aten.div", "aten.sub"]]
)
def test_a_number_beside_a_tensor_counts_as_torch_counts_it(target: str | list[str]) -> None:
    """Bits and types of every sort of number beside every sort of tensor, hooked and not; an error stays one."""
    plain = outcomes()
    with hl.attach_function(target, lambda fn, inputs, outputs: None, observe=True) as handle:
        hooked = outcomes()
    assert handle.report().fired > len(plain)
    assert {key: value for key, value in plain.items() if hooked[key] != value} == {}


def test_a_number_in_half_precision_without_dimensions_is_not_rounded_first() -> None:
    """The case in which a tensor in place of the number would show: negative control for the test above."""
    x = torch.tensor(1.5, dtype=torch.bfloat16)
    with hl.attach_function("aten.div", lambda fn, inputs, outputs: None, observe=True):
        hooked = 0.1 / x
    assert torch.equal(hooked, 0.1 / x)
    assert not torch.equal(hooked, torch.tensor(0.1, dtype=torch.float64) / x)


def test_inference_mode_takes_numbers_too() -> None:
    """Where the call comes by the backend alone."""
    seen = []
    with torch.inference_mode():
        x = torch.arange(3)
        with hl.attach_function("aten.mul.Tensor", lambda fn, inputs, outputs: seen.append(fn.args[1])):
            assert (x * 2.5).dtype is torch.get_default_dtype()
    assert seen == [2.5]
