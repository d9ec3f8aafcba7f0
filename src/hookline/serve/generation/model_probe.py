"""What a model is like, found out by running it a few times on a few tokens before anybody is served.

Takes the model from ``engine``, hands back which modules have hidden states of what size, so that a request can be
refused before it runs, and an error where the model gives other answers in a padded batch than alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookline.errors import OptionError
from hookline.serve.generation.hidden_states import by_token, shown
from hookline.serve.generation.hooks_suspended import without_our_hooks
from hookline.serve.generation.request_row import Row
from hookline.serve.generation.row_batch import Batch
from hookline.serve.generation.row_hidden_states import Place
from hookline.serve.generation.sampling import Choice
from hookline.serve.generation_request import Request
from hookline.sites.targets import select
from hookline.sites.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookline.serve.generation.batch_forward import Forward

__all__ = ["Shape", "end_tokens", "longest_sequence", "try_out"]

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_TOLERANCE_SHORT = 0.1
"""Of the largest logit; for numbers of 16 bits, of which every sum has another rounding."""


_TOKENS = 8
"""Of each prompt that is tried."""


class Shape(NamedTuple):
    """The hidden states of a module, of one token."""

    features: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return self.features * self.dtype.itemsize


def try_out(forward: Forward, *, batches: bool) -> dict[Place, Shape]:
    """Run the model on a few tokens; which hidden states it has, or an error that says why it cannot be served."""
    kind = type(unwrap(forward.model)).__name__
    try:
        with forward.eagerly(), without_our_hooks(forward.model):  # compiling is for what is served
            found = _find_shapes(forward)
            apart = _apart(forward) if batches else None
    except Exception as error:
        raise OptionError(
            f"{kind} cannot be served: it fails on a few tokens with a DynamicCache, which keeps keys and values of "
            f"attention alone ({type(error).__name__}: {error})."
        ) from error
    if apart is not None:
        raise OptionError(
            f"{kind} gives a sequence other logits in a padded batch than alone (apart by {apart:.2g} of the largest), "
            "so that requests cannot share a batch; serve it with max_batch=1."
        )
    return found


def _find_shapes(forward: Forward) -> dict[Place, Shape]:
    """Which modules give a row of numbers for each token, or take one, and how large it is.

    As many numbers as there are tokens is not enough: they could be in another order, sorted by expert or column after
    column, where one request would get what is another's. So the same prompt is run in two places, beside others.
    """
    a, b, c = ([(each + 3 * step) % forward.vocabulary for step in range(_TOKENS)] for each in range(3))
    first = _states_of(forward, [_row("a", a), _row("b", b)], 0)
    second = _states_of(forward, [_row("c", c), _row("a", a)], 1)
    return {
        place: Shape(states.shape[1], states.dtype)
        for place, states in first.items()
        if place in second and _agree(states, second[place])
    }


def _states_of(forward: Forward, rows: list[Row], place: int) -> dict[Place, Tensor]:
    """What every module gives and takes for one of two rows; (tokens, features)."""
    found: dict[Place, Tensor] = {}

    def note(name: str, of: str, value: Any) -> None:
        tokens = by_token(shown(value), len(rows), _TOKENS)
        if tokens is not None and Place(name, of) not in found:  # a module that is called again is seen once
            found[Place(name, of)] = tokens[place * _TOKENS : (place + 1) * _TOKENS].clone()

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        note(name, "input", (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        note(name, "output", output)

    with ExitStack() as handles:
        for name, module in select(forward.model, "*"):
            handles.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.enter_context(module.register_forward_hook(partial(after, name)))
        Batch(forward).prefill(rows)
    return found


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether most tokens have the same numbers; of a mixture, rounding may send a token to another expert."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    limit = _TOLERANCE.get(one.dtype, _TOLERANCE_SHORT if one.is_floating_point() else 0.0)
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    apart = (one - other).abs().amax(1)
    return bool((apart <= limit * one.abs().amax(1)).double().mean() > 0.5)


def _apart(forward: Forward) -> float | None:
    """How far apart the logits of a sequence are, alone and padded in a batch it has joined; None if they agree."""
    ids = [(7 * step + 3) % forward.vocabulary for step in range(16)]
    alone = _logits(forward, [_row("a", ids[:4])], ids[4])
    joined = _logits(forward, [_row("b", ids[6:15]), _row("a", ids[:4])], ids[4])
    scale = max(float(alone.abs().max()), 1e-6)
    apart = float((alone - joined).abs().max()) / scale
    limit = _TOLERANCE.get(alone.dtype, _TOLERANCE_SHORT)
    return None if apart <= limit else apart  # NaN is not


def _logits(forward: Forward, rows: list[Row], then: int) -> Tensor:
    """Of the last row, after its prompt and one more token; rows join one after the other."""
    batch = Batch(forward)
    for row in rows:
        joining = Batch(forward)
        joining.prefill([row])
        row.take(Choice(then))
        batch.join(joining)
    return batch.decode()[-1]


def _row(name: str, ids: list[int]) -> Row:
    return Row(Request(name, tuple(ids), max_tokens=2), lambda event: None)


def longest_sequence(model: nn.Module, wanted: int | None) -> int | None:
    """How many tokens a sequence may have: what is wanted, or all positions that the model is said to have."""
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
    """The tokens after which nothing follows."""
    inner = unwrap(model)
    for owner in (getattr(inner, "generation_config", None), getattr(inner, "config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
