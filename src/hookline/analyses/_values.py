"""Compute with the vectors of a firing: parameters and gradients by name and flat, lengths, cosines, singular values.

The analyses call ``values_of(ctx)`` for what several of them need of one firing, which is computed once; all may read
the tensors and none may change them. They add to a `GradientWindow` or `StepNumbers` at a step, and read both at a
report. Results stay on the device, but for singular values. Nothing here draws from the random streams of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.guard.rng import kept_rng
from hookline.lifecycle.context import RunDataContext
from hookline.observe.host_values import fetch
from hookline.sites import _torch
from hookline.sites.wrappers import clean_modules

_CHUNK: Final = 1 << 20
"""Entries that are made float64 at a time, 8 MiB of them."""
_NO_NAME: Final = re.compile(r"(\.(\d+|original\d*))+$")
_FLOATS: Final = frozenset({torch.float32, torch.float64})
"""The dtypes that analyses compute with."""


def is_bias(name: str) -> bool:
    """Return whether the parameter ``name`` is a bias: flat gradients leave it out.

    The last part of the name decides, so that ``unbiased_head.weight`` is a weight. A number (``biases.0``, of a
    ParameterList) and ``original0`` (of a parametrization) are no names.
    """
    return "bias" in _NO_NAME.sub("", name).rpartition(".")[2]


def weight_names(*vectors: Mapping[str, Any]) -> list[str]:
    """Return the names that all ``vectors`` have, without biases, sorted: the order of every flat vector."""
    return sorted(name for name in vectors[0] if not is_bias(name) and all(name in other for other in vectors[1:]))


def dense_float(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` as a dense real tensor of float32 or float64."""
    return _dense_float(whole_tensor(tensor).detach())


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that ranks hold in parts (FSDP2), on every rank: a collective, for all of them."""
    gathered: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gathered is None else gathered()


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _dense_float(tensor: Tensor) -> Tensor:
    if tensor.dtype in _FLOATS and tensor.layout is torch.strided:  # nearly always
        return tensor
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def flat_vector_or_none(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the entries of ``tensors`` as one vector with memory of its own; None without tensors."""
    given = [whole_tensor(tensor) for tensor in tensors]
    with torch.no_grad():
        if any(tensor.dtype not in _FLOATS or tensor.layout is not torch.strided for tensor in given):
            given = [_dense_float(tensor) for tensor in given]
        if len({tensor.device for tensor in given}) > 1:
            # A model may be spread over devices; vectors are compared on the first.
            given = [tensor.to(given[0].device) for tensor in given]
        if len(given) > 1:
            return _torch.flat(given)
        return given[0].flatten().clone() if given else None


def flat_vector(tensors: Iterable[Tensor]) -> Tensor:
    """Return the entries of ``tensors``, of which there is at least one, as one vector with memory of its own."""
    found = flat_vector_or_none(tensors)
    assert found is not None
    return found


def norm(vector: Tensor) -> Tensor:
    """Return the length of ``vector``."""
    length: Tensor = torch.linalg.vector_norm(vector)
    return length


def cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors, in their own type; 0 if one of them is zero.

    Each is brought to length 1 first: the product of two small lengths is 0 in float32 long before they are.
    """
    return torch.dot(ratio(one, norm(one)), ratio(other, norm(other)))


def cosines_in_float64(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the cosine of each pair of vectors, on the device of the first; there has to be one.

    In float64: of an angle of a tenth of a degree, the cosine is 1 − 2e-6, of which float32 keeps one digit.
    """
    sums: list[Tensor] = []
    for one, other in pairs:
        wider = widest_float(one.device)
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
    """Return ``part / whole``; 0 where ``whole`` is 0, and NaN of NaN.

    Nothing is added to the divisor: 1e-8 would halve the cosine of two gradients of length 1e-4.
    """
    return torch.where(whole == 0, torch.zeros_like(whole), part / whole)


