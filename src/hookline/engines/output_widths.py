"""Tell how many numbers the output of a module of an engine has for each token, where its parts say so.

The workers of vLLM and SGLang call it once, and refuse a vector or a probe of another length when it is attached. The
classes of both engines are known by their names and attributes; nothing here imports either.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["output_widths"]


def output_widths(model: nn.Module, hidden_size: int | None) -> dict[str, int]:
    """Return the widths of norms, embeddings, projections that give a whole output, and decoder layers, by name.

    Of other modules nothing is known before they run, and they are left out.

    Args:
        model: The model of a worker.
        hidden_size: The width of the residual stream, from the engine's configuration; without it, layers are left out.
    """
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        width = _own_width(module)
        if width is not None:
            found[name] = width
        if hidden_size is not None and isinstance(module, nn.ModuleList):
            layers = {f"{name}.{key}".lstrip("."): layer for key, layer in module.named_children()}
            found |= {each: hidden_size for each, layer in layers.items() if hidden_size in _norm_widths(layer)}
    return found


def _own_width(module: nn.Module) -> int | None:
    kind: Any = type(module).__name__
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Embedding) or kind == "VocabParallelEmbedding":
        return _whole(module, "embedding_dim")
    if kind in ("RowParallelLinear", "ReplicatedLinear"):  # others give each worker a part of the columns
        return _whole(module, "output_size")
    weight = getattr(module, "weight", None)
    is_norm = kind.endswith(("RMSNorm", "LayerNorm")) and isinstance(weight, Tensor) and weight.dim() == 1
    return len(weight) if is_norm and weight is not None else None


def _whole(module: nn.Module, attribute: str) -> int | None:
    found = getattr(module, attribute, None)
    return found if type(found) is int else None


def _norm_widths(layer: nn.Module) -> set[int]:
    """Return the widths of the norms that are parts of a layer: they stand in the residual stream."""
    widths = (_own_width(child) for child in layer.children() if "norm" in type(child).__name__.lower())
    return {width for width in widths if width is not None}
