"""Probe a model before it is served: run it a few times on a few tokens.

The engine calls it once, when it is made. The probe finds which modules have hidden states and of what size, so that a
request can be refused before it runs, raises where the model gives other answers in a padded batch than alone, and
warns of one that gives NaN.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from hookline.engines.hidden_states import StateSource
from hookline.engines.live_hooks import hooks_suspended
from hookline.errors import OptionError
from hookline.observe.tokens import current_tokens
from hookline.serve.generation.request_row import RequestRow
from hookline.serve.generation.row_batch import RowBatch
from hookline.serve.generation.sampling import ChosenToken
from hookline.serve.generation_request import GenerationRequest
from hookline.sites.targets import select
from hookline.sites.wrappers import unwrap
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.serve.generation.row_batch import BatchForward

__all__ = ["StateShape", "end_tokens", "longest_sequence", "probe_model"]

logger = logging.getLogger("hookline.serve")


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
_TOKENS = 8
"""Of each prompt that is tried."""


def probe_model(forward: BatchForward, *, batches: bool) -> dict[StateSource, StateShape]:
    """Run the model on a few tokens; return which hidden states it has, or raise if it cannot be served."""
    kind = type(unwrap(forward.model)).__name__
    try:
        with hooks_suspended(forward.model):
            found = _find_shapes(forward)
            alone = _probe_logits(forward, [])
            apart = _apart(alone, _probe_logits(forward, [_BESIDE])) if batches else None
    except Exception as error:
        raise OptionError(
            f"{kind} cannot be served: it fails on a few tokens with a DynamicCache, which keeps keys and values of "
            f"attention alone ({type(error).__name__}: {error})."
        ) from error
    if apart is not None:
        raise OptionError(
            f"{kind} gives a sequence other logits in a padded batch than alone ({apart}), so that requests cannot "
            "share a batch; serve it with max_batch=1 (hookline serve --max-batch 1)."
        )
    if bool(alone.isnan().any()):
        logger.warning(
            "%s gives NaN for a test prompt. It is served all the same, but an answer ends with an error where no "
            "token can be chosen. The hook hookline.factories:nan_alarm on '*' names the modules that give NaN",
            kind,
        )
    return found


def _find_shapes(forward: BatchForward) -> dict[StateSource, StateShape]:
    """Return the modules that give, or take, a row of numbers for each token, with the size of a row.

    As many numbers as there are tokens is not enough: they could be in another order, sorted by expert or column after
    column, where one request would get what is another's. So the same prompt is run in two places, beside others.
    """
    a, b, c = ([(each + 3 * step) % forward.vocabulary for step in range(_TOKENS)] for each in range(3))
    first = _states_of(forward, [_row("a", a), _row("b", b)], 0)
    second = _states_of(forward, [_row("c", c), _row("a", a)], 1)
    return {
        place: StateShape(states.shape[1], states.dtype)
        for place, states in first.items()
        if place in second and _agree(states, second[place])
    }


def _states_of(forward: BatchForward, rows: list[RequestRow], place: int) -> dict[StateSource, Tensor]:
    """Return what every module gives and takes for row `place` of two; (tokens, features)."""
    found: dict[StateSource, Tensor] = {}

    def note(name: str, of: str, value: Any) -> None:
        batch, main = current_tokens(), main_tensor(value)
        tokens = None if batch is None or main is None else batch.by_token(main)
        if tokens is not None and StateSource(name, of) not in found:  # a module that is called again is seen once
            own = tokens[place * _TOKENS : (place + 1) * _TOKENS].clone()
            found[StateSource(name, of)] = own if own.dim() > 1 else own.unsqueeze(1)

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        note(name, "input", (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        note(name, "output", output)

    with ExitStack() as handles:
        for name, module in select(forward.model, "*"):
            handles.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.enter_context(module.register_forward_hook(partial(after, name)))
        RowBatch(forward).prefill(rows)
    return found


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether most tokens have the same numbers; in a mixture, rounding may change a token's expert."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    limit = _TOLERANCE.get(one.dtype, _TOLERANCE_SHORT if one.is_floating_point() else 0.0)
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    apart = (one - other).abs().amax(1)
    return bool((apart <= limit * one.abs().amax(1)).double().mean() > 0.5)


_IDS: Final = tuple(7 * step + 3 for step in range(16))
_PROMPT: Final = slice(0, 4)
_BESIDE: Final = slice(6, 15)
"""The prompts of the comparison, as places in `_IDS`; the second is longer, so that the first is padded beside it."""


def _apart(alone: Tensor, joined: Tensor) -> str | None:
    """Return how far apart the logits of a sequence are, alone and in a padded batch; None if they agree.

    What is NaN or infinite both times agrees: no batch has made it so.
    """
    same = (alone == joined) | (alone.isnan() & joined.isnan())
    if bool(same.all()):
        return None
    apart = (alone - joined)[~same].abs().max()
    if not bool(apart.isfinite()):
        return "NaN or infinite in one of them alone"
    share = float(apart) / max(float(alone[alone.isfinite()].abs().max()), 1e-6)
    return None if share <= _TOLERANCE.get(alone.dtype, _TOLERANCE_SHORT) else f"apart by {share:.2g} of the largest"


def _probe_logits(forward: BatchForward, beside: list[slice]) -> Tensor:
    """Return the logits of the test prompt after one more token, with prompts `beside` it in the batch."""
    ids = [each % forward.vocabulary for each in _IDS]
    rows = [_row(str(number), ids[place]) for number, place in enumerate([*beside, _PROMPT])]
    return _logits(forward, rows, ids[4])


def _logits(forward: BatchForward, rows: list[RequestRow], then: int) -> Tensor:
    """Return the logits of the last row after its prompt and the token `then`; rows join one by one."""
    batch = RowBatch(forward)
    for row in rows:
        joining = RowBatch(forward)
        joining.prefill([row])
        row.take(ChosenToken(then))
        batch.join(joining)
    return batch.decode()[-1]


def _row(name: str, ids: list[int]) -> RequestRow:
    return RequestRow(GenerationRequest(name, tuple(ids), max_tokens=2), lambda event: None)


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
