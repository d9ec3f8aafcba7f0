"""Find the modules that hidden states come from, and the tensor in what such a module takes or returns.

`RequestStates` calls it once for each request, and at each firing. vLLM's modules have three habits: decoder layers
return (delta, residual), projections are fused, and tensor parallelism cuts outputs into columns. The objects of vLLM
are known by their attributes; nothing here imports vllm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookline.errors import NoMatchError
from hookline.sites.targets import select
from hookline.tree import main_tensor

__all__ = ["LayerSource", "Shard", "find_sources", "never_called", "shard_of", "stream_of"]


@dataclass(frozen=True, slots=True)
class LayerSource:
    """A module and a side of it that hidden states come from."""

    name: str
    """What the user calls it; of a part of a fused projection, the name that it has in transformers."""
    module: str
    """The module that is hooked."""
    of: str
    """``"output"`` or ``"input"``."""
    part: int | None = None
    """Which part of a fused projection it is; None for all of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """How tensor parallelism has cut a tensor into columns: those of each part of it, one after the other."""

    sizes: tuple[int, ...]
    """Columns of each part in this worker."""
    replicas: tuple[int, ...]
    """How many workers in a row have the same columns of a part, as of keys where there are few heads."""


def find_sources(model: nn.Module, layers: Sequence[str], of: str) -> list[LayerSource]:
    """Return the sources that names or globs select; raise if one of them selects none.

    A name of transformers that vLLM has fused into another (``q_proj`` into ``qkv_proj``) selects that part of it.
    """
    return list(dict.fromkeys(source for layer in dict.fromkeys(layers) for source in _sources(model, layer, of)))


def _sources(model: nn.Module, layer: str, of: str) -> Iterator[LayerSource]:
    try:
        found = select(model, layer)
    except NoMatchError:
        fused = _fused(model, layer)
        if fused is None:
            raise
        pattern, part, last = fused
        for name, _ in select(model, pattern):
            yield LayerSource(
                f"{name.rpartition('.')[0]}.{last}".lstrip("."), name, of, part if of == "output" else None
            )
        return
    for name, _ in found:
        yield LayerSource(name, name, of)


def _fused(model: nn.Module, layer: str) -> tuple[str, int, str] | None:
    """Return the fused projection of a name, which part of it that is, and the last part of the name."""
    head, _, last = layer.rpartition(".")
    packed = getattr(model, "packed_modules_mapping", None) or {}
    for fused, parts in packed.items():
        if last in parts:
            return (f"{head}.{fused}" if head else fused), list(parts).index(last), last
    return None


def never_called(module: nn.Module | None) -> str | None:
    """Return why vLLM does not call a module of this class; None if it does."""
    if type(module).__name__ == "ParallelLMHead":
        return "vLLM reads the weights of this module and never calls it; hook 'logits_processor', which gives logits"
    return None


def shard_of(module: nn.Module, of: str, tp_size: int) -> Shard | None:
    """Return how tensor parallelism has cut what a module returns or takes; None if every worker has all of it."""
    kind = type(module).__name__
    if of == "input":
        is_cut = kind == "RowParallelLinear" and bool(getattr(module, "input_is_parallel", False))
        columns = getattr(module, "input_size_per_partition", None) if is_cut else None
        return None if columns is None or tp_size == 1 else Shard((int(columns),), (1,))
    sizes = getattr(module, "output_partition_sizes", None)
    is_cut = "ColumnParallel" in kind or kind == "QKVParallelLinear"
    if not is_cut or sizes is None or (len(sizes) == 1 and tp_size == 1):
        return None
    if getattr(module, "gather_output", False):  # every worker has all columns
        return (
            None if len(sizes) == 1 else Shard(tuple(int(size) for size in getattr(module, "output_sizes", sizes)), ())
        )
    copies = int(getattr(module, "num_kv_head_replicas", 1))
    replicas = tuple(copies if part and kind == "QKVParallelLinear" else 1 for part in range(len(sizes)))
    return Shard(tuple(int(size) for size in sizes), replicas)


def stream_of(module: nn.Module, value: Any) -> Tensor | None:
    """Return the hidden states in what a module returns, or in ``(args, kwargs)`` that it takes.

    A pair of tensors of one shape that a block takes or returns is (delta, residual), whose sum is the residual stream;
    a norm takes such a pair too. Of what a norm returns it is the first: (normed, residual); of modules without
    children too: a rotary embedding takes and returns queries and keys.
    """
    given = _float_tensors(value)
    if len(given) >= 2 and given[0].shape == given[1].shape and given[0].dtype == given[1].dtype:
        is_call = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
        is_norm = "norm" in type(module).__name__.lower()
        if is_call if is_norm else next(module.children(), None) is not None:
            return given[0] + given[1]
    return given[0] if given else main_tensor(value)


def _float_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of real numbers among the arguments or results of a module, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = tuple(value.values())
    return [found for each in value for found in _float_tensors(each)] if isinstance(value, list | tuple) else []
