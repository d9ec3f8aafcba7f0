"""Connect all ranks for hookline's own exchange, and name the ranks that did not come.

`ranks` calls it. There is a gloo group for each process group of torch, so that nothing of hookline waits for, or is
mistaken for, a collective of the training. It is made by all ranks when they first need it, and still works when the
process group has been destroyed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from hookline.distributed import _torch_distributed
from hookline.errors import ConfigError, RankError

__all__ = ["Connections", "ConnectionsInUse", "connections", "reaching", "stop_reaching"]

_TIMEOUT: Final = "HOOKLINE_RANK_TIMEOUT"
_DEFAULT_TIMEOUT: Final = 600.0
"""As torch has it for NCCL. A rank that saves or evaluates alone for minutes is no rank that is lost."""
_FAILURES: Final = (RuntimeError, ValueError)
"""What a collective raises: gloo's own error, or a ValueError of torch's logger, which does not know our group."""
_WAIT_FOR_WORD: Final = 2.0
"""Seconds to wait for what the other ranks were doing, once one did not come. They fail within milliseconds of each
other, because gloo closes its connections."""
_WAIT_AT_EXIT: Final = 60.0
"""Seconds for which a process that ends waits for the others. If it ends by ``sys.exit(1)`` in the middle of training,
they wait for it too, so it must not wait for long."""


class Connections:
    """All ranks of one process group, connected; and why they are no more, if that is so."""

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._is_fake = dist.get_backend() == "fake"  # torch's stand-in for many ranks, where nobody answers
        self._store = _torch_distributed.default_store()
        self._group: Any = None
        self._broken = ""

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the ``value`` of every rank, by rank; the first call connects them."""
        if self._broken:
            raise RankError(f"The ranks have lost each other before: {self._broken}")
        if self._is_fake:
            return [value] * self.size
        found: list[Any] = [None] * self.size
        try:
            if self._group is None:
                limit = timedelta(seconds=timeout_seconds())
                self._group = _torch_distributed.new_gloo_group(limit, self._store, self.rank, self.size)
            dist.all_gather_object(found, value, group=self._group)
        except _FAILURES as error:
            raise self._missing(what, error) from error
        return found

    def _missing(self, what: str, error: BaseException) -> RankError:
        """Tell the others what this rank was doing, and return the error that names those that did not come."""
        doing = self._exchange_last_words(what)
        missing = [rank for rank in range(self.size) if rank not in doing]
        if not missing:
            text = f"Ranks waited for each other at different places: {_at_places(doing)}."
            advice = "Every rank has to make the same calls in the same order."
        else:
            absent = ", ".join(map(str, missing))
            text = f"Rank {absent} did not come within {timeout_seconds():g} s: {_at_places(doing)}."
            advice = (
                "Look at the log of the missing rank for its own error; every rank has to make this call, not one "
                "behind `if rank == 0:`, unless it is to_metrics(local=True). A slow rank gets more time by "
                f"{_TIMEOUT}=seconds."
            )
        self._broken = text
        return RankError(f"{text} {advice} (gloo says: {_first_line(error)})", ranks=tuple(missing))

    def note_end(self, run: str) -> None:
        """Tell the others, who may look, that this rank ends ``run``."""
        if self._store is not None and not self._is_fake:
            with suppress(RuntimeError, OSError):  # the rank that holds the store is gone
                self._store.set(_end_key(run, self.rank), "1")

    def wait_for_ends(self, run: str) -> list[int]:
        """Wait until all ranks end ``run``, for a minute at most; return the ranks that do not."""
        waiting = [rank for rank in range(self.size) if rank != self.rank]
        if self._store is None or self._is_fake:
            return []
        deadline = time.monotonic() + min(_WAIT_AT_EXIT, timeout_seconds())
        with suppress(RuntimeError, OSError):
            while True:
                waiting = [rank for rank in waiting if not self._store.check([_end_key(run, rank)])]
                if not waiting or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        return waiting

    def _exchange_last_words(self, what: str) -> dict[int, str]:
        """Leave a key in the store with what this rank was doing; return what the ranks that came were doing."""
        doing = {self.rank: what}
        store = self._store
        if store is None:
            return doing
        try:
            store.set(_word_key(self.rank), json.dumps(what))
            others = [other for other in range(self.size) if other != self.rank]
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


def _at_places(doing: dict[int, str]) -> str:
    return "; ".join(f"rank {rank} was at {each!r}" for rank, each in sorted(doing.items()))


class ConnectionsInUse:
    """Hold the connections that this process uses."""

    current: Connections | None = None
    """Those of the process group that there is."""
    kept: Connections | None = None
    """Older ones, whose process group has been destroyed, if such are used."""


def connections() -> Connections:
    """Return the connections of the process group; inside of `reaching`, those."""
    if ConnectionsInUse.kept is not None:
        return ConnectionsInUse.kept
    current = ConnectionsInUse.current
    if current is None or current.world is not dist.group.WORLD:  # another init_process_group since
        current = ConnectionsInUse.current = Connections()
    return current


def stop_reaching() -> None:
    """Use no connections of a destroyed process group any more, also inside of `reaching`: a rank is gone."""
    ConnectionsInUse.kept = None


@contextmanager
def reaching(before: Connections | None) -> Iterator[None]:
    """Reach the ranks of a run that began with ``before``, also if the process group has been destroyed since."""
    if before is None or ConnectionsInUse.kept is not None or dist.is_initialized():
        yield
        return
    ConnectionsInUse.kept = before
    try:
        yield
    finally:
        ConnectionsInUse.kept = None


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


def _first_line(error: BaseException) -> str:
    """Return the first line of what gloo said; after it, torch's logger may have raised, which knows no such group."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, RuntimeError):
        found = found.__context__
    return (str(found or error).splitlines() or [""])[0][:200]


def _end_key(run: str, rank: int) -> str:
    return f"hookline/end/{run}/{rank}"


def _word_key(rank: int) -> str:
    return f"hookline/last words/{rank}"
