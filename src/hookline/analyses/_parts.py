"""Finding the parts of a model that some analyses are about: embedding, decoder, hidden layers, attention.

Takes a model, hands back parameters by name. Types decide first, names only where types do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from torch import Tensor, nn

from hookline.sites.wrappers import clean_modules

if TYPE_CHECKING:
    from hookline.analyses._analysis import Analysis

__all__ = ["Projection", "decoder_of", "embedding_of", "embedding_or_off", "hidden_layers_of", "projections_of"]

_ATTENTION: Final = ("attn", "attention", "qkv")
_SEPARATE: Final = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("q", "k", "v"))
"""What the three projections of an attention are called, where they are modules of their own."""
_TOGETHER: Final = ("in_proj", "qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv")
"""What one that makes all three is called."""


def embedding_of(model: nn.Module, name: str | None = None) -> tuple[str, nn.Parameter] | None:
    """The table of token embeddings, and its name: the one asked for, or the first `nn.Embedding`.

    Without one: the first matrix with "embed" in its name that is not of positions.
    """
    tables: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for path, module in clean_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is None or _is_lazy(parameter) or parameter.dim() != 2:
                continue
            full = f"{path}.{key}" if path else key
            if name is not None and name in (full, path):
                return full, parameter
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                tables.append((full, parameter))
            elif "embed" in full.lower() and "pos" not in full.lower() and "unembed" not in full.lower():
                others.append((full, parameter))
    tables.sort(key=lambda found: "pos" in found[0].lower())  # stable: those of positions go last
    return None if name is not None else next(iter([*tables, *others]), None)


def embedding_or_off(hook: Analysis, model: nn.Module | None, name: str | None) -> tuple[str, nn.Parameter] | None:
    """The embedding for a hook that has nothing to do without one: if there is none, the hook is off."""
    if hook.off or model is None:
        return None
    found = embedding_of(model, name)
    if found is None:
        wanted = "an nn.Embedding" if name is None else f"an embedding {name!r}"
        hook.turn_off(f"looked for {wanted} (say which table it is by embedding='name') and found none")
    return found


def decoder_of(model: nn.Module, embedding: nn.Parameter, num_tokens: int) -> tuple[str, Tensor] | None:
    """The last linear layer with an output for every token; none if it is the embedding itself."""
    found = None
    for path, linear in _linears(model):
        if linear.weight.shape[0] in (num_tokens, embedding.shape[0]) and linear.weight is not embedding:
            found = f"{path}.weight", linear.weight
    return found


def hidden_layers_of(model: nn.Module, embedding: nn.Parameter, decoder: Tensor | None) -> Iterator[Tensor]:
    """First layers of MLPs: linear, from the width of the embedding to something wider, and no attention."""
    width = embedding.shape[1]
    for path, linear in _linears(model):
        wider = linear.in_features == width and linear.out_features > width
        if wider and linear.weight is not decoder and not any(part in path.lower() for part in _ATTENTION):
            yield linear.weight


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, module in clean_modules(model):
        if isinstance(module, nn.Linear) and not _is_lazy(module.weight):
            yield path, module


def _is_lazy(parameter: Tensor) -> bool:
    """Whether its shape is not known before the first forward."""
    return isinstance(parameter, nn.parameter.UninitializedParameter)


class Projection(NamedTuple):
    """The query, key or value matrix of one attention."""

    key: str
    """Its name: of the parameter, with the third that it is if it is one."""
    weight: Tensor
    """(outputs, inputs)"""


def projections_of(model: nn.Module) -> list[Projection]:
    """Every query, key and value matrix of a model."""
    found: list[Projection] = []
    for path, module in clean_modules(model):
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            found += _of_multihead(prefix, module)
        else:
            found += _of_children(prefix, module)
    return found


def _of_multihead(prefix: str, module: nn.MultiheadAttention) -> Iterator[Projection]:
    if module.in_proj_weight is not None:
        yield from _thirds(f"{prefix}in_proj_weight", module.in_proj_weight)
        return
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        weight = getattr(module, name)
        if weight is not None:
            yield Projection(f"{prefix}{name}", weight)


def _of_children(prefix: str, module: nn.Module) -> Iterator[Projection]:
    children = dict(module.named_children())
    for names in _SEPARATE:
        layers = [children.get(name) for name in names]
        if all(isinstance(layer, nn.Linear) and not _is_lazy(layer.weight) for layer in layers):
            for name in names:
                yield Projection(f"{prefix}{name}.weight", children[name].weight)  # type: ignore[arg-type]
            return
    for name in _TOGETHER:
        layer = children.get(name)
        if isinstance(layer, nn.Linear) and layer.out_features == 3 * layer.in_features:
            yield from _thirds(f"{prefix}{name}.weight", layer.weight)


def _thirds(name: str, weight: Tensor) -> Iterator[Projection]:
    for part, third in zip("qkv", weight.chunk(3), strict=True):
        yield Projection(f"{name}[{part}]", third)
