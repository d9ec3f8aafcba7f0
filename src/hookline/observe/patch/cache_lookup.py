"""What a run has left behind, looked up for a site: the activations themselves, or their mean.

Takes a capture's cache, or any mapping from module names to tensors, from `edits`, and hands back one tensor per call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import NoMatchError, OptionError
from hookline.messages import nearest_names
from hookline.observe.patch.fit import as_tensor
from hookline.observe.patch.main_tensor_edit import find_main_input
from hookline.sites.main_tensor import main_tensor

__all__ = ["check_cache", "mean_of", "tensors_of"]


def check_cache(cache: Any, word: str) -> None:
    """Raise unless names can be looked up in it."""
    if not isinstance(cache, Mapping):
        raise OptionError(
            f"{word}() takes the cache of a hookline.capture, or a dict from module names to tensors, got a "
            f"{type(cache).__name__}. For one tensor there is hookline.edits.replace()."
        )


def tensors_of(
    cache: Mapping[str, Any], names: Sequence[str], *, inputs: bool, word: str, of_one_forward: bool
) -> list[Tensor]:
    """What the cache holds for a module, call by call; ``names`` are all that the module has, its own first."""
    name = next((name for name in names if name in cache), None)
    if name is None:
        raise _not_there(cache, names[0], word)
    record = cache[name]
    calls = getattr(record, "calls", (record,))
    num_forwards = len({getattr(call, "step", 0) for call in calls})
    if of_one_forward and num_forwards > 1:
        raise OptionError(
            f"{word}() puts back one forward of the model, and the cache holds {num_forwards} for {name!r}. Clear it "
            "before the one that is meant (cache.clear()), or use hookline.edits.replace(cache[name].calls[i].output)."
        )
    tensors = [_tensor_of(call, inputs=inputs) for call in calls]
    found = [as_tensor(tensor, word) for tensor in tensors if tensor is not None]
    if len(found) < len(tensors) or not found:
        side = "input" if inputs else "output"
        raise OptionError(f"{word}() found no tensor in the cache for the {side} of {names[0]!r}.")
    return found


def _tensor_of(call: Any, *, inputs: bool) -> Tensor | None:
    """The main tensor of a captured call, or of whatever else stands in the mapping."""
    if isinstance(call, Tensor) or not hasattr(call, "name"):
        return main_tensor(call)
    return find_main_input(call.inputs, call.kwargs) if inputs else main_tensor(call.output)


def _not_there(cache: Mapping[str, Any], name: str, word: str) -> NoMatchError:
    names = [str(key) for key in cache]
    near = nearest_names(name, names)
    hint = f"nearest: {', '.join(map(repr, near))}" if near else "it is empty"
    return NoMatchError(
        f"{word}() is to edit {name!r}, which is not in the cache of {len(names)} names; {hint}. "
        "Capture the sites that are patched, through the same model."
    )


def mean_of(tensors: Sequence[Tensor], dims: Sequence[int] | None, name: str) -> Tensor:
    """The mean over all calls and over ``dims``, which stay as dimensions of size 1."""
    first = tensors[0]
    over = _all_but_units(first.dim()) if dims is None else _checked_dims(dims, first.dim(), name)
    kept = {(tensor.dim(), *(size for dim, size in enumerate(tensor.shape) if dim not in over)) for tensor in tensors}
    if len(kept) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise OptionError(
            f"mean_ablate(dims={over}) cannot average the {len(tensors)} calls of {name!r}, whose shapes differ in "
            f"other dimensions too: {shapes}. Give all of them in dims=."
        )
    count = sum(math.prod(tensor.shape[dim] for dim in over) for tensor in tensors)
    if not count:
        raise OptionError(f"mean_ablate() has nothing to average for {name!r}: the cache holds empty tensors.")
    with torch.inference_mode(False), torch.no_grad():
        total = torch.zeros((), device=first.device)
        for tensor in tensors:
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=False)
            total = total + (wide.sum(over, keepdim=True) if over else wide)
        return total / count


def _all_but_units(num_dims: int) -> tuple[int, ...]:
    """Every dimension but that of the units: the last, or the channels of images."""
    units = 1 if num_dims in (4, 5) else num_dims - 1
    return tuple(dim for dim in range(num_dims) if dim != units)


def _checked_dims(dims: Sequence[int], num_dims: int, name: str) -> tuple[int, ...]:
    for dim in dims:
        if not -num_dims <= dim < num_dims:
            raise OptionError(f"mean_ablate(dims={tuple(dims)}): {name!r} has {num_dims} dimensions in the cache.")
    return tuple(sorted({dim % num_dims for dim in dims}))
