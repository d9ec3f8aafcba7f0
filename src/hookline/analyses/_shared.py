"""What several analyses need of one firing, worked out once: parameters by name, flat gradients, singular values.

Takes a `RunDataContext` from the hooks of this folder, hands them tensors that all of them may read and none may
change. What was found lives as long as the context does, which is one firing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hookline.analyses._spectrum import singular_values_of
from hookline.lifecycle.points import HookPoint
from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hookline.lifecycle.run_context import RunDataContext

__all__ = [
    "Work",
    "cosine",
    "cosines",
    "figure",
    "flatten",
    "is_bias",
    "norm_of_all",
    "on_host",
    "ratio",
    "wide",
    "work_of",
]

_CHUNK: Final = 1 << 20
"""Components that are made float64 at a time, 8 MiB of them."""
_WIDE: Final = frozenset({torch.float32, torch.float64})
_SMALL: Final = 1 << 20
"""Parameters up to which a length is that of one flat copy: for nine tensors 25 µs where one by one takes 60. Of a
larger model nobody makes a copy for it."""


def is_bias(name: str) -> bool:
    """Whether a parameter is left out of flat gradients."""
    return "bias" in name


def work_of(ctx: RunDataContext) -> Work:
    """The shared work of this firing."""
    found = _WORK.get(ctx)
    if found is None:
        # Steps of one epoch share the lookup of parameters, which takes as long as two of the figures made of them.
        epoch = ctx.epoch if ctx.hook_point is HookPoint.POST_STEP else None
        found = _WORK[ctx] = Work(ctx.model, ctx.accumulated_grads, epoch)
    return found


class Work:
    """What was asked for so far; nothing is worked out before that."""

    # The context is not kept: it is the key that this lives by.
    def __init__(
        self, model: nn.Module | None, mean_gradients: Mapping[str, Tensor] | None, epoch: int | None = None
    ) -> None:
        self._model = model
        self._epoch = epoch
        self._mean_gradients = mean_gradients
        self._singular_values: dict[str, NDArray[Any]] = {}

    @cached_property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """All modules by names without wrappers, shared ones once; none without a model."""
        return [] if self._model is None else list(clean_modules(self._model))

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by names without wrappers, tied ones once; none without a model."""
        if self._epoch is None or self._model is None:
            return {name: parameter for name, _, _, parameter in _places(self.modules)}
        known = _KNOWN.get(self._model)
        found = None if known is None else known.parameters(self._epoch)
        if found is None:
            known = _KNOWN[self._model] = _Known(self._epoch, _places(self.modules))
            found = known.parameters(self._epoch)
            assert found is not None
        return found

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
    def _step_gradient_and_rest(self) -> tuple[Tensor | None, int]:
        """What ``flat_step_gradient`` holds, then the gradients of biases; and where these begin."""
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
        flat = flatten([*parts, *rest]) if has_any or rest else None
        if flat is None or not has_any:
            return flat, 0
        return flat, flat.numel() - sum([grad.numel() * (2 if grad.is_complex() else 1) for grad in rest])

    @cached_property
    def flat_step_gradient(self) -> Tensor | None:
        """The gradients that lie in ``.grad`` now, sorted by name, without those of biases, in one vector.

        Zeros stand for a parameter that was not used in this step, so that the vectors of all steps fit together.
        """
        flat, start = self._step_gradient_and_rest
        return None if flat is None or start == 0 else flat[:start]

    @cached_property
    def step_gradient_length(self) -> Tensor | None:
        """Of all gradients that lie in ``.grad`` now, those of biases included; None if there are none."""
        if not self._is_small:
            return norm_of_all(parameter.grad for parameter in self.parameters.values() if parameter.grad is not None)
        flat, _ = self._step_gradient_and_rest
        return None if flat is None else torch.linalg.vector_norm(flat)

    @cached_property
    def parameters_length(self) -> Tensor | None:
        """Of all parameters, biases included; None if there are none."""
        if not self._is_small:
            return norm_of_all(self.parameters.values())
        return None if self.flat_parameters is None else torch.linalg.vector_norm(self.flat_parameters)

    @cached_property
    def _is_small(self) -> bool:
        return sum([parameter.numel() for parameter in self.parameters.values()]) <= _SMALL

    def singular_values(self, matrices: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Those of each matrix, largest first; the name says which it is, so that nobody works them out again."""
        missing = {name: matrix for name, matrix in matrices.items() if name not in self._singular_values}
        self._singular_values |= singular_values_of(missing)
        return {name: self._singular_values[name] for name in matrices}


_WORK: WeakKeyDictionary[RunDataContext, Work] = WeakKeyDictionary()

_Place = tuple[str, nn.Module, str, nn.Parameter]


def _places(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[_Place]:
    """Of every parameter its name, its module, its key there, and itself; of tied ones, the first."""
    seen: set[int] = set()
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen and not _is_unknown(parameter):
                seen.add(id(parameter))
                yield f"{prefix}.{key}" if prefix else key, module, key, parameter


class _Known:
    """Where the parameters of a model were found in an epoch; keeps none of them alive."""

    def __init__(self, epoch: int, places: Iterable[_Place]) -> None:
        self._epoch = epoch
        self._places = [(name, ref(module), key, ref(parameter)) for name, module, key, parameter in places]

    def parameters(self, epoch: int) -> dict[str, nn.Parameter] | None:
        """By name; None in another epoch, or if one of them has been replaced."""
        if epoch != self._epoch:
            return None
        named: dict[str, nn.Parameter] = {}
        for name, module, key, parameter in self._places:
            there, found = module(), parameter()
            if there is None or found is None or there._parameters.get(key) is not found:
                return None
            named[name] = found
        return named


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def _is_unknown(parameter: nn.Parameter) -> bool:
    """Whether it has no values yet: a lazy one before the first forward, or one on the device ``meta``."""
    return parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter)


def wide(tensor: Tensor) -> Tensor:
    """The same values, dense, real and in no less than float32."""
    return _wide(tensor.detach())


def _wide(tensor: Tensor) -> Tensor:
    if tensor.dtype in _WIDE and tensor.layout is torch.strided:  # nearly always
        return tensor
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def flatten(tensors: Iterable[Tensor]) -> Tensor | None:
    """One vector with memory of its own; None of nothing."""
    given = list(tensors)
    with torch.no_grad():
        if any(tensor.dtype not in _WIDE or tensor.layout is not torch.strided for tensor in given):
            given = [_wide(tensor) for tensor in given]
        if len({tensor.device for tensor in given}) > 1:
            # A model may be spread over devices; what is compared is brought together on the first.
            given = [tensor.to(given[0].device) for tensor in given]
        if len(given) > 1:
            return _torch.flat(given)
        return given[0].flatten().clone() if given else None


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """Of the angle between two vectors, on their device; 0 if one of them is zero."""
    return cosines([(one, other)])[0]


def cosines(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Of each pair of vectors, on the device of the first; there has to be one.

    In float64: of an angle of a tenth of a degree, the cosine is 1 − 2e-6, of which float32 keeps one digit.
    """
    sums: list[Tensor] = []
    for one, other in pairs:
        wider = torch.float32 if one.device.type == "mps" else torch.float64
        found: list[Tensor] = []
        for start in range(0, max(one.numel(), 1), _CHUNK):
            a, b = one[start : start + _CHUNK].to(wider), other[start : start + _CHUNK].to(wider)
            parts = [torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)]
            found = [total + part for total, part in zip(found, parts, strict=True)] if found else parts
        sums += found
    if len({total.device for total in sums}) > 1:
        sums = [total.to(sums[0].device) for total in sums]
    dots, firsts, seconds = torch.stack(sums).view(-1, 3).unbind(1)
    return ratio(dots, firsts.sqrt() * seconds.sqrt())


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """One over the other; 0 of nothing, and NaN of NaN.

    Nothing is added to what is divided by: 1e-8 would halve the cosine of two gradients of length 1e-4.
    """
    return torch.where(whole == 0, torch.zeros_like(whole), part / whole)


def norm_of_all(tensors: Iterable[Tensor]) -> Tensor | None:
    """The length of all of them together, on the device of the first; None of nothing."""
    parts = [wide(tensor) for tensor in tensors]
    if not parts:
        return None
    if parts[0].is_cuda:  # a launch or two for all of them, where each alone is a launch
        return torch.nn.utils.get_total_norm(parts)
    norms = [torch.linalg.vector_norm(part) for part in parts]
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
