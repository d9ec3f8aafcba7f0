"""Tell what each head of attention adds to the residual stream: what it reads, times its rows of the output projection.

``attention`` hands in what the heads read (`follow`) while `FollowHeads` stands around the forward of the module. This
follows the tensor through functions that move its numbers and change none (``transpose``, ``reshape``) up to the first
product with a matrix, which is the output projection, whatever it is called and wherever it lies. A model that does
anything else with it in between (a gate, an adapter beside the matrix, a quantized matrix) is an error.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from hookline.errors import UnhookableError

_Order = tuple[int, ...]
_FLAT: Final[_Order] = ()
"""The order of a tensor whose last dimension is heads × width, and whose rows are batch × tokens."""
_BY_TOKEN: Final[_Order] = (0, 2, 1, 3)
"""Of (batch, tokens, heads, width), in which the last two can be made one."""
_SAME: Final = (Tensor.contiguous, Tensor.clone, Tensor.to, Tensor.type_as, torch.clone)
_SWAPS: Final = (Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, torch.swapdims)
_PERMUTES: Final = (Tensor.permute, torch.permute)
_RESHAPES: Final = (Tensor.reshape, torch.reshape, Tensor.view, Tensor.flatten, torch.flatten)
_PRODUCTS: Final = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


def follow(z: Tensor) -> Tensor:
    """Have the `FollowHeads` around follow what the heads read: it knows this call, in compiled code too."""
    return z.view_as(z)


def call_in_mode(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that a mode was given."""
    if func is Tensor.unflatten:  # which the compiler cannot call by this name in a mode
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


class FollowHeads(TorchFunctionMode):
    """Show all functions that are called while the block lasts to an `OutputProjection`."""

    def __init__(self, projection: OutputProjection) -> None:
        super().__init__()
        self._projection = projection

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._projection.call(func, args, kwargs or {})


class _Followed(NamedTuple):
    tensor: Tensor
    order: _Order
    """Where its dimensions are in (batch, heads, tokens, width)."""


class OutputProjection:
    """Find the matrix behind the heads in one forward of an attention module, and what each head adds by it."""

    def __init__(self, module_name: str, part: Any) -> None:
        self._name = module_name
        self._part = part
        """The `AttentionPart` that is shown what heads add."""
        self._z: Any = None
        self._followed: list[_Followed] = []
        self._was_seen = False
        self._fault = ""
        """What the model does with the heads that no head alone can be told from; raised when the forward is over, as
        torch takes an error inside of an operator for one of its types."""

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function; note what becomes of the tensor that is followed."""
        if func is Tensor.view_as and args[0] is args[1]:
            self._z, self._followed, self._was_seen = args[0], [_Followed(args[0], (0, 1, 2, 3))], False
            return args[0]
        found = [each for each in self._followed if any(each.tensor is given for given in (*args, *kwargs.values()))]
        if not found:
            return call_in_mode(func, args, kwargs)
        product = _product(func, args, kwargs)
        if product is not None and product[0] is found[0].tensor and found[0].order == _FLAT:
            return self._projected(func, args, kwargs, *product[1:])
        output = call_in_mode(func, args, kwargs)
        if isinstance(output, Tensor):
            order = self._moved(func, args, found[0], output)
            if order is None:
                self._fault = f"computes with it ({getattr(func, '__name__', func)}) beside its output projection"
            else:
                self._followed.append(_Followed(output, order))
        return output

    def check(self) -> None:
        """Raise if the forward is over, and what each head adds is not known."""
        fault = self._fault or ("" if self._was_seen else "was not seen to multiply it by an output projection")
        if fault and self._part.has_hooks:
            raise UnhookableError(
                f"What each head adds is what it reads times a matrix, and {self._name} {fault}. Capture role='z'."
            )

    def _moved(self, func: Any, args: Any, followed: _Followed, output: Tensor) -> _Order | None:
        """Return the order of dimensions after a function; None if it does more than to move numbers."""
        tensor, order = followed
        if func in _SAME or (func in _RESHAPES and output.shape == tensor.shape):
            return order
        if func in _SWAPS and order != _FLAT and len(args) == 3:
            moved = list(order)
            moved[args[1]], moved[args[2]] = moved[args[2]], moved[args[1]]
            return tuple(moved)
        if func in _PERMUTES and order != _FLAT and len(args) > 1:
            dims = args[1] if isinstance(args[1], tuple | list) else args[1:]
            return tuple(order[dim] for dim in dims)
        is_whole = output.shape[-1] == self._z.shape[1] * self._z.shape[3]
        return _FLAT if func in _RESHAPES and order in (_BY_TOKEN, _FLAT) and is_whole else None

    def _projected(self, func: Any, args: Any, kwargs: dict[str, Any], matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the projection; show what each head adds to it."""
        if self._was_seen:
            self._fault = "multiplies it by several, as those of an adapter: merge it (PEFT: model.merge_adapter())"
            return call_in_mode(func, args, kwargs)  # type: ignore[no-any-return]
        self._was_seen = True
        rows = matrix.reshape(self._z.shape[1], self._z.shape[3], -1)
        added: Tensor = self._part(torch.einsum("bhtw,hwf->bhtf", self._z.to(matrix.dtype), rows))
        output: Tensor = call_in_mode(func, args, kwargs)
        if not self._part.is_in_path:
            return output
        total = added.sum(1) if bias is None else added.sum(1) + bias
        return total.reshape(output.shape).to(output.dtype)


def _product(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return what a function multiplies by a matrix (in, out), that, and what it adds; None if it does not do that."""
    if func is linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"].T, given.get("bias")
    if func is torch.addmm and len(args) == 3 and not kwargs:  # Conv1D of GPT-2
        return args[1], args[2], args[0]
    if func in _PRODUCTS and len(args) == 2 and args[1].dim() == 2:
        return args[0], args[1], None
    return None
