"""Probe a model before it is served: run it on a few tokens, beside others.

The engine calls it once, when it is made. The probe finds which modules have hidden states and of what size, so that a
request can be refused before it runs, and raises where the model gives other answers in a padded batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookline.engines.hidden_states import StateSource
from hookline.errors import OptionError
from hookline.observe.tokens import current_tokens
from hookline.serve.generation_request import GenerationRequest
from hookline.serve.request_row import RequestRow
from hookline.serve.row_batch import RowBatch
from hookline.serve.sampling import ChosenToken
from hookline.sites.targets import select
from hookline.sites.wrappers import unwrap
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.serve.row_batch import BatchForward

__all__ = ["StateShape", "end_tokens", "longest_sequence", "probe_model"]


class StateShape(NamedTuple):
    """Size of the hidden states of a module, for one token."""

    features: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of one token."""
        return self.features * self.dtype.itemsize


_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_SHORT = 0.1
"""Of the largest logit; for numbers of 16 bits, of which every sum has another rounding."""


def probe_model(forward: BatchForward, *, batches: bool) -> dict[StateSource, StateShape]:
    """Return which modules give, or take, a row of numbers for each token; raise if the model cannot be served.

    As many numbers as there are tokens is not enough: they could be in another order, sorted by expert or column after
    column, where one request would get what is another's. So one prompt is run in two places, beside others; if the
    model is to serve `batches`, the second time beside a longer one, so that it is padded.
    """
    kind = type(unwrap(forward.model)).__name__
    a, b, c = (
        [(each + 3 * step) % forward.vocabulary for step in range(tokens)]
        for each, tokens in enumerate((8, 8, 12 if batches else 8))
    )
    try:
        first, logits = _run(forward, [a, b], 0)
        second, others = _run(forward, [c, a], 1)
    except Exception as error:
        raise OptionError(
            f"{kind} cannot be served: it fails on a few tokens with a DynamicCache, which keeps keys and values of "
            f"attention alone ({type(error).__name__}: {error})."
        ) from error
    if batches and not _agree(logits, others):
        raise OptionError(
            f"{kind} gives a sequence other logits in a padded batch, so that requests cannot share one; serve it with "
            "max_batch=1 (hookline serve --max-batch 1)."
        )
    return {
        source: StateShape(states.shape[1], states.dtype)
        for source, states in first.items()
        if source in second and _agree(states, second[source])
    }


def _run(forward: BatchForward, prompts: list[list[int]], row: int) -> tuple[dict[StateSource, Tensor], Tensor]:
    """Return what every module gives and takes for the prompt in `row`, and its logits after one more token."""
    found: dict[StateSource, Tensor] = {}

    def note(name: str, of: str, value: Any) -> None:
        batch, main = current_tokens(), main_tensor(value)
        tokens = None if batch is None or main is None else batch.by_token(main)
        if batch is not None and tokens is not None and StateSource(name, of) not in found:  # the first call counts
            own = tokens[batch.begins[row] : batch.begins[row] + batch.lengths[row]].clone()
            found[StateSource(name, of)] = own if own.dim() > 1 else own.unsqueeze(1)

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        note(name, "input", (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        note(name, "output", output)

    requests = [GenerationRequest(str(place), tuple(ids), max_tokens=2) for place, ids in enumerate(prompts)]
    batch = RowBatch(forward)
    with ExitStack() as handles:
        for name, module in select(forward.model, "*"):
            handles.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.enter_context(module.register_forward_hook(partial(after, name)))
        batch.prefill([RequestRow(request, lambda event: None) for request in requests])
    for each in batch.rows:
        each.take(ChosenToken(prompts[row][0]))
    return found, batch.decode()[row : row + 1]


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether most tokens have the same numbers; in a mixture, rounding may change a token's expert."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    limit = _TOLERANCE.get(one.dtype, _TOLERANCE_SHORT if one.is_floating_point() else 0.0)
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    apart = (one - other).abs().amax(1)
    return bool((apart <= limit * one.abs().amax(1)).double().mean() > 0.5)


def longest_sequence(model: nn.Module, wanted: int | None) -> int | None:
    """Return how many tokens a sequence may have: `wanted`, or all positions the configuration names."""
    there = _positions(model)
    if wanted is None:
        return there
    if type(wanted) is not int or wanted < 1:
        raise OptionError(f"max_sequence is a whole number from 1 on, got {wanted!r}.")
    if there is not None and wanted > there:
        raise OptionError(
            f"max_sequence is {wanted}, and the model's configuration says that it has {there} positions."
        )
    return wanted


def _positions(model: nn.Module) -> int | None:
    config: Any = getattr(unwrap(model), "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def end_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer."""
    inner = unwrap(model)
    for owner in (getattr(inner, "generation_config", None), getattr(inner, "config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
