"""Hooks under the transforms of ``torch.func``: results keep their bits, and hooks fire or are known to be silent."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.utils._pytree import tree_leaves

import hookline as hl

# Forward-mode derivatives load code of torch's own that is deprecated, and linearize warns of its own graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

MODEL = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
OPERATORS = ["aten.mul*", "aten.add*", "aten.div*", "aten.sub*", "aten.sin*", "aten.sum*", "aten._to_copy*"]
TARGETS: dict[str, Any] = {
    "operators": OPERATORS,
    "functional": F.softplus,
    "torch": torch.sin,
    "method": torch.Tensor.mul,
}
SILENT = {"vmap", "jvp", "grad_vmap", "jacfwd"}
"""Those under which gradient hooks of functions see nothing: there is no backward pass, or vmap is around the call."""


class Square(torch.autograd.Function):
    """Made for transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * tangents[0]


def scalar(p: Tensor) -> Tensor:
    """Numbers of every sort beside tensors, an autograd.Function, functions and methods."""
    y = Square.apply(p * 2 + 1) - 0.5
    y = F.softplus(torch.sin(y)).mul(1 / 3) / 3
    return (y.matmul(torch.eye(3)) * p).sum() * True


def vector(p: Tensor) -> Tensor:
    """The same with as many outputs as inputs."""
    return F.softplus(torch.sin(p * 2)).mul(3) - 1


def transforms() -> dict[str, Callable[[], Any]]:
    """Every transform, on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    one, many = torch.randn(3, generator=generator), torch.randn(4, 3, generator=generator)
    weights = {name: parameter.detach() for name, parameter in MODEL.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return vector(func.functional_call(MODEL, weights, (x,))).sum()

    return {
        "grad": lambda: func.grad(scalar)(one),
        "vmap": lambda: func.vmap(scalar)(many),
        "vmap_grad": lambda: func.vmap(func.grad(scalar))(many),
        "grad_vmap": lambda: func.grad(lambda p: func.vmap(scalar)(p).sum())(many),
        "jvp": lambda: func.jvp(scalar, (one,), (torch.ones(3),)),
        "vjp": lambda: func.vjp(scalar, one)[1](torch.ones(())),
        "jacrev": lambda: func.jacrev(vector)(one),
        "jacfwd": lambda: func.jacfwd(vector)(one),
        "hessian": lambda: func.hessian(scalar)(one),
        "linearize": lambda: func.linearize(vector, one)[1](torch.ones(3)),
        "functional_call": lambda: func.grad(loss)(weights, many),
        "per_sample": lambda: func.vmap(func.grad(loss), (None, 0))(weights, many),
    }


TRANSFORMS = tuple(transforms())
EDITS: dict[str, Callable[..., Any]] = {
    "forward_pre": lambda fn, inputs: inputs,
    "forward": lambda fn, inputs, outputs: outputs,
    "backward_pre": lambda fn, grads: grads,
    "backward": lambda fn, grads, grad_outputs: grads,
}


def same(found: Any, expected: Any) -> bool:
    """Whether results have the same types and bits."""
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


# Every transform with every kind and with every target, two at a time.
CASES = {
    (name, list(EDITS)[(index + shift) % 4], list(TARGETS)[(index // 2 + shift) % 4])
    for index, name in enumerate(TRANSFORMS)
    for shift in range(4)
} | set(itertools.product(("grad", "vmap_grad", "hessian"), EDITS, ("operators",)))


@pytest.mark.parametrize(("name", "kind", "target"), sorted(CASES))
def test_results_under_a_transform_keep_their_bits_with_hooks_on(name: str, kind: str, target: str) -> None:
    """Watching, and handing back what was shown; forward hooks fire under all, gradient hooks where it is said."""
    run = transforms()[name]
    expected = run()
    with hl.attach_function(TARGETS[target], lambda *args: None, on=kind) as watch:
        assert same(run(), expected)
    with hl.attach_function(TARGETS[target], EDITS[kind], on=kind):
        assert same(run(), expected)
    if kind.startswith("forward"):
        assert watch.report().fired
    elif name in SILENT and target != "operators":
        assert not watch.report().fired


@pytest.mark.parametrize("name", ["grad", "vmap_grad"])
def test_hooks_on_every_operator_leave_a_transform_alone(name: str) -> None:
    """All of aten at once, as a profiler would; what the hooks see are the operators of the run."""
    run = transforms()[name]
    expected = run()
    seen = set()
    with hl.attach_function("aten.*", lambda fn, inputs, outputs: seen.add(fn.name)):
        assert same(run(), expected)
    assert {"aten.mul.Tensor", "aten.sin.default"} <= seen


@pytest.mark.parametrize("number", [True, 2, 2.5, 1 + 2j])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_number_beside_a_tensor_decides_as_little_as_without_hooks(
    number: complex, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Types and values of sums and products with numbers under vmap, for every sort of number and tensor."""
    x = torch.ones(2, *shape).to(dtype)
    run = func.vmap(lambda x: (x * number, number + x))
    expected = run(x)
    with hl.attach_function(["aten.mul.Tensor", "aten.add.Tensor"], lambda *args: None) as handle:
        assert same(run(x), expected)
    assert handle.report().fired == 2


def test_an_edit_of_an_operator_counts_under_a_transform() -> None:
    """The derivative is that of the edited function; the negative control of the tests above."""
    with hl.attach_function("aten.sin.default", lambda fn, inputs, outputs: (outputs[0] * 5,)):
        assert func.grad(lambda p: torch.sin(p).sum())(torch.zeros(3)).tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("name", "kind"),
    [("functional_call", "forward_pre"), ("per_sample", "forward"), ("functional_call", "backward")],
)
def test_hooks_on_modules_leave_a_transform_alone(name: str, kind: str) -> None:
    """Modules under a transform with hooks on: results keep their bits, and a capture says why it is empty."""
    run = transforms()[name]
    expected = run()
    with hl.attach(MODEL, "*", lambda *args: None, on=kind) as handle:
        assert same(run(), expected)
        if kind.startswith("forward"):
            assert handle.report().fired == 4
        handle.remove(quiet=True)
    with hl.capture(MODEL, "1") as cache:
        assert same(run(), expected)
    with pytest.raises(hl.errors.CaptureError, match="inside of a transform"):
        cache["1"].output
