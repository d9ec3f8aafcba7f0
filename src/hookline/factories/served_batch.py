"""Find the tensor of an output that a hook reads, and whose tokens the running forward has.

The hooks of this folder call these. Two sources say whose tokens they are: the engine that runs the forward
(`observe.tokens`), or a batch object like SGLang's ``ForwardBatch`` among the inputs of a module, known by its
attributes. Without either, a hook for some requests does nothing and logs that once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from hookline.factories.factory_hook import Observer
from hookline.observe.tokens import ChosenTokens, Tokens, current_tokens, serving
from hookline.sites import _torch
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = [
    "Positions",
    "Stage",
    "TokenOptions",
    "measurable",
    "only_in_stage",
    "output_tensor",
    "running",
    "shape_of",
    "tokens_of_batch",
    "without_padding",
]

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


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; of a nested tensor, how many tensors it has."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def without_padding(tensor: Tensor) -> Tensor | None:
    """Return the real entries of an output of a served batch; see `Tokens.real`.

    Outputs at padding have no meaning, and may be NaN.
    """
    tokens = current_tokens()
    return tensor if tokens is None else tokens.real(tensor)


# -- whose tokens ------------------------------------------------------------------------------------------------


def running(inputs: Any) -> Tokens | None:
    """Return whose tokens the running forward has; None if nobody says."""
    tokens = current_tokens()
    if tokens is not None:
        return tokens
    for each in inputs if isinstance(inputs, tuple) else ():
        if not isinstance(each, Tensor) and hasattr(each, "input_ids") and hasattr(each, "seq_lens"):
            return tokens_of_batch(each)
    return None


def tokens_of_batch(batch: Any) -> Tokens | None:
    """Return whose tokens are in ``batch``, a ``ForwardBatch`` of SGLang, read by its attributes.

    Requests are called by their ``rid``. None if the host does not know them.
    """
    ids = batch.input_ids if isinstance(batch.input_ids, Tensor) else None
    mode = getattr(batch, "forward_mode", None)
    # In two-batch overlap modules are called with halves of the batch, which are among their inputs.
    if getattr(batch, "tbo_split_seq_index", None) is not None or (mode is not None and mode.is_idle()):
        return None
    names = _names(batch)
    lengths = _lengths(batch, mode, len(names), ids)
    if not lengths or len(lengths) != len(names):
        return None
    firsts = _firsts(batch, lengths)
    total = sum(lengths)
    return Tokens(
        names,
        lengths,
        firsts,
        _phases(batch, mode, lengths),
        ids=_first(ids, total),
        positions=_first(getattr(batch, "positions", None), total) if None in firsts else None,
    )


def _names(batch: Any) -> tuple[str, ...]:
    named = getattr(batch, "rids", None)
    if isinstance(named, list | tuple) and named:
        return tuple(map(str, named))
    pool = getattr(batch, "req_pool_indices", None)
    if not isinstance(pool, Tensor):
        return ()
    return tuple(f"pool-{number}" for number in pool.tolist()) if pool.device.type == "cpu" else ("",) * len(pool)


def _lengths(batch: Any, mode: Any, count: int, ids: Tensor | None) -> tuple[int, ...]:
    """Return how many tokens each request has in the batch; nothing if that is not known."""
    known = _numbers(getattr(batch, "extend_seq_lens_cpu", None)) or _numbers(getattr(batch, "extend_seq_lens", None))
    is_decode = mode.is_decode() if mode is not None else getattr(batch, "extend_seq_lens", None) is None and not known
    if is_decode:
        return (1,) * count if mode is not None or ids is None or len(ids) == count else ()
    if known is not None:
        return known
    # Speculative decoding checks as many tokens of each request.
    if ids is not None and count and mode is not None and mode.is_target_verify() and len(ids) % count == 0:
        return (len(ids) // count,) * count
    return ()


def _phases(batch: Any, mode: Any, lengths: Sequence[int]) -> tuple[str, ...]:
    if mode is None:
        is_decode = getattr(batch, "extend_seq_lens", None) is None and not getattr(batch, "extend_seq_lens_cpu", None)
        return ("decode" if is_decode else "prefill",) * len(lengths)
    if mode.is_decode() or mode.is_target_verify():
        return ("decode",) * len(lengths)
    if not mode.is_mixed():
        return ("prefill",) * len(lengths)
    # SGLang joins running answers to prompts as rows of one token behind a prefix. The batch does not say which; the
    # last piece of a prompt that is cut in pieces looks the same if it has one token.
    prefixes = getattr(batch, "extend_prefix_lens_cpu", None) or [0] * len(lengths)
    return tuple(
        "decode" if length == 1 and prefix else "prefill" for length, prefix in zip(lengths, prefixes, strict=True)
    )


def _firsts(batch: Any, lengths: Sequence[int]) -> tuple[int | None, ...]:
    """Return the position of the first token of each request, if the host knows them."""
    positions = getattr(batch, "positions", None)
    known = _numbers(positions) if isinstance(positions, Tensor) and positions.dim() == 1 else None
    if known is None or len(known) < sum(lengths):
        return (None,) * len(lengths)
    begins = [sum(lengths[:row]) for row in range(len(lengths))]
    return tuple(known[begin] for begin in begins)


def _numbers(values: Any) -> tuple[int, ...] | None:
    """Return the whole numbers that the host has; None if only a device has them."""
    if isinstance(values, Tensor):
        return None if values.device.type != "cpu" else tuple(map(int, values.flatten().tolist()))
    return tuple(map(int, values)) if isinstance(values, list | tuple) and values else None


def _first(value: Any, count: int) -> Tensor | None:
    """Return the first ``count`` numbers; what follows them is padding."""
    return value[:count] if isinstance(value, Tensor) and value.dim() == 1 else None


# -- one stage of a served model -----------------------------------------------------------------------------------

_HookT = TypeVar("_HookT", bound=Observer)


def only_in_stage(cls: type[_HookT], stage: Stage) -> type[_HookT]:
    """Return ``cls`` as a class that observes the ``stage`` ``"prefill"`` or ``"decode"`` alone; itself for ``"both"``.

    A class of its own, as it reads the inputs: compiled code keeps what the code of a hook reads.
    """
    if stage == "both":
        return cls
    make: Any = type
    filtered: type[_HookT] = make(cls.__qualname__, (_OnlyInStage, cls), {"stage": stage})
    return filtered


class _OnlyInStage(Observer):
    """Call the observer behind it in one stage alone."""

    stage = "both"

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Observe the output, in the stage that was chosen."""
        tokens = running(inputs)
        if tokens is None:
            self.log_unknown("phase")
        elif tokens.phase == self.stage:
            super().__call__(module, inputs, output, site=site)
        elif tokens.has_stage(self.stage):
            with serving(tokens.in_stage(self.stage)):
                super().__call__(module, inputs, _picked(output, tokens, self.stage), site=site)


_torch.leave_to_python(_OnlyInStage.__call__)


def _picked(value: Any, tokens: Tokens, stage: str) -> Any:
    """Return the tokens in ``stage`` of each tensor of an output that has an entry for each token."""
    if type(value) is tuple:
        return tuple(_picked(each, tokens, stage) for each in value)
    found = tokens.choose(stage=stage).pick(value) if isinstance(value, Tensor) else None
    return value if found is None else found
