"""Compute with vectors and matrices of parameters: flat vectors, lengths, cosines, singular values.

The analyses and `FiringValues` call these. Results stay on the device, but for singular values, which come to the host.
Nothing here draws from the random streams of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.sites import _torch

__all__ = [
    "cosine", "cosines_in_float64", "dense_float", "effective_rank", "flat_vector", "flat_vector_or_none", "is_bias",
    "norm", "norm_of_all", "ratio", "singular_values_of", "weight_names", "widest_float",
]  # fmt: skip

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
    parts = [dense_float(tensor) for tensor in given]
    if parts[0].is_cuda:  # one or two launches for all of them
        return torch.nn.utils.get_total_norm(parts)
    norms = [torch.linalg.vector_norm(part) for part in parts]
    together: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return together


# -- singular values ---------------------------------------------------------------------------------------------

_EXACT_UP_TO: Final = 512
"""Up to this length of its shorter side, all singular values of a matrix are computed, as roots of the eigenvalues of
the Gram matrix. In float64 that is exact to 1e-8 of the largest, and for 256 × 64 takes 0.19 ms where a decomposition
of the matrix takes 0.33."""
_LARGEST: Final = 20
"""How many are computed of a larger matrix; sums over them are a lower bound."""
_BLOCK: Final = 32
_PASSES: Final = 6
"""Blocks of the Krylov space. For spectra as flat as those of new weights the largest value is then right to 2e-3, and
the twentieth to 1e-2; for any that fall off, to rounding. As many steps that keep the last block alone miss 2e-2."""


def singular_values_of(matrices: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return the singular values of each matrix in float64, largest first; NaN if not all of it is finite.

    All of them, or the 20 largest of a matrix over 512 × 512. All dimensions but the first count as one: a convolution
    is a matrix of outputs by inputs and positions.
    """
    return {name: _singular_values(whole_tensor(tensor).detach().flatten(1)) for name, tensor in matrices.items()}


def _singular_values(matrix: Tensor) -> NDArray[Any]:
    count, is_small = min(matrix.shape), min(matrix.shape) <= _EXACT_UP_TO
    if not bool(torch.isfinite(matrix).all()):  # LAPACK raises
        return np.full(count if is_small else _LARGEST, np.nan)
    if not is_small:
        matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        largest: NDArray[Any] = torch.linalg.svdvals(_compressed(matrix))[:_LARGEST].double().cpu().numpy()
        return largest
    double = matrix.cpu() if matrix.device.type == "mps" else matrix
    double = double.to(torch.complex128 if matrix.is_complex() else torch.float64)
    gram = double @ double.mH if matrix.shape[0] <= matrix.shape[1] else double.mH @ double
    squares: NDArray[Any] = torch.linalg.eigvalsh(gram).cpu().numpy()
    found: NDArray[Any] = np.sqrt(squares[::-1].clip(min=0))
    return found


def _compressed(matrix: Tensor) -> Tensor:
    """Return a matrix of few columns with nearly the same large singular values, by block Krylov iteration."""
    # From a generator of its own: the same matrix gives the same values, and the run draws what it would have drawn.
    draw = torch.Generator().manual_seed(0)
    block = torch.randn(matrix.shape[1], _BLOCK, generator=draw, dtype=matrix.dtype).to(matrix.device)
    block = torch.linalg.qr(block).Q
    blocks = [block]
    for _ in range(_PASSES - 1):
        block = matrix.mH @ (matrix @ block)
        for _twice in range(2):  # once leaves what rounding has put back
            for before in blocks:
                block = block - before @ (before.mH @ block)
            block = torch.linalg.qr(block).Q
        blocks.append(block)
    return matrix @ torch.cat(blocks, dim=1)


def effective_rank(values: NDArray[Any]) -> float:
    """Return (Σσ)² / Σσ²: how many directions a matrix uses about equally; 0 if it is zero."""
    squares = float(np.square(values).sum())
    return float(values.sum()) ** 2 / squares if squares != 0 else 0.0
