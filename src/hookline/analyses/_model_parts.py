"""Find the parts of a model that some analyses measure: embedding, decoder, hidden layers.

``fourier``, ``token_gradient``, ``phases`` and ``attention`` call these with ``FiringValues.modules``. Types decide
first, names only where types do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from torch import Tensor, nn

from hookline.analyses._analysis import Analysis
from hookline.analyses._firing_values import values_of
from hookline.lifecycle.context import RunDataContext

__all__ = ["Modules", "decoder_of", "embedding_of", "find_embedding", "hidden_layers_of", "matrix_of"]

Modules: TypeAlias = Sequence[tuple[str, nn.Module]]
_ATTENTION: Final = ("attn", "attention", "qkv")


def embedding_of(modules: Modules, name: str | None = None) -> tuple[str, nn.Parameter] | None:
    """Return the name and table of token embeddings: the one asked for, or the first `nn.Embedding`.

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


def find_embedding(hook: Analysis, ctx: RunDataContext, name: str | None) -> tuple[str, nn.Parameter] | None:
    """Return the embedding of the model; turn ``hook`` off if there is none."""
    if hook.off or ctx.model is None:
        return None
    found = embedding_of(values_of(ctx).modules, name)
    if found is None:
        wanted = "an nn.Embedding" if name is None else f"an embedding {name!r}"
        hook.turn_off(f"looked for {wanted} (say which table it is by embedding='name') and found none")
    return found


def decoder_of(modules: Modules, embedding: nn.Parameter, num_tokens: int) -> tuple[str, Tensor] | None:
    """Return the last linear layer with an output for every token; None if it is the embedding itself."""
    found = None
    for path, linear in modules:
        weight = matrix_of(linear)
        if weight is not None and weight.shape[0] in (num_tokens, embedding.shape[0]) and weight is not embedding:
            found = f"{path}.weight", weight
    return found


def hidden_layers_of(modules: Modules, embedding: nn.Parameter, decoder: Tensor | None) -> Iterator[Tensor]:
    """Yield the first layers of MLPs: linear, from the width of the embedding to something wider, and no attention.

    A decoder that is tied to the embedding is left out.
    """
    width = embedding.shape[1]
    for path, linear in modules:
        weight = matrix_of(linear)
        if weight is None or weight is decoder or weight is embedding:
            continue
        if weight.shape[1] == width < weight.shape[0] and not any(part in path.lower() for part in _ATTENTION):
            yield weight


def matrix_of(module: nn.Module | None) -> Tensor | None:
    """Return the weight of a linear layer, (outputs, inputs); None of any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or _is_lazy(weight):
        return None
    if isinstance(module, nn.Linear):
        return weight
    # The linear layer of Hugging Face's GPT-2, by its name: its weight is transposed.
    return weight.T if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _is_lazy(parameter: Tensor) -> bool:
    """Return whether its shape is not known before the first forward."""
    return isinstance(parameter, nn.parameter.UninitializedParameter)
