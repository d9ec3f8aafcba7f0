"""Say which request each token of an output belongs to, as far as the host knows it without waiting for a device.

``probe`` calls `owners_of`, and ``steer`` `count_tokens`, with what `served_batch` knows of the running forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import Tensor

from hookline.factories.batch_rows import BatchRows
from hookline.factories.served_batch import Served, TokenBatch

__all__ = ["TokenOwners", "count_tokens", "owners_of"]


@dataclass(frozen=True, slots=True)
class TokenOwners:
    """The real tokens of a forward that were chosen; every tuple has one entry for each."""

    places: tuple[int, ...]
    """Where the token is, if all tokens of the output are in one row."""
    requests: tuple[str, ...]
    positions: tuple[int | None, ...]
    """Its position in the sequence of prompt and answer; None if only a device knows it."""
    count: int
    """How many tokens the output has, padding included; in a flat batch at least so many."""
    is_flat: bool

    def pick(self, values: Tensor) -> Tensor | None:
        """Return the entries of the chosen tokens; None if ``values`` (tokens, …) has not one for each."""
        if len(values) != self.count and not (self.is_flat and len(values) > self.count):
            return None
        if len(self.places) == len(values):
            return values
        with torch.inference_mode(False):
            places = torch.tensor(self.places, dtype=torch.int64).to(values.device, non_blocking=True)
        return values.index_select(0, places)


class _LastOwners:
    """Keep the answer for the last forward: every layer of it asks the same. One tuple, for threads."""

    kept: tuple[Served | None, tuple[tuple[str, ...] | None, bool], TokenOwners | None] = None, (None, False), None


_LAST: Final = _LastOwners()


def owners_of(served: Served, names: tuple[str, ...] | None = None, *, only_last: bool = False) -> TokenOwners | None:
    """Return the tokens of the requests that ``names`` match, all by default; None if the host does not know them.

    With ``only_last``, the last token of each request.
    """
    of, asked, known = _LAST.kept
    if of is served and asked == (names, only_last):
        return known
    found = _of_rows(served) if isinstance(served, BatchRows) else _of_flat(served)
    chosen = None if found is None else _chosen(found, names, only_last)
    _LAST.kept = served, (names, only_last), chosen
    return chosen


def count_tokens(served: Served, names: tuple[str, ...] | None, *, only_last: bool, stage: str) -> int | None:
    """Return how many tokens of the forward are chosen; None if the host does not know it."""
    ids = served.request_ids
    if isinstance(served, BatchRows):
        lengths, phases = [len(tokens) for tokens in served.tokens], None
    elif served.lengths is not None and not _is_elsewhere(served.lengths):
        lengths, phases = [int(each) for each in served.lengths], served.phases
    elif served.lengths is None and ids is not None:
        lengths, phases = [1] * len(ids), served.phases
    else:
        return None
    if names is None:
        requests: Sequence[str] = [""] * len(lengths)  # all of them, whatever they are called
    elif ids is None or isinstance(ids, Tensor):
        return None
    else:
        requests = ids
    is_in_stage = [True] * len(lengths) if phases is None or stage == "both" else [each == stage for each in phases]
    return sum(
        1 if only_last else length
        for request, length, is_there in zip(requests, lengths, is_in_stage, strict=False)
        if is_there and length and _is_named(request, names)
    )


def _is_named(request: str, names: tuple[str, ...] | None) -> bool:
    return names is None or any(fnmatchcase(request, name) for name in names)


def _of_rows(rows: BatchRows) -> TokenOwners | None:
    if not rows.starts:
        return None
    length = rows.starts[0] + len(rows.tokens[0])
    tokens = [
        (row * length + column, rows.request_ids[row], rows.positions[row] + column - start)
        for row, start in enumerate(rows.starts)
        for column in range(start, length)
    ]
    return _owners(tokens, length * len(rows.starts), is_flat=False)


def _of_flat(batch: TokenBatch) -> TokenOwners | None:
    ids = batch.request_ids
    if ids is None or isinstance(ids, Tensor) or _is_elsewhere(batch.lengths):
        return None
    lengths = [1] * len(ids) if batch.lengths is None else [int(each) for each in batch.lengths]
    requests = [name for name, length in zip(ids, lengths, strict=False) for _ in range(length)]
    known = batch.positions
    positions: Sequence[int | None] = [None] * len(requests)
    if known is not None and not _is_elsewhere(known) and known.dim() == 1 and len(known) >= len(requests):
        positions = known.tolist()[: len(requests)]
    return _owners(list(zip(range(len(requests)), requests, positions, strict=True)), len(requests), is_flat=True)


def _is_elsewhere(value: object) -> bool:
    """Return whether reading ``value`` would wait for a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _owners(tokens: Sequence[tuple[int, str, int | None]], count: int, *, is_flat: bool) -> TokenOwners:
    places, requests, positions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return TokenOwners(places, requests, positions, count, is_flat)


def _chosen(owners: TokenOwners, names: tuple[str, ...] | None, only_last: bool) -> TokenOwners:
    if names is None and not only_last:
        return owners
    kept = list(_kept(owners, names, only_last))
    tokens = [(owners.places[each], owners.requests[each], owners.positions[each]) for each in kept]
    return _owners(tokens, owners.count, is_flat=owners.is_flat)


def _kept(owners: TokenOwners, names: tuple[str, ...] | None, only_last: bool) -> Iterator[int]:
    for index, request in enumerate(owners.requests):
        is_last = index + 1 == len(owners.requests) or owners.requests[index + 1] != request
        if _is_named(request, names) and (is_last or not only_last):
            yield index
