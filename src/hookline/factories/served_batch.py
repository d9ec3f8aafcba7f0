"""Find the tensor of an output that a hook reads, and the rows, tokens and requests of the running batch in it.

The hooks of this folder call these. Two sources say whose tokens are in a forward: the engine that runs it
(`batch_rows`), or a batch object like SGLang's ``ForwardBatch`` among the inputs of a module, known by its attributes
(`TokenBatch`). Without either, a hook for some requests does nothing and logs that once. No function waits for a
device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.batch_rows import BatchRows, TokenBatch, current_batch, current_rows, serving
from hookline.factories.factory_hook import Observer
from hookline.sites import _torch
from hookline.tree import main_tensor

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = [
    "STAGES",
    "Served",
    "TokenBatch",
    "by_token",
    "chosen_tokens",
    "has_stage",
    "last_tokens",
    "log_unknown",
    "measurable",
    "only_in_stage",
    "output_tensor",
    "request_names",
    "running",
    "shape_of",
    "without_padding",
]

logger = logging.getLogger("hookline.factories")

STAGES: Final = ("both", "prefill", "decode")
"""The values of the option ``phase``, by which users choose the stage of a served request."""


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


def by_token(tensor: Tensor, rows: BatchRows) -> Tensor | None:
    """Return the tensor as (batch, sequence, …), if it has an entry for each token, also flat; else None."""
    if not rows.starts:
        return None
    batch, length = len(rows.starts), rows.starts[0] + len(rows.tokens[0])
    if tensor.dim() == 2 and tensor.shape[0] == batch * length:
        return tensor.reshape(batch, length, tensor.shape[1])
    # Of more dimensions, the second is not that of the sequence: (batch, heads, sequence, sequence).
    return tensor if tensor.dim() in (2, 3) and tensor.shape[:2] == (batch, length) else None


def without_padding(tensor: Tensor) -> Tensor | None:
    """Return the real rows of a padded batch, as (tokens, features); the tensor itself where nothing is padded.

    A batch of prompts of different lengths is padded on the left; outputs there have no meaning, and may be NaN. None
    where a CUDA graph is recorded: which rows those are would be fixed in it.
    """
    rows = current_rows()
    if rows is None or not any(rows.starts):
        return _without_tail(tensor, current_batch())
    tokens = by_token(tensor, rows)
    if tokens is None:
        return tensor
    return None if _torch.capturing() else tokens.flatten(0, 1).index_select(0, _real(rows, tensor.device))


def _without_tail(tensor: Tensor, batch: Served | None) -> Tensor:
    """Return the real tokens of a flat batch; an engine that replays graphs fills it up to the size of one."""
    if not isinstance(batch, TokenBatch) or batch.request_ids is None or not tensor.dim():
        return tensor
    lengths = batch.lengths
    if isinstance(lengths, Tensor):  # adding them up would wait for the device
        return tensor
    total = len(batch.request_ids) if lengths is None else sum(lengths)
    return tensor[:total] if tensor.shape[0] > total else tensor


class _Last:
    """Keep the indices of the last forward's real rows: every layer of it needs the same."""

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


# -- the batch of a serving system --------------------------------------------------------------------------------


def find_batch(inputs: Any) -> TokenBatch | None:
    """Return the batch among the inputs of a module, if one of them has its attributes."""
    for each in inputs if isinstance(inputs, tuple) else ():
        if not isinstance(each, Tensor) and hasattr(each, "input_ids") and hasattr(each, "seq_lens"):
            return _token_batch(each)
    return None


def last_tokens(inputs: Any, main: Tensor) -> Tensor | None:
    """Return which rows of a flat batch are the last of their request; None if all are, or it is unknown."""
    batch = find_batch(inputs)
    if batch is None or batch.lengths is None:
        return None
    lengths = batch.lengths
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths)
    return lengths.to(main.device, torch.int64, non_blocking=True).cumsum(0) - 1


def _token_batch(batch: Any) -> TokenBatch:
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


# -- one stage of a served model -----------------------------------------------------------------------------------

Served = BatchRows | TokenBatch
"""Whose tokens are in a forward, from either source."""


def running(inputs: Any) -> Served | None:
    """Return what is known of the running forward."""
    return current_batch() or find_batch(inputs)


def has_stage(served: Served, stage: str) -> bool:
    """Return whether a request of the forward is in the ``stage``; ``"both"`` always is."""
    if stage == "both" or served.phase == stage:
        return True
    return isinstance(served, TokenBatch) and served.phases is not None and stage in served.phases


def log_unknown(name: str, what: str) -> None:
    """Log that the hook ``name`` has met a forward of which nothing is known."""
    logger.warning(
        "%s is for some %s, and it is not known which a forward has: it does not run in an engine "
        "(hookline.factories.serving), and no batch is among its inputs. It does nothing in such forwards. In a plain "
        "generate(), give hookline.patch a function",
        name,
        what,
    )


_HookT = TypeVar("_HookT", bound=Observer)


def only_in_stage(cls: type[_HookT], stage: str) -> type[_HookT]:
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
    _has_logged = False

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """Observe the output, in the stage that was chosen."""
        served = running(inputs)
        if served is not None:
            if served.phase == self.stage:
                super().__call__(module, inputs, output, site=site)
            elif isinstance(served, TokenBatch) and has_stage(served, self.stage):
                tokens, batch = _of_stage(served, self.stage)
                with serving(batch):
                    super().__call__(module, inputs, _picked(output, tokens, _count(served)), site=site)
        elif not self._has_logged:
            self._has_logged = True
            log_unknown(self.name, "phase")