def norm_of_all(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the length of all tensors together, on the device of the first; None without tensors."""
    given = list(tensors)
    if not given:
        return None
    if any(hasattr(tensor, "full_tensor") for tensor in given):  # held in parts: one number is exchanged, not tensors
        return whole_tensor(torch.nn.utils.get_total_norm(given))
    return torch.nn.utils.get_total_norm([dense_float(tensor) for tensor in given])


# -- singular values ---------------------------------------------------------------------------------------------

_EXACT_UP_TO: Final = 512
"""Up to this length of its shorter side, all singular values of a matrix are computed, as roots of the eigenvalues of
the Gram matrix. In float64 that is exact to 1e-8 of the largest, and for 256 × 64 takes 0.19 ms where a decomposition
of the matrix takes 0.33."""
_LARGEST: Final = 20
"""How many are computed of a larger matrix; sums over them are a lower bound."""
_DRAWN, _PASSES = 40, 8
"""Random vectors, and products with the matrix, for these: the largest is then right to 1e-2 in spectra as flat as
those of new weights, and to rounding in any that fall off."""


def singular_values_of(matrices: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return the singular values of each matrix in float64, largest first; NaN if not all of it is finite.

    All of them, or the 20 largest of a matrix over 512 × 512. All dimensions but the first count as one: a convolution
    is a matrix of outputs by inputs and positions.
    """
    return {name: _singular_values(whole_tensor(tensor).detach().flatten(1)) for name, tensor in matrices.items()}


def _singular_values(matrix: Tensor) -> NDArray[Any]:
    count = min(matrix.shape)
    is_small = count <= _EXACT_UP_TO
    found: NDArray[Any]
    if not bool(torch.isfinite(matrix).all()):  # LAPACK raises
        found = np.full(count if is_small else _LARGEST, np.nan)
    elif is_small:
        double = matrix.cpu() if matrix.device.type == "mps" else matrix
        double = double.to(torch.complex128 if matrix.is_complex() else torch.float64)
        gram = double @ double.mH if matrix.shape[0] <= matrix.shape[1] else double.mH @ double
        found = np.sqrt(torch.linalg.eigvalsh(gram).cpu().numpy()[::-1].clip(min=0))
    else:
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        with kept_rng():  # the run draws what it would have drawn
            torch.manual_seed(0)
            found = torch.svd_lowrank(wide, _DRAWN, _PASSES)[1][:_LARGEST].double().cpu().numpy()
    return found


def effective_rank(values: NDArray[Any]) -> float:
    """Return (Σσ)² / Σσ²: how many directions a matrix uses about equally; 0 if it is zero."""
    squares = float(np.square(values).sum())
    return float(values.sum()) ** 2 / squares if squares != 0 else 0.0


# -- over steps -------------------------------------------------------------------------------------------------------

_IN_CACHE, _AT_ONCE = 1 << 17, 1 << 24
"""Numbers that are multiplied at a time on a CPU, 1 MiB of float64, which stay in the cache; and on other devices."""
GIB: Final = 1 << 30


class GradientWindow:
    """Keep the last vectors in a ring, on their device, and all products between them.

    Args:
        capacity: How many of the newest vectors are read.
        batch: How many new vectors wait until their products are taken, as one product of matrices.
        exact: Multiply in float64. Centred sums are differences of products: of gradients that differ by a thousandth,
            they are a millionth of them, which float32 has an error of a tenth in.
    """

    def __init__(self, capacity: int, batch: int = 1, *, exact: bool = False) -> None:
        self.capacity, self.batch, self.exact = capacity, batch, exact
        self.size = capacity + (batch if batch > 1 else 0)
        """How many are kept: one that waits is compared with as many before it as any other."""
        self.clear()

    def clear(self) -> None:
        """Drop all vectors."""
        self._rows: Tensor | None = None  # (size, P), of which the first `_filled` hold something
        self._gram = torch.zeros(self.size, self.size, dtype=torch.float64)
        self._filled = self._next = self._fresh = 0

    @property
    def count(self) -> int:
        """Return how many vectors can be read."""
        return min(self._filled, self.capacity)

    @property
    def fresh(self) -> slice:
        """Return the rows that were added since the products were last taken."""
        end = self._next or self.size
        return slice(end - self._fresh, end)

    @property
    def is_due(self) -> bool:
        """Return whether products are to be taken before the next vector comes: the fresh rows stay one slice."""
        return self._fresh == self.batch or (self._fresh > 0 and self._next == 0)

    def gib(self, vector: Tensor) -> float:
        """Return how much memory it takes for vectors like this one."""
        return self.size * vector.nbytes / GIB

    def add(self, vector: Tensor) -> None:
        """Add ``vector``, and drop the oldest if it is full; drop all if their size is another."""
        if self.is_due:
            self.products()
        if self._rows is None or self._rows.shape[1] != vector.numel():
            self.clear()
            self._rows = vector.new_empty(self.size, vector.numel())
            self._gram = vector.new_zeros(self.size, self.size, dtype=widest_float(vector.device))
        self._rows[self._next].copy_(vector)
        self._filled = max(self._filled, self._next + 1)
        self._next = (self._next + 1) % self.size
        self._fresh += 1

    def places(self, count: int) -> list[int]:
        """Return the rows of the ``count`` newest vectors, the newest first."""
        return [(self._next - age) % self.size for age in range(1, count + 1)]

    def products(self) -> Tensor:
        """Return all products of two vectors by row, (size, size), 0 where there is none; wait for nothing."""
        if self._fresh and self._rows is not None:
            found = _products(self._rows[: self._filled], self._rows[self.fresh], self.exact)  # (all, fresh)
            self._gram[: self._filled, self.fresh] = found
            self._gram[self.fresh, : self._filled] = found.T
            self._fresh = 0
        return self._gram

    def gram(self) -> NDArray[Any]:
        """Return the products of the newest vectors, (n, n) in float64 on the host, the newest first."""
        newest = self.places(self.count)
        found: NDArray[Any] = self.products().double().cpu().numpy()[np.ix_(newest, newest)]
        return found

    def times(self, vector: Tensor) -> NDArray[Any]:
        """Return the product of each of the newest with ``vector``, (n,) in float64 on the host, the newest first."""
        assert self._rows is not None
        products = _products(self._rows[: self._filled], vector.unsqueeze(0), self.exact)[:, 0]
        found: NDArray[Any] = products.double().cpu().numpy()[self.places(self.count)]
        return found

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the products too, as summing them in another order rounds differently."""
        if self._rows is None:
            return {}
        return {"rows": self._rows[: self._filled], "gram": self._gram, "next": self._next, "fresh": self._fresh}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.clear()
        if not state or state["gram"].shape[0] != self.size:  # the window has another size now
            return
        rows = state["rows"]
        self._rows, self._gram = rows.new_empty(self.size, rows.shape[1]), state["gram"]
        self._rows[: len(rows)] = rows
        self._filled, self._next, self._fresh = len(rows), state["next"], state["fresh"]


def _products(rows: Tensor, others: Tensor, exact: bool) -> Tensor:
    """Return the product of each row with each of the others, (rows, others), added up in float64."""
    wider = widest_float(rows.device)
    dtype = wider if exact else rows.dtype
    total = rows.new_zeros(len(rows), len(others), dtype=wider)
    size = max(1, (_IN_CACHE if rows.device.type == "cpu" else _AT_ONCE) // len(rows))
    for start in range(0, rows.shape[1], size):
        total += rows[:, start : start + size].to(dtype) @ others[:, start : start + size].to(dtype).T
    return total


class StepNumbers:
    """Keep the numbers of steps where they are: moving one between device and host would wait."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all numbers."""
        self._parts: list[Any] = []  # tensors, numbers, and functions that return one; in order
        self.has_any = False
        """Whether one of them was a number, and not missing."""

    def add(self, number: Any) -> None:
        """Add a tensor of one element, a float, or a function that returns one; None if it is missing."""
        # A copy: a step that is a captured graph writes its loss to the same place every time.
        own = number.detach().reshape(1).clone() if isinstance(number, Tensor) else number
        self._parts.append(np.nan if own is None else own)
        self.has_any = self.has_any or own is not None

    def take(self) -> NDArray[Any]:
        """Return all in float64, in order, and drop them; one transfer for each device and type."""
        fetched = iter(fetch(part for part in self._parts if isinstance(part, Tensor)))
        found: list[float] = []
        for part in self._parts:
            found += next(fetched) if isinstance(part, Tensor) else [part() if callable(part) else part]
        self.clear()
        return np.array(found, dtype=np.float64)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        parts = [part() if callable(part) and not isinstance(part, Tensor) else part for part in self._parts]
        return {"parts": parts, "has_any": self.has_any} if parts else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self._parts, self.has_any = list(state.get("parts", ())), bool(state.get("has_any", False))


# -- of one firing ----------------------------------------------------------------------------------------------------


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
        return norm_of_all(self.parameters.values())

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
        return norm_of_all(p.grad for p in self.parameters.values() if p.grad is not None)

    def singular_values(self, matrices: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Return those of each matrix, largest first; a name that was asked for before is not computed again."""
        missing = {name: matrix for name, matrix in matrices.items() if name not in self._singular_values}
        self._singular_values |= singular_values_of(missing)
        return {name: self._singular_values[name] for name in matrices}


_VALUES: WeakKeyDictionary[RunDataContext, FiringValues] = WeakKeyDictionary()


def _is_unknown(parameter: nn.Parameter) -> bool:
    """Return whether it has no values yet: a lazy one before the first forward, or one on the device ``meta``."""
    return parameter.is_meta or is_lazy(parameter)
