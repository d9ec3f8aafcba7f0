"""What several analyses need of one firing, worked out once: parameters by name, flat gradients, singular values.

Takes a `RunDataContext` from the hooks of this folder, hands them tensors that all of them may read and none may
change. What was found lives as long as the context does, which is one firing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hookline.analyses._spectrum import singular_values
from hookline.sites.wrappers import clean_modules

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.lifecycle.run_context import RunDataContext

__all__ = ["Work", "cosine", "figure", "flatten", "is_bias", "norm_of_all", "on_host", "wide", "work_of"]

SMALL = 1e-8
"""Added to the product of two lengths before dividing by it, so that a zero vector has cosine 0 with everything."""


_CHUNK = 1 << 20
"""Components that are made float64 at a time, 8 MiB of them."""


def is_bias(name: str) -> bool:
    """Whether a parameter is left out of flat gradients."""
    return "bias" in name


def work_of(ctx: RunDataContext) -> Work:
    """The shared work of this firing."""
    found = _WORK.get(ctx)
    if found is None:
        found = _WORK[ctx] = Work(ctx.model, ctx.accumulated_grads)
    return found


class Work:
    """What was asked for so far; nothing is worked out before that."""

    # The context is not kept: it is the key that this lives by.
    def __init__(self, model: nn.Module | None, mean_gradients: Mapping[str, Tensor] | None) -> None:
        self._model = model
        self._mean_gradients = mean_gradients
        self._singular_values: dict[str, NDArray[Any]] = {}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by names without wrappers, tied ones once; none without a model."""
        named: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for prefix, module in () if self._model is None else clean_modules(self._model):
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen and not _is_unknown(parameter):
                    seen.add(id(parameter))
                    named[f"{prefix}.{key}" if prefix else key] = parameter
        return named

    @cached_property
    def flat_parameters(self) -> Tensor | None:
        """All parameters, biases included, in one vector; None if there are none."""
        return flatten(self.parameters.values())

    @cached_property
    def mean_gradients(self) -> dict[str, Tensor]:
        """Mean gradients since the last report, sorted by name, without those of biases."""
        grads = self._mean_gradients or {}
        return {name: wide(grads[name]) for name in sorted(grads) if not is_bias(name)}

    @cached_property
    def flat_mean_gradient(self) -> Tensor | None:
        """They in one vector; None if there are none."""
        return flatten(self.mean_gradients.values())

    @cached_property
    def step_gradients(self) -> list[Tensor]:
        """The gradients that lie in ``.grad`` now, those of biases included."""
        found = (parameter.grad for parameter in self.parameters.values())
        return [wide(grad) for grad in found if grad is not None]

    @cached_property
    def flat_step_gradient(self) -> Tensor | None:
        """The gradients that lie in ``.grad`` now, sorted by name, without those of biases, in one vector.

        Zeros stand for a parameter that was not used in this step, so that the vectors of all steps fit together.
        """
        there = {name: p for name, p in sorted(self.parameters.items()) if p.requires_grad and not is_bias(name)}
        if all(parameter.grad is None for parameter in there.values()):
            return None
        return flatten(p.detach().new_zeros(()).expand(p.shape) if p.grad is None else p.grad for p in there.values())

    def singular_values(self, key: str, make: Callable[[], Tensor]) -> NDArray[Any]:
        """Those of a matrix, largest first; ``key`` says which matrix it is, so that nobody works them out again."""
        if key not in self._singular_values:
            self._singular_values[key] = singular_values(make())
        return self._singular_values[key]


_WORK: WeakKeyDictionary[RunDataContext, Work] = WeakKeyDictionary()


def _is_unknown(parameter: nn.Parameter) -> bool:
    """Whether it has no values yet: a lazy one before the first forward, or one on the device ``meta``."""
    return parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter)


def wide(tensor: Tensor) -> Tensor:
    """The same values, dense, real and in no less than float32."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def flatten(tensors: Iterable[Tensor]) -> Tensor | None:
    """One vector with memory of its own; None of nothing."""
    parts = [wide(tensor).reshape(-1) for tensor in tensors]
    device = parts[0].device if parts else None
    # A model may be spread over devices; what is compared is brought together on the first.
    return torch.cat([part if part.device == device else part.to(device) for part in parts]) if parts else None


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """Of the angle between two vectors, on their device; 0 if one of them is zero.

    In float64: of an angle of a tenth of a degree, the cosine is 1 − 2e-6, of which float32 keeps one digit.
    """
    wider = torch.float32 if one.device.type == "mps" else torch.float64
    sums = one.new_zeros(3, dtype=wider)
    for start in range(0, one.numel(), _CHUNK):
        a, b = one[start : start + _CHUNK].to(wider), other[start : start + _CHUNK].to(wider)
        sums += torch.stack((a @ b, a @ a, b @ b))
    return sums[0] / (sums[1].sqrt() * sums[2].sqrt() + SMALL)


def norm_of_all(tensors: Iterable[Tensor]) -> Tensor | None:
    """The length of all of them together, on the device of the first; None of nothing."""
    norms = [torch.linalg.vector_norm(wide(tensor)) for tensor in tensors]
    if not norms:
        return None
    together: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return together


def on_host(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """As floats: one transfer, unless they are spread over devices."""
    if len({number.device for number in numbers.values()}) == 1:
        return dict(zip(numbers, torch.stack([*numbers.values()]).tolist(), strict=True))
    return {name: float(number) for name, number in numbers.items()}


def figure(ctx: RunDataContext, name: str) -> Any:
    """The loss or an accuracy as it was given: a tensor stays on its device, so that no step waits for it."""
    raw = ctx.raw(name)
    return raw.detach().reshape(()) if isinstance(raw, Tensor) and raw.numel() == 1 else getattr(ctx, name)