_torch.leave_to_python(_OnlyInStage.__call__)


def _count(batch: TokenBatch) -> int:
    lengths = _host_lengths(batch)
    return sum(lengths)


def _host_lengths(batch: TokenBatch) -> list[int]:
    """Return how many tokens each request has; batches with ``phases`` have them on the host."""
    phases = batch.phases or ()
    given = batch.lengths
    return [1] * len(phases) if given is None else [int(each) for each in given]


def _of_stage(batch: TokenBatch, stage: str) -> tuple[list[int], TokenBatch]:
    """Return the places of the tokens in ``stage`` of a batch that has both, and the table of these alone."""
    phases, lengths = batch.phases or (), _host_lengths(batch)
    places: list[int] = []
    begin = 0
    for phase, length in zip(phases, lengths, strict=True):
        places += range(begin, begin + length) if phase == stage else ()
        begin += length
    kept = [row for row, phase in enumerate(phases) if phase == stage]
    names = batch.request_ids
    return places, TokenBatch(
        input_ids=_picked(batch.input_ids, places, begin),
        positions=_picked(batch.positions, places, begin),
        lengths=tuple(lengths[row] for row in kept),
        request_ids=names if names is None or isinstance(names, Tensor) else tuple(names[row] for row in kept),
        phase=stage,
    )


def _picked(value: Any, places: list[int], count: int) -> Any:
    """Return the tokens at ``places`` of each tensor of an output that has an entry for each of ``count`` tokens."""
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_picked(each, places, count) for each in value)
    if not isinstance(value, Tensor) or not value.dim() or value.shape[0] < count:
        return value
    return value.index_select(0, torch.tensor(places).to(value.device, non_blocking=True))


# -- some requests -------------------------------------------------------------------------------------------


def request_names(factory: str, value: Any) -> tuple[str, ...] | None:
    """Return names of requests, or patterns such as ``"exp-a-*"``; None for all."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise OptionError(f"{factory}: requests is a list of names, such as ['r1', 'exp-a-*'], got {value!r}.")
    return tuple(value)


def chosen_tokens(
    main: Tensor, served: Served, names: Sequence[str] | None, only_last: bool, stage: str = "both"
) -> Tensor | bool | None:
    """Return which numbers of an output belong to the chosen requests: a mask that broadcasts to it, or a bool.

    In a flat batch of prompts and answers, ``stage`` chooses among them. None if the output has no entry for each
    token, nor one for each request.
    """
    if isinstance(served, TokenBatch):
        return _of_flat(main, served, names, only_last, stage)
    is_named = [_is_among(request, names) for request in served.request_ids]
    if not any(is_named):
        return False
    tokens = by_token(main, served)
    if tokens is None or tokens.shape[1] == 1:
        by_row = tokens is not None or (main.dim() >= 2 and len(main) == len(is_named))
        return _mask(main, is_named) if by_row else None
    length = tokens.shape[1]
    firsts = [length - 1 if only_last else start for start in served.starts]
    flags = [
        is_there and column >= first
        for is_there, first in zip(is_named, firsts, strict=True)
        for column in range(length)
    ]
    return _mask(main, flags, main.shape[:2] if main.dim() == tokens.dim() else main.shape[:1])


def _of_flat(
    main: Tensor, batch: TokenBatch, names: Sequence[str] | None, only_last: bool, stage: str
) -> Tensor | bool | None:
    """Return the same where the tokens of all requests are in one row."""
    named, lengths = _named(main, batch, names), batch.lengths
    if not main.dim() or (names is not None and named is None):
        return None
    if batch.phases is not None and stage != "both":
        in_stage = torch.tensor([phase == stage for phase in batch.phases]).to(main.device, non_blocking=True)
        named = in_stage if named is None else named & in_stage
    beside = [1] * (main.dim() - 1)
    if lengths is None:  # one token for each request, unless there are several, of unknown requests
        return True if named is None else named.view(-1, *beside) if len(named) == len(main) else None
    held = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
    ends = held.to(main.device, torch.int64, non_blocking=True).cumsum(0)
    places = torch.arange(len(main), device=main.device)
    chosen = torch.isin(places, ends - 1) if only_last else places < ends[-1]
    if named is not None:
        whose = torch.searchsorted(ends, places, right=True)  # behind the last one, the number of requests
        chosen = chosen & torch.cat([named, named.new_zeros(1)])[whose]
    return chosen.view(-1, *beside)


def _named(main: Tensor, batch: TokenBatch, names: Sequence[str] | None) -> Tensor | None:
    """Return, for each request of a flat batch, whether it is named; None if all are, or it is unknown."""
    ids = batch.request_ids
    if names is None or ids is None:
        return None
    if not isinstance(ids, Tensor):
        return torch.tensor([_is_among(each, names) for each in ids]).to(main.device, non_blocking=True)
    pools = [int(name[5:]) for name in names if name.startswith("pool-") and name[5:].isdecimal()]
    wanted = torch.tensor(pools, dtype=ids.dtype).to(main.device, non_blocking=True)
    return torch.isin(ids.to(main.device, non_blocking=True), wanted)


def _is_among(request: str, names: Sequence[str] | None) -> bool:
    return names is None or any(fnmatchcase(request, name) for name in names)


def _mask(main: Tensor, flags: list[bool], shape: Sequence[int] | None = None) -> Tensor | bool:
    if all(flags):
        return True
    mask = torch.tensor(flags).to(main.device, non_blocking=True)
    shape = (len(flags),) if shape is None else shape
    return mask.view(*shape, *[1] * (main.dim() - len(shape)))
