"""Finding the parts of a model that some analyses are about: embedding, decoder, hidden layers, attention.

Takes the modules of a model (`Work.modules`), hands back parameters by name. Types decide first, names only where types
do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from torch import Tensor, nn

from hookline.analyses._shared import work_of

if TYPE_CHECKING:
    from hookline.analyses._analysis import Analysis
    from hookline.lifecycle.run_context import RunDataContext

__all__ = [
    "Modules",
    "Projection",
    "decoder_of",
    "embedding_of",
    "embedding_or_off",
    "hidden_layers_of",
    "projections_of",
]

Modules: TypeAlias = "Sequence[tuple[str, nn.Module]]"
_ATTENTION: Final = ("attn", "attention", "qkv")
_SEPARATE: Final = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("q", "k", "v"))
"""What the three projections of an attention are called, where they are modules of their own."""
_TOGETHER: Final = ("in_proj", "qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv")
"""What one that makes all three is called."""


def embedding_of(modules: Modules, name: str | None = None) -> tuple[str, nn.Parameter] | None:
    """The table of token embeddings, and its name: the one asked for, or the first `nn.Embedding`.

    Without one: the first matrix with "embed" in its name that is not of positions.
    """
    tables: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for path, module in modules:
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


def embedding_or_off(hook: Analysis, ctx: RunDataContext, name: str | None) -> tuple[str, nn.Parameter] | None:
    """The embedding for a hook that has nothing to do without one: if there is none, the hook is off."""
    if hook.off or ctx.model is None:
        return None
    found = embedding_of(work_of(ctx).modules, name)
    if found is None:
        wanted = "an nn.Embedding" if name is None else f"an embedding {name!r}"
        hook.turn_off(f"looked for {wanted} (say which table it is by embedding='name') and found none")
    return found


def decoder_of(modules: Modules, embedding: nn.Parameter, num_tokens: int) -> tuple[str, Tensor] | None:
    """The last linear layer with an output for every token; none if it is the embedding itself."""
    found = None
    for path, linear in modules:
        weight = _matrix(linear)
        if weight is not None and weight.shape[0] in (num_tokens, embedding.shape[0]) and weight is not embedding:
            found = f"{path}.weight", weight
    return found


def hidden_layers_of(modules: Modules, embedding: nn.Parameter, decoder: Tensor | None) -> Iterator[Tensor]:
    """First layers of MLPs: linear, from the width of the embedding to something wider, and no attention.

    A decoder that is tied to the embedding is none of them.
    """
    width = embedding.shape[1]
    for path, linear in modules:
        weight = _matrix(linear)
        if weight is None or weight is decoder or weight is embedding:
            continue
        if weight.shape[1] == width < weight.shape[0] and not any(part in path.lower() for part in _ATTENTION):
            yield weight


def _matrix(module: nn.Module | None) -> Tensor | None:
    """The weight of a linear layer, (outputs, inputs); None of all else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or _is_lazy(weight):
        return None
    if isinstance(module, nn.Linear):
        return weight
    # The linear layer of Hugging Face's GPT-2, by its name: it has its weight the other way round.
    return weight.T if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _is_lazy(parameter: Tensor) -> bool:
    """Whether its shape is not known before the first forward."""
    return isinstance(parameter, nn.parameter.UninitializedParameter)


class Projection(NamedTuple):
    """The query, key or value matrix of one attention."""

    key: str
    """Its name: of the parameter, with the third that it is if it is one."""
    weight: Tensor
    """(outputs, inputs)"""


def projections_of(modules: Modules) -> list[Projection]:
    """Every query, key and value matrix of a model."""
    found: list[Projection] = []
    for path, module in modules:
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
    children = module._modules
    if not children:
        return
    for names in _SEPARATE:
        weights = {name: _matrix(children.get(name)) for name in names}
        if all(weight is not None for weight in weights.values()):
            yield from (Projection(f"{prefix}{name}.weight", w) for name, w in weights.items() if w is not None)
            return
    for name in _TOGETHER:
        weight = _matrix(children.get(name))
        if weight is not None and weight.shape[0] == 3 * weight.shape[1]:
            yield from _thirds(f"{prefix}{name}.weight", weight)


def _thirds(name: str, weight: Tensor) -> Iterator[Projection]:
    for part, third in zip("qkv", weight.chunk(3), strict=True):
        yield Projection(f"{name}[{part}]", third)
