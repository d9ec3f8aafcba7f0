"""Find the tensor of an output that a hook reads, and whose tokens the running forward has.

The hooks of this folder call these. Two sources say whose tokens they are: the engine that runs the forward
(`observe.tokens`), or a batch object like SGLang's ``ForwardBatch`` among the inputs of a module, known by its
attributes. Without either, a hook for some requests does nothing and logs that once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hookline.observe.tokens import ChosenTokens, Tokens, current_tokens
from hookline.sites import _torch
from hookline.tree import main_tensor

Stage: TypeAlias = Literal["both", "prefill", "decode"]
"""The values of the option ``phase``, by which users choose the stage of a served request."""
Positions: TypeAlias = Literal["all", "last"]
"""The values of the option ``positions``: every token, or the last one of each sequence in each forward."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """The options by which a config chooses tokens of a served batch."""

    positions: Positions = "all"
    requests: tuple[str, ...] | None = None
    phase: Stage = "both"

    @property
    def needs_tokens(self) -> bool:
        """Whether it has to be known whose tokens a forward has."""
        return self.requests is not None or self.phase != "both"

    def choose(self, tokens: Tokens | None) -> ChosenTokens | None:
        """Return the tokens that are asked for; None if nobody says whose tokens there are."""
        if tokens is None or (self.requests is not None and not tokens.has_names):
            return None
        return tokens.choose(self.requests, last=self.positions == "last", stage=self.phase)


# -- the tensor of an output -------------------------------------------------------------------------------------


def output_tensor(output: Any, add_residual: bool = False) -> Tensor | None:
    """Return the main tensor of an output; with ``add_residual``, the sum of a pair of one shape.

    SGLang's layers return (hidden states, residual); other systems call their sum the hidden state.
    """
    if add_residual and isinstance(output, tuple) and len(output) == 2:
        one, other = output
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
            return one.detach() + other.detach()
    return output if isinstance(output, Tensor) else main_tensor(output)


def measurable(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, of a distributed one this process's part; None if it has no numbers that can be kept."""
    if tensor is None or not _torch.has_numbers(tensor) or _torch.capturing():
        return None
    local: Tensor | None = _torch.local_tensor(tensor)
    if local is None or local.device.type == "meta" or local.layout is not torch.strided or local.is_nested:
        return None
    return local.detach()


# -- whose tokens ------------------------------------------------------------------------------------------------


def running(inputs: Any) -> Tokens | None:
    """Return whose tokens the running forward has; None if nobody says."""
    tokens = current_tokens()
    if tokens is None and isinstance(inputs, tuple):
        for each in inputs:
            if not isinstance(each, Tensor) and hasattr(each, "forward_mode") and hasattr(each, "input_ids"):
                return tokens_of_batch(each)
    return tokens


def tokens_of_batch(batch: Any) -> Tokens | None:
    """Return whose tokens are in ``batch``, a ``ForwardBatch`` of SGLang, read by its attributes.

    Requests are called by their ``rid``. None if the host does not know them.
    """
    mode, ids, positions = batch.forward_mode, batch.input_ids, getattr(batch, "positions", None)
    # In two-batch overlap modules are called with halves of the batch, which are among their inputs.
    if mode.is_idle() or getattr(batch, "tbo_split_seq_index", None) is not None:
        return None
    names = _names(batch)
    lengths = _numbers(batch, "extend_seq_lens_cpu") or _numbers(batch, "extend_seq_lens")
    if mode.is_decode():
        lengths = (1,) * len(names)
    elif not lengths and mode.is_target_verify():  # speculative decoding checks as many tokens of each request
        lengths = (len(ids) // max(len(names), 1),) * len(names)
    total = sum(lengths)
    if not lengths or len(lengths) != len(names) or (mode.is_target_verify() and total != len(ids)):
        return None
    known = _numbers(batch, "positions")
    begins = accumulate(lengths[:-1], initial=0)
    firsts = tuple(known[begin] for begin in begins) if len(known) >= total else (None,) * len(lengths)
    # What follows the tokens is padding.
    return Tokens(
        names,
        lengths,
        firsts,
        _phases(batch, mode, lengths),
        ids=ids[:total] if isinstance(ids, Tensor) else None,
        positions=positions[:total] if isinstance(positions, Tensor) and None in firsts else None,
    )


def _names(batch: Any) -> tuple[str, ...]:
    """Return what requests are called: by their ``rids``, or by their places in the pool, if the host has these."""
    if getattr(batch, "rids", None):
        return tuple(map(str, batch.rids))
    pool = getattr(batch, "req_pool_indices", ())
    return tuple(f"pool-{number}" for number in _numbers(batch, "req_pool_indices")) or ("",) * len(pool)


def _phases(batch: Any, mode: Any, lengths: Sequence[int]) -> tuple[str, ...]:
    if not mode.is_mixed():
        return ("decode" if mode.is_decode() or mode.is_target_verify() else "prefill",) * len(lengths)
    # SGLang joins running answers to prompts as rows of one token behind a prefix. The batch does not say which; the
    # last piece of a prompt that is cut in pieces looks the same if it has one token.
    prefixes = getattr(batch, "extend_prefix_lens_cpu", None) or [0] * len(lengths)
    both = zip(lengths, prefixes, strict=True)
    return tuple("decode" if length == 1 and prefix else "prefill" for length, prefix in both)


def _numbers(batch: Any, key: str) -> tuple[int, ...]:
    """Return the whole numbers of an attribute that the host has; none if only a device has them."""
    values = getattr(batch, key, None)
    if isinstance(values, Tensor):
        values = values.flatten().tolist() if values.device.type == "cpu" else ()
    return tuple(map(int, values or ()))
