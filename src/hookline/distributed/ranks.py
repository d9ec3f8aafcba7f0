"""Say which rank of a distributed run this is, gather objects of all ranks, and name the ranks that did not come.

Everything that differs by rank asks here. The variables of ``torchrun`` and the process group of torch tell; there is
nothing to configure. There is a gloo group for each process group of torch, so that nothing of hookline waits for, or
is mistaken for, a collective of the training. It is made by all ranks when they first need it, and still works when the
process group has been destroyed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from hookline.distributed import _torch_distributed
from hookline.errors import ConfigError, RankError

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


def this_rank() -> int:
    """Return the rank of this process; before ``init_process_group`` as ``torchrun`` says it, and 0 without either."""
    found = connections()
    return _from_environment("RANK", 0) if found is None else found.rank


def rank_count() -> int:
    """Return the number of ranks; before ``init_process_group`` as ``torchrun`` says it, and 1 without either."""
    found = connections()
    return _from_environment("WORLD_SIZE", 1) if found is None else found.size


def is_distributed() -> bool:
    """Return whether ranks can exchange something: there is a process group, and more than one rank in it."""
    found = connections()
    return found is not None and found.size > 1


def gather_objects(value: Any, *, what: str) -> list[Any]:
    """Return the ``value`` of every rank, in the order of the ranks, on every rank; all ranks have to call it.

    Recipe: ``gather_objects(sorted(names), what="names of hooks")``.

    Args:
        value: Anything that can be pickled.
        what: A few words for errors: what this rank is doing. Ranks that meet with different words raise `RankError`.
    """
    found = connections()
    if found is None or found.size == 1:
        return [value]
    said = found.gather((what, value), what)
    doing = [each for each, _ in said]
    if len(set(doing)) > 1:
        raise RankError(
            f"Ranks are at different places: {in_words(doing)}. Every rank has to make the same calls in the same "
            f"order; look for a call that only some ranks make."
        )
    return [each for _, each in said]


def first_of_ranks(key: str, value: str) -> str:
    """Return the ``value`` of the rank that asked first for ``key``; no rank waits for another, and none has to ask.

    Recipe: ``folder = first_of_ranks("folder of my log", datetime.now().strftime("%H%M%S"))``.
    Without a process group, or where its store has gone, it is this rank's own.
    """
    store = _torch_distributed.default_store() if has_group() else None
    if store is None or not value:
        return value
    try:
        return bytes(store.compare_set(f"hookline/first/{key}", "", value)).decode() or value
    except (RuntimeError, OSError, NotImplementedError, TypeError):  # the rank that holds it is gone, or a fake store
        return value


def in_words(by_rank: list[Any]) -> str:
    """Return "rank 0: a; ranks 1, 2: b" for one value per rank."""
    same: dict[str, list[int]] = {}
    for rank, value in enumerate(by_rank):
        same.setdefault(str(value), []).append(rank)
    return "; ".join(f"{rank_names(ranks)}: {value}" for value, ranks in same.items())


def rank_names(ranks: list[int] | tuple[int, ...]) -> str:
    """Return "rank 1" or "ranks 1, 2"; of more than eight, the first eight and how many more."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def has_group() -> bool:
    """Return whether ``init_process_group`` has been called, and the group not been destroyed since."""
    return dist.is_available() and dist.is_initialized()


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


# -- how ranks reach each other ------------------------------------------------------------------------------------


class Connections:
    """All ranks of one process group, connected; and why they are no more, if that is so."""

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._is_fake = dist.get_backend() == "fake"  # torch's stand-in for many ranks, where nobody answers
        self._store = None if self._is_fake else _torch_distributed.default_store()
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
                limit = timedelta(seconds=_timeout_seconds())
                self._group = _torch_distributed.new_gloo_group(limit, self._store, self.rank, self.size)
            dist.all_gather_object(found, value, group=self._group)
        except _FAILURES as error:
            raise self._missing(what) from error
        return found

    def _missing(self, what: str) -> RankError:
        """Tell the others what this rank was doing, and return the error that names those that did not come."""
        doing = {self.rank: what, **self._exchange("last words", what, _WAIT_FOR_WORD)}
        missing = [rank for rank in range(self.size) if rank not in doing]
        places = "; ".join(f"rank {rank} was at {each!r}" for rank, each in sorted(doing.items()))
        if not missing:
            self._broken = f"Ranks waited for each other at different places: {places}."
            return RankError(f"{self._broken} Every rank has to make the same calls in the same order.")
        absent = ", ".join(map(str, missing))
        self._broken = f"Rank {absent} did not come within {_timeout_seconds():g} s: {places}."
        advice = (
            "Look at the log of the missing rank for its own error; every rank has to make this call, not one behind "
            f"`if rank == 0:`, unless it is to_metrics(local=True). A slow rank gets more time by {_TIMEOUT}=seconds."
        )
        return RankError(f"{self._broken} {advice}")

    def end(self, run: str, *, is_exit: bool) -> list[int]:
        """Tell the others that this rank ends ``run``; return the ranks that do not.

        With ``is_exit``, wait for them, for a minute at most; without it, nobody waits, and none is returned.
        """
        if self._store is None:
            return []
        seconds = min(_WAIT_AT_EXIT, _timeout_seconds()) if is_exit else 0.0
        ended = self._exchange(f"end of {run}", "ended", seconds)
        return [rank for rank in range(self.size) if rank not in (*ended, self.rank)] if is_exit else []

    def _exchange(self, key: str, text: str, seconds: float) -> dict[int, str]:
        """Leave a text in the store; return those of all ranks that have left one within so many seconds."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError, OSError):  # the rank that holds the store is gone
            if self._store is not None:
                self._store.set(f"hookline/{key}/{self.rank}", text)
            while self._store is not None and len(found) < self.size and time.monotonic() < deadline:
                for rank in set(range(self.size)) - set(found):
                    if self._store.check([f"hookline/{key}/{rank}"]):
                        found[rank] = self._store.get(f"hookline/{key}/{rank}").decode()
                time.sleep(0.0 if len(found) == self.size else 0.02)
        return found


class _InUse:
    """The connections that this process uses."""

    current: Connections | None = None
    """Those of the last process group."""
    kept: Connections | None = None
    """Older ones, whose process group has been destroyed, inside of `reaching`."""


def connections() -> Connections | None:
    """Return the connections of the process group; inside of `reaching`, those; None without either."""
    if _InUse.kept is not None or not has_group():
        return _InUse.kept
    if _InUse.current is None or _InUse.current.world is not dist.group.WORLD:  # another init_process_group since
        _InUse.current = Connections()
    return _InUse.current


def stop_reaching() -> None:
    """Use no connections of a destroyed process group any more, also inside of `reaching`: a rank is gone."""
    _InUse.kept = None


@contextmanager
def reaching(before: Connections | None) -> Iterator[None]:
    """Reach the ranks of a run that began with ``before``, also if the process group has been destroyed since."""
    if before is None or _InUse.kept is not None or has_group():
        yield
        return
    _InUse.kept = before
    try:
        yield
    finally:
        _InUse.kept = None


def _timeout_seconds() -> float:
    """Return how long a rank waits for the others."""
    text = os.environ.get(_TIMEOUT) or str(_DEFAULT_TIMEOUT)
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise ConfigError(f"{_TIMEOUT}={text!r}: write a number of seconds, 60 for instance.")
