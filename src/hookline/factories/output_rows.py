"""The tensor of an output that a hook of this folder looks at, and which of its rows are real.

Takes the output of a module and the rows of the running batch, hands tensors to the hooks beside it. A batch of
prompts of different lengths is padded on the left; what a model computes there means nothing, and may be NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.factories.batch_rows import current_rows
from hookline.sites import _torch
from hookline.sites.tree import main_tensor

if TYPE_CHECKING:
    from hookline.factories.batch_rows import BatchRows

__all__ = ["by_token", "measurable", "shape_of", "shown", "without_padding"]


def shown(output: Any, add_residual: bool = False) -> Tensor | None:
    """The main tensor of an output; with ``add_residual``, of a pair of the same make the sum.

    SGLang's layers hand on (hidden states, residual), and what other systems call the hidden state is their sum.
    """
    if add_residual and isinstance(output, tuple) and len(output) == 2:
        one, other = output
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
            return one.detach() + other.detach()
    return output if isinstance(output, Tensor) else main_tensor(output)


def measurable(tensor: Tensor | None) -> Tensor | None:
    """The tensor, of a distributed one this process's part; None if there are no numbers in it that last."""
    if tensor is None or not _torch.has_numbers(tensor) or _torch.capturing():
        return None
    local: Tensor | None = _torch.local_tensor(tensor)
    if local is None or local.device.type == "meta" or local.layout is not torch.strided or local.is_nested:
        return None
    return local.detach()


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape; of tensors in a tensor, whose sizes differ, how many there are."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def by_token(tensor: Tensor, rows: BatchRows) -> Tensor | None:
    """The tensor as (batch, sequence, …), if it has a place for each token of the batch; also if those lie in a row."""
    if not rows.starts:
        return None
    batch, length = len(rows.starts), rows.starts[0] + len(rows.tokens[0])
    if tensor.dim() == 2 and tensor.shape[0] == batch * length:
        return tensor.reshape(batch, length, tensor.shape[1])
    # Of more dimensions, the second is not that of the sequence: (batch, heads, sequence, sequence).
    return tensor if tensor.dim() in (2, 3) and tensor.shape[:2] == (batch, length) else None


def without_padding(tensor: Tensor) -> Tensor | None:
    """The real rows of a padded batch, as (tokens, features); the tensor itself where nothing is padded.

    None where a CUDA graph is recorded: which rows those are would be fixed in it.
    """
    rows = current_rows()
    if rows is None or not any(rows.starts):
        return tensor
    tokens = by_token(tensor, rows)
    if tokens is None:
        return tensor
    return None if _torch.capturing() else tokens.flatten(0, 1).index_select(0, _real(rows, tensor.device))


class _Last:
    """The places of the last forward's real rows: every layer of it asks for the same."""

    kept: tuple[BatchRows, torch.device, Tensor] | None = None


_LAST: Final = _Last()


def _real(rows: BatchRows, device: torch.device) -> Tensor:
    kept = _LAST.kept
    if kept is not None and kept[0] is rows and kept[1] == device:
        return kept[2]
    length = rows.starts[0] + len(rows.tokens[0])
    places = [row * length + column for row, start in enumerate(rows.starts) for column in range(start, length)]
    with torch.inference_mode(False):
        found = torch.tensor(places).to(device, non_blocking=True)  # which does not wait for the device
    _LAST.kept = (rows, device, found)
    return found
