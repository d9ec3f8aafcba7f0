"""Which forwards, requests and tokens of a served model a hook is for.

Takes what the engine says of the running forward (`batch_rows`), or the batch object among the inputs of a module
(`engine_batch`); hands answers to the hooks beside it. Where nobody says anything, a hook that was told to choose does
nothing, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.factories.batch_rows import BatchRows, current_rows
from hookline.factories.engine_batch import TokenBatch, find_batch
from hookline.factories.factory_hook import Observer
from hookline.factories.output_rows import by_token
from hookline.sites import _torch

if TYPE_CHECKING:
    from torch import nn

    from hookline.sites.site_info import Site

__all__ = ["PHASES", "OfPhase", "Served", "chosen_tokens", "request_names", "running", "say_unknown"]

logger = logging.getLogger("hookline.factories")

PHASES: Final = ("both", "prefill", "decode")

Served = BatchRows | TokenBatch
"""Whose tokens are in a forward, by either way of saying so."""


def running(inputs: Any) -> Served | None:
    """What is known of the forward that is running."""
    return current_rows() or find_batch(inputs)


def say_unknown(name: str, what: str) -> None:
    """A hook has met a forward that nobody has said anything about."""
    logger.warning(
        "%s is for some %s, and nobody says whose a forward is: no engine (hookline.factories.serving), and no batch "
        "among the inputs. It does nothing in such forwards",
        name,
        what,
    )


class OfPhase(Observer):
    """Makes an observer one of prefill or decode alone; a class of its own, as it looks at the inputs."""

    phase = "both"
    _has_said = False

    def __call__(self, module: nn.Module, inputs: Any, output: Any, *, site: Site | None = None) -> None:
        """A module has given this out."""
        served = running(inputs)
        if served is not None:
            if served.phase == self.phase:
                super().__call__(module, inputs, output, site=site)
        elif not self._has_said:
            self._has_said = True
            say_unknown(self.name, "phase")


_torch.leave_to_python(OfPhase.__call__)


# -- some requests -------------------------------------------------------------------------------------------


def request_names(factory: str, value: Any) -> tuple[str, ...] | None:
    """Names of requests, or patterns such as ``"exp-a-*"``; None for all."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise OptionError(f"{factory}: requests is a list of names, such as ['r1', 'exp-a-*'], got {value!r}.")
    return tuple(value)


def chosen_tokens(main: Tensor, served: Served, names: Sequence[str] | None, only_last: bool) -> Tensor | bool | None:
    """Which numbers of an output belong to the chosen requests: a mask that broadcasts to it, or all or none of them.

    None if the output has no place for each token, nor one for each request.
    """
    if isinstance(served, TokenBatch):
        return _of_flat(main, served, names, only_last)
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


def _of_flat(main: Tensor, batch: TokenBatch, names: Sequence[str] | None, only_last: bool) -> Tensor | bool | None:
    """The same where the tokens of all requests lie in one row; nothing of it waits for a device."""
    named, lengths = _named(main, batch, names), batch.lengths
    if not main.dim() or (names is not None and named is None):
        return None
    beside = [1] * (main.dim() - 1)
    if lengths is None:  # each request has one token, unless there are several for each, and nobody says which
        return True if named is None else named.view(-1, *beside) if len(named) == len(main) else None
    held = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
    ends = held.to(main.device, torch.int64, non_blocking=True).cumsum(0)
    places = torch.arange(len(main), device=main.device)
    chosen = torch.isin(places, ends - 1) if only_last else places < ends[-1]
    if named is not None:
        whose = torch.searchsorted(ends, places, right=True)  # behind the last of them, one more than there are
        chosen = chosen & torch.cat([named, named.new_zeros(1)])[whose]
    return chosen.view(-1, *beside)


def _named(main: Tensor, batch: TokenBatch, names: Sequence[str] | None) -> Tensor | None:
    """For each request of a flat batch, whether it is among those; None if all are, or nobody says whose it is."""
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
