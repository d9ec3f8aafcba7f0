"""Compute what several analyses need of one firing, once: parameters by name, flat gradients, singular values.

The analyses call ``values_of(ctx)``; all may read the tensors and none may change them. A result lives as long as its
`RunDataContext`, which is one firing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final
from weakref import WeakKeyDictionary

from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.analyses._vectors import (
    dense_float,
    flat_vector_or_none,
    is_bias,
    norm_of_all,
    singular_values_of,
    whole_tensor,
)
from hookline.lifecycle.context import RunDataContext
from hookline.sites.wrappers import clean_modules

__all__ = ["FiringValues", "parameters_of", "raw_number", "values_of"]

_SMALL: Final = 1 << 20
"""Parameters up to which a length is that of the flat copy, which others need too: for nine tensors a third of the time
that one by one takes. A larger model is not copied for it."""


def values_of(ctx: RunDataContext) -> FiringValues:
    """Return the shared values of the firing ``ctx``."""
    found = _VALUES.get(ctx)
    if found is None:
        found = _VALUES[ctx] = FiringValues(ctx.model, ctx.accumulated_grads)
    return found


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters of ``model`` by names without wrappers, tied ones once."""
    return FiringValues(model).parameters


def raw_number(ctx: RunDataContext, name: str) -> Any:
    """Return the loss or an accuracy as it was given: a tensor stays on its device, so that no step waits for it."""
    raw = ctx.raw(name)
    return raw.detach().reshape(()) if isinstance(raw, Tensor) and raw.numel() == 1 else getattr(ctx, name)


class FiringValues:
    """Compute values of one firing when they are first asked for, and keep them."""

    # The context is not kept: it is the weak key of this object.
    def __init__(self, model: nn.Module | None, mean_gradients: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        self._mean_gradients = mean_gradients or {}
        self._singular_values: dict[str, NDArray[Any]] = {}

    @cached_property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return all modules by names without wrappers, shared ones once; none without a model."""
        return [] if self._model is None else list(clean_modules(self._model))

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by names without wrappers, tied ones once; none without a model."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, module in self.modules:
            for key, parameter in module._parameters.items():
                if parameter is not None and not _is_unknown(parameter):
                    found.setdefault(id(parameter), (f"{prefix}.{key}" if prefix else key, parameter))
        return dict(found.values())

    @cached_property
    def flat_parameters(self) -> Tensor | None:
        """Return all parameters, biases included, in one vector; None if there are none."""
        return flat_vector_or_none(self.parameters.values())

    @cached_property
    def parameters_length(self) -> Tensor | None:
        """Return the length of all parameters, biases included; None if there are none."""
        if self._is_small and self.flat_parameters is not None:
            return norm_of_all([self.flat_parameters])
        return norm_of_all(self.parameters.values())

    @cached_property
    def _is_small(self) -> bool:
        return sum([parameter.numel() for parameter in self.parameters.values()]) <= _SMALL

    @cached_property
    def mean_gradients(self) -> dict[str, Tensor]:
        """Return the mean gradients since the last report, sorted by name, without those of biases."""
        grads = self._mean_gradients
        return {name: dense_float(grads[name]) for name in sorted(grads) if not is_bias(name)}

    @cached_property
    def flat_mean_gradient(self) -> Tensor | None:
        """Return the mean gradients in one vector; None if there are none."""
        return flat_vector_or_none(self.mean_gradients.values())

    @cached_property
    def flat_step_gradient(self) -> Tensor | None:
        """Return the gradients in ``.grad`` now, sorted by name, without those of biases, in one vector.

        Zeros stand for a parameter that was not used in this step, so that the vectors of all steps fit together.
        """
        trained = [p for name, p in sorted(self.parameters.items()) if p.requires_grad and not is_bias(name)]
        if all(p.grad is None for p in trained):
            return None
        return flat_vector_or_none(p.new_zeros(()).expand(p.shape) if p.grad is None else p.grad for p in trained)

    @cached_property
    def step_gradient_length(self) -> Tensor | None:
        """Return the length of all gradients in ``.grad`` now, biases included; None if there are none."""
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        flat = self.flat_step_gradient if self._is_small else None
        if flat is None:
            return norm_of_all(grads.values())
        rest = [grads[name] for name in grads if is_bias(name) or not self.parameters[name].requires_grad]
        return norm_of_all([flat, *map(whole_tensor, rest)])  # the flat one is whole, too

    def singular_values(self, matrices: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Return those of each matrix, largest first; a name that was asked for before is not computed again."""
        missing = {name: matrix for name, matrix in matrices.items() if name not in self._singular_values}
        self._singular_values |= singular_values_of(missing)
        return {name: self._singular_values[name] for name in matrices}


_VALUES: WeakKeyDictionary[RunDataContext, FiringValues] = WeakKeyDictionary()


def _is_unknown(parameter: nn.Parameter) -> bool:
    """Return whether it has no values yet: a lazy one before the first forward, or one on the device ``meta``."""
    return parameter.is_meta or is_lazy(parameter)
