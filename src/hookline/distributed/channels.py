"""Connect all ranks for hookline's own exchange, and name the ranks that did not come.

`ranks` and `exchange` call it. A `Channel` is a gloo group of its own, so that nothing of hookline waits for, or is
mistaken for, a collective of the training. It is made by all ranks when they first need it.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from hookline.distributed import _torch_distributed
from hookline.errors import ConfigError, RankError

__all__ = ["Channel", "channel"]

_TIMEOUT: Final = "HOOKLINE_RANK_TIMEOUT"
_DEFAULT_TIMEOUT: Final = 600.0
"""As torch has it for NCCL. A rank that saves or evaluates alone for minutes is no rank that is lost."""
_FAILURES: Final = (RuntimeError, ValueError)
"""What a collective raises: gloo's own error, or a ValueError of torch's logger, which does not know our group."""
_WAIT_FOR_WORD: Final = 2.0
"""Seconds to wait for what the other ranks were doing, once one did not come. They fail within milliseconds of each
other, because gloo closes its connections."""


class Channel:
    """All ranks, connected for one purpose."""

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self._group = group
        self._is_fake = dist.get_backend() == "fake"
        """Whether this is torch's stand-in for many ranks, where nobody answers."""

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the ``value`` of every rank, by rank."""
        if self._is_fake:
            return [value] * dist.get_world_size()
        found: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(found, value, group=self._group)
        except _FAILURES as error:
            raise _missing(what, error) from error
        return found

    def broadcast(self, value: Any, rank: int, what: str) -> Any:
        """Return the ``value`` of one rank."""
        box = [value]
        try:
            dist.broadcast_object_list(box, group=self._group, group_src=rank)
        except _FAILURES as error:
            raise _missing(what, error) from error
        return box[0]

    def reduce(self, added: Tensor, kept: Tensor, what: str) -> None:
        """Put the sums over ranks in the place of ``added``, and the largest in the place of ``kept``."""
        try:
            # Both are under way at once: the second waits for no answer to the first.
            works = [
                dist.all_reduce(numbers, op=op, group=self._group, async_op=True)
                for numbers, op in ((kept, dist.ReduceOp.MAX), (added, dist.ReduceOp.SUM))
            ]
            for work in works:
                if work is not None:  # the fake process group returns none
                    work.wait()
        except _FAILURES as error:
            raise _missing(what, error) from error


class _Connections:
    """The channels of one process group, and why they are broken, if they are."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.channels: dict[str, Channel] = {}
        self.broken = ""


_current = _Connections(None)


def channel(name: str, what: str = "") -> Channel:
    """Return the channel ``name``; connect it the first time, which all ranks have to do."""
    global _current
    world = dist.group.WORLD
    if _current.world is not world:  # another init_process_group has been called since
        _current = _Connections(world)
    if _current.broken:
        raise RankError(f"The ranks have lost each other before: {_current.broken}")
    found = _current.channels.get(name)
    if found is None:
        found = _current.channels[name] = Channel(name, _connect(name, what or name))
    return found


def timeout_seconds() -> float:
    """Return how long a rank waits for the others."""
    text = os.environ.get(_TIMEOUT, "")
    try:
        seconds = float(text) if text else _DEFAULT_TIMEOUT
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ConfigError(f"{_TIMEOUT}={text!r}: write a number of seconds, 60 for instance.")
    return seconds


def _connect(name: str, what: str) -> Any:
    if dist.get_backend() == "fake":  # torch's stand-in for many ranks: nobody is there to connect to
        return dist.group.WORLD
    try:
        return _torch_distributed.new_gloo_group(name, timedelta(seconds=timeout_seconds()))
    except RuntimeError as error:
        raise _missing(what, error) from error


def _missing(what: str, error: Exception) -> RankError:
    """Tell the others what this rank was doing, and return the error that names those that did not come."""
    doing = _exchange_last_words(what)
    missing = [rank for rank in range(dist.get_world_size()) if rank not in doing]
    present = "; ".join(f"rank {rank} was at {each!r}" for rank, each in sorted(doing.items()))
    if not missing:
        text = f"Ranks waited for each other at different places: {present}."
        advice = "Every rank has to make the same calls in the same order."
    else:
        text = f"Rank {', '.join(map(str, missing))} did not come within {timeout_seconds():g} s: {present}."
        advice = (
            "Look at the log of the missing rank for its own error; every rank has to make this call. A slow rank gets "
            f"more time by {_TIMEOUT}=seconds."
        )
    _current.broken = text
    first = error.__context__ if isinstance(error, ValueError) and error.__context__ is not None else error
    return RankError(f"{text} {advice} (gloo says: {str(first).splitlines()[0][:200]})", ranks=tuple(missing))


def _exchange_last_words(what: str) -> dict[int, str]:
    """Leave a key in the store with what this rank was doing; return what the ranks that came were doing."""
    rank, store = dist.get_rank(), _torch_distributed.default_store()
    doing = {rank: what}
    if store is None:
        return doing
    try:
        store.set(_word_key(rank), json.dumps(what))
        others = [other for other in range(dist.get_world_size()) if other != rank]
        deadline = time.monotonic() + _WAIT_FOR_WORD
        while others and time.monotonic() < deadline:
            for other in [each for each in others if store.check([_word_key(each)])]:
                doing[other] = json.loads(store.get(_word_key(other)))
                others.remove(other)
            if others:
                time.sleep(0.02)
    except (RuntimeError, OSError):  # the rank that holds the store is gone
        pass
    return doing


def _word_key(rank: int) -> str:
    return f"hookline/last words/{rank}"
