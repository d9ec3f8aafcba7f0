"""Map the rows of one forward of SGLang to requests.

`SglangHooks` asks `table_of_batch` for the table that hooks see. SGLang's ``ForwardBatch`` is read by its attributes;
nothing here imports sglang or waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookline.factories.batch_rows import TokenBatch

__all__ = ["table_of_batch"]


def table_of_batch(batch: Any) -> TokenBatch | None:
    """Return whose tokens are in ``batch``, a ``ForwardBatch``; None if it does not say, or runs in two halves.

    Request ids are those that clients gave (``rid``).
    """
    names = getattr(batch, "rids", None)
    # In two-batch overlap modules are called with halves of the batch, which are among their inputs.
    if not names or batch.forward_mode.is_idle() or getattr(batch, "tbo_split_seq_index", None) is not None:
        return None
    lengths = _lengths(batch, len(names))
    if lengths is None:
        return None
    phases = _phases(batch, lengths)
    total = sum(lengths)
    return TokenBatch(
        input_ids=_first(batch.input_ids, total),
        positions=_first(batch.positions, total),
        lengths=None if all(length == 1 for length in lengths) else tuple(lengths),
        request_ids=tuple(map(str, names)),
        phase=phases[0] if len(set(phases)) == 1 else "mixed",
        phases=tuple(phases),
    )


def _lengths(batch: Any, count: int) -> list[int] | None:
    """Return how many tokens each request has in the batch."""
    mode = batch.forward_mode
    if mode.is_decode():
        return [1] * count
    known = getattr(batch, "extend_seq_lens_cpu", None)
    if known is not None and len(known) == count:
        return [int(length) for length in known]
    tokens = batch.input_ids
    # Speculative decoding checks as many tokens of each request.
    if isinstance(tokens, Tensor) and mode.is_target_verify() and len(tokens) % count == 0:
        return [len(tokens) // count] * count
    return None


def _phases(batch: Any, lengths: Sequence[int]) -> list[str]:
    mode = batch.forward_mode
    if mode.is_decode() or mode.is_target_verify():
        return ["decode"] * len(lengths)
    if not mode.is_mixed():
        return ["prefill"] * len(lengths)
    # SGLang joins running answers to prompts as rows of one token behind a prefix. The batch does not say which; the
    # last piece of a prompt that is cut in pieces looks the same if it has one token.
    prefixes = getattr(batch, "extend_prefix_lens_cpu", None) or [0] * len(lengths)
    return ["decode" if length == 1 and prefix else "prefill" for length, prefix in zip(lengths, prefixes, strict=True)]


def _first(value: Any, count: int) -> Tensor | None:
    """Return the first ``count`` numbers; what follows them is padding."""
    return value[:count] if isinstance(value, Tensor) and value.dim() == 1 else None
