"""Compute what several analyses need of one firing, once: parameters by name, flat gradients, singular values.

The analyses call ``values_of(ctx)``; all may read the tensors and none may change them. A result lives as long as its
`RunDataContext`, which is one firing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.analyses._vectors import dense_float, flat_vector_or_none, is_bias, norm, norm_of_all, singular_values_of
from hookline.lifecycle.context import RunDataContext
from hookline.sites.wrappers import clean_modules
from hookline.when import HookPoint

__all__ = ["FiringValues", "parameters_of", "raw_number", "values_of"]

_SMALL: Final = 1 << 20
"""Parameters up to which a length is that of one flat copy: for nine tensors 25 µs where one by one takes 60. A
larger model is not copied for it."""


def values_of(ctx: RunDataContext) -> FiringValues:
    """Return the shared values of the firing ``ctx``."""
    found = _VALUES.get(ctx)
    if found is None:
        # Steps of one epoch share the lookup of parameters, which takes as long as two of the values made of them.
        epoch = ctx.epoch if ctx.hook_point is HookPoint.POST_STEP else None
        found = _VALUES[ctx] = FiringValues(ctx.model, ctx.accumulated_grads, epoch)
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
    def __init__(
        self, model: nn.Module | None, mean_gradients: Mapping[str, Tensor] | None = None, epoch: int | None = None
    ) -> None:
        self._model = model
        self._epoch = epoch
        self._mean_gradients = mean_gradients
        self._singular_values: dict[str, NDArray[Any]] = {}

    @cached_property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return all modules by names without wrappers, shared ones once; none without a model."""
        return [] if self._model is None else list(clean_modules(self._model))

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by names without wrappers, tied ones once; none without a model."""
        if self._epoch is None or self._model is None:
            return {name: parameter for name, _, _, parameter in _places(self.modules)}
        found_before = _FOUND.get(self._model)
        found = None if found_before is None else found_before.parameters(self._epoch)
        if found is None:
            found_before = _FOUND[self._model] = _FoundParameters(self._epoch, _places(self.modules))
            found = found_before.parameters(self._epoch)
            assert found is not None
        return found

    @cached_property
    def flat_parameters(self) -> Tensor | None:
        """Return all parameters, biases included, in one vector; None if there are none."""
        return flat_vector_or_none(self.parameters.values())

    @cached_property
    def mean_gradients(self) -> dict[str, Tensor]:
        """Return the mean gradients since the last report, sorted by name, without those of biases."""
        grads = self._mean_gradients or {}
        return {name: dense_float(grads[name]) for name in sorted(grads) if not is_bias(name)}

    @cached_property
    def flat_mean_gradient(self) -> Tensor | None:
        """Return the mean gradients in one vector; None if there are none."""
        return flat_vector_or_none(self.mean_gradients.values())

    @cached_property
    def _step_gradient_and_rest(self) -> tuple[Tensor | None, int]:
        """Return ``flat_step_gradient``, followed by the gradients of biases; and where these begin."""
        parts: list[Tensor] = []
        rest: list[Tensor] = []
        has_any = False
        for name, parameter in sorted(self.parameters.items()):
            grad = parameter.grad
            if is_bias(name) or not parameter.requires_grad:
                if grad is not None:
                    rest.append(grad)
            elif grad is not None:
                has_any = True
                parts.append(grad)
            else:
                parts.append(parameter.new_zeros(()).expand(parameter.shape))
        flat = flat_vector_or_none([*parts, *rest]) if has_any or rest else None
        if flat is None or not has_any:
            return flat, 0
        return flat, flat.numel() - sum([grad.numel() * (2 if grad.is_complex() else 1) for grad in rest])

    @cached_property
    def flat_step_gradient(self) -> Tensor | None:
        """Return the gradients in ``.grad`` now, sorted by name, without those of biases, in one vector.

        Zeros stand for a parameter that was not used in this step, so that the vectors of all steps fit together.
        """
        flat, start = self._step_gradient_and_rest
        return None if flat is None or start == 0 else flat[:start]

    @cached_property
    def step_gradient_length(self) -> Tensor | None:
        """Return the length of all gradients in ``.grad`` now, biases included; None if there are none."""
        if not self._is_small:
            return norm_of_all(parameter.grad for parameter in self.parameters.values() if parameter.grad is not None)
        flat, _ = self._step_gradient_and_rest
        return None if flat is None else norm(flat)

    @cached_property
    def parameters_length(self) -> Tensor | None:
        """Return the length of all parameters, biases included; None if there are none."""
        if not self._is_small:
            return norm_of_all(self.parameters.values())
        return None if self.flat_parameters is None else norm(self.flat_parameters)

    @cached_property
    def _is_small(self) -> bool:
        return sum([parameter.numel() for parameter in self.parameters.values()]) <= _SMALL

    def singular_values(self, matrices: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Return those of each matrix, largest first; a name that was asked for before is not computed again."""
        missing = {name: matrix for name, matrix in matrices.items() if name not in self._singular_values}
        self._singular_values |= singular_values_of(missing)
        return {name: self._singular_values[name] for name in matrices}


_VALUES: WeakKeyDictionary[RunDataContext, FiringValues] = WeakKeyDictionary()

_Place = tuple[str, nn.Module, str, nn.Parameter]


def _places(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[_Place]:
    """Yield, for every parameter, its name, its module, its key there, and itself; of tied ones the first."""
    seen: set[int] = set()
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen and not _is_unknown(parameter):
                seen.add(id(parameter))
                yield f"{prefix}.{key}" if prefix else key, module, key, parameter


class _FoundParameters:
    """Remember where the parameters of a model were found in an epoch; keep none of them alive."""

    def __init__(self, epoch: int, places: Iterable[_Place]) -> None:
        self._epoch = epoch
        self._places = [(name, ref(module), key, ref(parameter)) for name, module, key, parameter in places]

    def parameters(self, epoch: int) -> dict[str, nn.Parameter] | None:
        """Return them by name; None in another epoch, or if one of them has been replaced."""
        if epoch != self._epoch:
            return None
        named: dict[str, nn.Parameter] = {}
        for name, module, key, parameter in self._places:
            there, found = module(), parameter()
            if there is None or found is None or there._parameters.get(key) is not found:
                return None
            named[name] = found
        return named


_FOUND: WeakKeyDictionary[nn.Module, _FoundParameters] = WeakKeyDictionary()


def _is_unknown(parameter: nn.Parameter) -> bool:
    """Return whether it has no values yet: a lazy one before the first forward, or one on the device ``meta``."""
    return parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter)
