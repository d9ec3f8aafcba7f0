"""The places gradients are handed over in: which tensors of a call have one, their names, and what may replace them.

Takes the arguments or the output of a module from ``gradients``, and the return values of its hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import tree

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.hook_at_site import HookAtSite

__all__ = ["Place", "as_arguments", "checked", "distinct", "names", "tensors"]

Place: TypeAlias = tuple[int, Tensor]
"""A tensor with its index in ``grad_input`` or ``grad_output``."""

_NOTHING: Final[tuple[Any, ...]] = ()


def as_arguments(output: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """An output in the shape of arguments: the items of a tuple or list count like positional ones."""
    if isinstance(output, tuple | list):
        return output, {}
    return _NOTHING, {"": output}


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    """The tensors whose gradients are handed over, in order.

    A positional value has one place even if it is no tensor, as in torch; of containers and keyword arguments
    only the tensors count.
    """
    found: list[Tensor | None] = []
    for value in args:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += _inside(value) or [None]
    for value in kwargs.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            found += _inside(value)
    return found


def _inside(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what `tensors` gives."""
    names: list[str] = []
    for index, value in enumerate(args):
        inside = [path for path, leaf in tree.leaves(value, str(index)) if isinstance(leaf, Tensor)]
        names += inside or [str(index)]
    for key, value in kwargs.items():
        names += [path for path, leaf in tree.leaves(value, key) if isinstance(leaf, Tensor)]
    return tuple(names)


def distinct(tensors: list[Any]) -> list[Place]:
    """The tensors that gradients will come for, each once, with its place."""
    if len(tensors) == 1:
        only = tensors[0]
        return [(0, only)] if only is not None and only.requires_grad else []
    seen: dict[int, Place] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad:
            seen.setdefault(id(tensor), (index, tensor))
    return list(seen.values())


def checked(result: Any, grads: Grads, entry: HookAtSite) -> Grads:
    """A hook's return value as gradients, if it fits."""
    if isinstance(result, Tensor) and len(grads) == 1:
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != len(grads):
        got = f"{len(result)}" if isinstance(result, tuple | list) else type_name(result)
        raise _misfit(entry, f"expected a tuple of {len(grads)}, or None, got {got}")
    return tuple(_checked_one(i, new, old, entry) for i, (new, old) in enumerate(zip(result, grads, strict=True)))


def _checked_one(index: int, new: Any, old: Tensor | None, entry: HookAtSite) -> Tensor | None:
    if new is None and old is not None:
        return torch.zeros_like(old)  # cuts the gradient; a tensor hook cannot say "none"
    if new is None:
        return None
    if not isinstance(new, Tensor):
        raise _misfit(entry, f"entry {index} is {type_name(new)}, not a tensor or None")
    if old is None:
        raise _misfit(entry, f"entry {index} got no gradient in this pass, so it cannot be given one")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise _misfit(
            entry,
            f"entry {index} has shape {tuple(new.shape)} and {new.dtype}, the gradient has "
            f"{tuple(old.shape)} and {old.dtype}",
        )
    return new


def _misfit(entry: HookAtSite, what: str) -> HookReturnError:
    attachment = entry.attachment
    return HookReturnError(f"{attachment.kind.value} hook {attachment.name!r} on {entry.name!r}: {what}.")
