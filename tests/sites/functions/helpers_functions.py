"""What the tests of function hooks share: functions of every level, a model around a function, hooks that note."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl

__all__ = [
    "KINDS",
    "LEVELS",
    "Around",
    "Pair",
    "Scale",
    "fresh",
    "kinds_of",
    "label",
    "matrices",
    "modes",
    "nothing",
    "noting",
    "patched_classes",
    "sin_product",
    "tensors_of",
]

KINDS = ("forward_pre", "forward", "backward_pre", "backward")


class Pair(torch.autograd.Function):
    """Two inputs, two outputs: product and sum."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return product * b + total, product * a + total


class Scale(torch.autograd.Function):
    """One tensor and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.by, None


@torch.library.custom_op("hookline_test::sin_product", mutates_args=())
def sin_product(a: Tensor, b: Tensor) -> Tensor:
    """An operator of one's own: a · sin b."""
    return a * torch.sin(b)


@sin_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return grad * torch.sin(b), grad * a * torch.cos(b)


sin_product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Around(nn.Module):
    """A model whose forward is one function, so that ``within=`` can be tried on it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


LEVELS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Any], str]] = {
    "function": (torch.mul, torch.mul, "torch.mul"),
    "operator": (torch.ops.aten.atan2.default, torch.atan2, "aten.atan2.default"),
    "custom operator": (sin_product, lambda a, b: sin_product(a, b), "hookline_test.sin_product.default"),
    "class": (Pair, lambda a, b: Pair.apply(a, b)[0], f"{__name__}.Pair"),
}
"""At each level a function of two matrices: the target, a call of it, and its name. No backward pass calls any."""


def kinds_of(level: str) -> tuple[str, ...]:
    """The kinds of hook that go with a level: operators are below autograd."""
    return KINDS[:2] if "operator" in level else KINDS


def fresh(*shape: int, seed: int = 0, requires_grad: bool = True) -> Tensor:
    """A leaf, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(requires_grad)


def matrices() -> tuple[Tensor, Tensor]:
    """Two leaves for the functions of `LEVELS`."""
    return fresh(3, 3, seed=1), fresh(3, 3, seed=2)


def nothing(fn: Any, *tensors: Any) -> None:
    """Watches, and notes nothing."""


def noting(events: list[Any], label: Any) -> Callable[..., None]:
    """A hook for any kind, which notes a label and returns nothing."""

    def hook(fn: hl.sites.FunctionSite, *tensors: Any) -> None:
        events.append(label)

    return hook


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output that have a gradient."""
    found = [output] if isinstance(output, Tensor) else [item for item in output if isinstance(item, Tensor)]
    return [tensor for tensor in found if tensor.requires_grad]


def label(value: Any) -> str:
    """A name for a parameter of a test, the same in every process."""
    text = " ".join(sorted(value)) if isinstance(value, set) else str(value)
    return re.sub(r"( of type object)? at 0x[0-9a-f]+", "", text)


def modes() -> list[Any]:
    """The function modes and dispatch modes of this thread, the lowest first."""
    functions = [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]
    return functions + [torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack())]


def patched_classes() -> list[type]:
    """The subclasses of autograd.Function in this file that have another ``apply`` or other bases than written."""
    return [cls for cls in (Pair, Scale) if "apply" in vars(cls) or cls.__bases__ != (torch.autograd.Function,)]
