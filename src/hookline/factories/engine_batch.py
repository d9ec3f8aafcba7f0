"""The batch object that serving systems pass through their layers, as far as hooks need it.

Takes the inputs of a module, of which one may be like SGLang's ``ForwardBatch``, known by its attributes; hands tokens
and requests to ``export`` and ``steer``. There the tokens of all requests lie in one row, without padding. Nothing here
waits for a device: what is on one is handed on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TokenBatch", "find_batch", "last_tokens"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Whose tokens are in a flat batch; tensors may be on a device."""

    input_ids: Tensor | None
    positions: Tensor | None
    lengths: Tensor | tuple[int, ...] | None
    """How many tokens each request has in this forward; None if each has one."""
    request_ids: tuple[str, ...] | Tensor | None
    phase: str

    def copied(self) -> TokenBatch:
        """The same with tensors of its own: the system fills its buffers anew for the next forward."""
        return TokenBatch(
            _copy(self.input_ids), _copy(self.positions), _copy(self.lengths), _copy(self.request_ids), self.phase
        )

    def on_host(self) -> TokenBatch:
        """The same on its way to the memory of the host, by the current stream."""
        return TokenBatch(
            _sent(self.input_ids), _sent(self.positions), _sent(self.lengths), _sent(self.request_ids), self.phase
        )


def find_batch(inputs: Any) -> TokenBatch | None:
    """The batch among the inputs of a module, if one of them looks like it."""
    for each in inputs if isinstance(inputs, tuple) else ():
        if not isinstance(each, Tensor) and hasattr(each, "input_ids") and hasattr(each, "seq_lens"):
            return _read(each)
    return None


def last_tokens(inputs: Any, main: Tensor) -> Tensor | None:
    """Which rows of a flat batch are the last of their request; None if all are, or there is no telling."""
    batch = find_batch(inputs)
    if batch is None or batch.lengths is None:
        return None
    lengths = batch.lengths
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths)
    return lengths.to(main.device, torch.int64, non_blocking=True).cumsum(0) - 1


def _read(batch: Any) -> TokenBatch:
    lengths = _lengths(batch)
    return TokenBatch(
        input_ids=_tensor(batch, "input_ids"),
        positions=_tensor(batch, "positions"),
        lengths=lengths,
        request_ids=_requests(batch),
        phase="decode" if lengths is None else "prefill",
    )


def _lengths(batch: Any) -> Tensor | tuple[int, ...] | None:
    known = getattr(batch, "extend_seq_lens_cpu", None)
    if isinstance(known, list | tuple) and known:
        return tuple(int(each) for each in known)
    return _tensor(batch, "extend_seq_lens")


def _requests(batch: Any) -> tuple[str, ...] | Tensor | None:
    named = getattr(batch, "rids", None)
    if isinstance(named, list | tuple) and named:
        return tuple(map(str, named))
    return _tensor(batch, "req_pool_indices")


def _tensor(batch: Any, name: str) -> Tensor | None:
    value = getattr(batch, name, None)
    return value if isinstance(value, Tensor) else None


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _sent(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
