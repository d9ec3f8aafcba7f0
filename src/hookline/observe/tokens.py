"""Say whose tokens are in the running forward: one table, made once by whoever runs the model.

A table is a `Tokens`. Engines make it: serve/row_batch.py for our own server, engines/vllm/step_tokens.py for vLLM,
factories/served_batch.py for SGLang. Their `Session` (engines/session.py) calls `set_tokens` at the beginning and end
of a forward. engines/vllm/extension.py calls it itself too: with another table for the logits. Probes and hooks of one
request (engines/live_hooks.py) run parts in ``serving(table)``; exports run whole forwards in it, with a table of their
own. Users have `Tokens`, `current_tokens` and `serving` from ``hookline.factories``.

Factories, hidden states, traces (debug/compare/trace.py), hooks of one request and our server's check of batches
(serve/served_model.py) ask `current_tokens`, which is None where nobody has set a table. Traces, hidden states and
hooks of one request tell forwards apart by the identity of the table: make a new one for each forward. The names,
lengths and stages of a table are on the host; its `ids` and `positions` may be on a device. No method may wait for a
device, as every layer asks.

A new field of `Tokens` goes where its kind is read: `_BY_REQUEST` or `_BY_TOKEN` (for `of_request`), `with_tensors` if
it is a tensor, `padded`, and the makers above that know it. `tokens_after_model` of step_tokens.py drops what it does
not name. Tests: tests/factories (test_choosing.py and others), tests/engines.

    >>> table = Tokens.padded(("a", "b"), ((5, 6, 7), (8,)), (0, 0), "prefill")
    >>> with serving(table):
    ...     current_tokens().requests
    ('a', 'b')
    >>> list(table.choose(["b"]).owners())
    [('b', 0)]
    >>> current_tokens() is None
    True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.sites import _torch

_BY_REQUEST: Final = ("requests", "lengths", "firsts", "phases", "keys")
"""The fields of a table that have an entry for each request; `of_request` gives a wrong table if one is missing."""
_BY_TOKEN: Final = ("ids", "positions")
"""Those that have one for each token, if they are known."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Map the tokens of one forward to requests; each tuple has one entry for each request of the batch.

    The tokens of a flat batch (``width`` None) follow each other, and padding may follow the last. The rows of a
    padded one are ``width`` columns, with padding on the left.
    """

    requests: tuple[str, ...]
    """The names of the requests, as clients give them; empty texts where nobody gives any."""
    lengths: tuple[int, ...]
    """How many tokens of each request are in this forward."""
    firsts: tuple[int | None, ...]
    """For each request, the position of its first token here in prompt and answer, from 0; None if only a device
    knows."""
    phases: tuple[str, ...]
    """``"prefill"`` or ``"decode"``. The option ``phase`` has these words too, in `Stage` of factories/served_batch.py
    and, for hidden states, in engines/request_options.py."""
    ids: Tensor | tuple[int, ...] | None = None
    """The tokens themselves, one after the other; on a device perhaps."""
    positions: Tensor | None = None
    """The position of each token, where only a device knows it."""
    width: int | None = None
    """The columns of a padded batch; None for a flat one."""
    keys: tuple[str, ...] = ()
    """Names of the requests that the engine chose, so that no two are equal: hooks of single requests find their rows
    by these; `requests` if left out."""
    room: int = 0
    """How many rows a flat batch has with its padding; 0 if that is not known."""
    notes: list[Any] | None = field(default=None, repr=False)
    """What hooks tell the engine about requests of this forward (`note_scores` and `read_flags` of
    factories/request_notes.py); None if nobody will read it. A table of a part of the forward has the same list."""
    _choices: dict[Any, ChosenTokens] = field(default_factory=dict, repr=False)
    """What `choose` has returned, for this table alone: each ``replace`` of a table sets ``_choices={}``, also that of
    engines/sglang/runner_hooks.py."""

    @classmethod
    def padded(
        cls, requests: Sequence[str], tokens: Sequence[Sequence[int]], firsts: Sequence[int], phase: str
    ) -> Tokens:
        """Return the table of a batch with one row for each request, padded on the left."""
        return cls(
            tuple(requests),
            tuple(map(len, tokens)),
            tuple(firsts),
            (phase,) * len(tokens),
            tuple(each for row in tokens for each in row),
            width=max(map(len, tokens), default=0),
        )

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where the tokens of each request begin among all entries of the batch, padding included."""
        if self.width is None:
            return tuple(accumulate(self.lengths, initial=0))[:-1]
        return tuple((row + 1) * self.width - length for row, length in enumerate(self.lengths))

    @cached_property
    def count(self) -> int:
        """How many entries the batch has; behind those of a flat one padding may follow."""
        return sum(self.lengths) if self.width is None else self.width * len(self.lengths)

    @property
    def phase(self) -> str:
        """The stage of all requests, or ``"mixed"``."""
        return self.phases[0] if len(set(self.phases)) == 1 else "mixed"

    def by_token(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor with the entries of the batch as its first dimension; None if it has not one for each."""
        if not self.lengths or not tensor.dim():
            return None
        if self.width is None:
            return tensor if len(tensor) >= self.count else None
        if tensor.dim() == 2 and len(tensor) == self.count:  # as experts see their tokens
            return tensor
        # Of more dimensions, the second is not that of the sequence: (batch, heads, sequence, sequence).
        is_by_row = tensor.dim() in (2, 3) and tensor.shape[:2] == (len(self.lengths), self.width)
        return tensor.flatten(0, 1) if is_by_row else None

    def choose(self, names: Sequence[str] | None = None, *, last: bool = False, stage: str = "both") -> ChosenTokens:
        """Return the tokens of the requests that ``names`` (patterns too) match, all by default, in ``stage``.

        With ``last``, the last token of each request alone. Remembered: every layer of a forward asks the same.
        """
        key = None if names is None else tuple(names), last, stage
        found = self._choices.get(key)
        if found is None:
            rows = [
                row
                for row, request in enumerate(self.requests)
                if self.lengths[row]
                and (stage in ("both", self.phases[row]))
                and (names is None or any(fnmatchcase(request, name) for name in names))
            ]
            found = self._choices[key] = ChosenTokens(self, tuple(rows), last)
        return found

    @property
    def has_names(self) -> bool:
        """Return whether the requests have names."""
        return all(self.requests)

    def real(self, tensor: Tensor) -> Tensor | None:
        """Return the entries of `tensor` that are no padding; the tensor itself if it has none for each token.

        None for a padded batch of unequal lengths where a CUDA graph is recorded: which entries are real would be fixed
        in it. Of a flat batch only the number of entries is.
        """
        if self.width is None:
            return tensor[: self.count] if tensor.dim() and len(tensor) > self.count else tensor
        if sum(self.lengths) == self.count or self.by_token(tensor) is None:
            return tensor
        return None if _torch.capturing() else self.choose().pick(tensor)

    def of_request(self, row: int) -> Tokens:
        """Return the table of one request alone."""
        begin = sum(self.lengths[:row])
        part = slice(begin, begin + self.lengths[row])
        own: dict[str, Any] = {name: getattr(self, name)[row : row + 1] for name in _BY_REQUEST}
        own |= {name: None if getattr(self, name) is None else getattr(self, name)[part] for name in _BY_TOKEN}
        width = None if self.width is None else self.lengths[row]
        return replace(self, **own, width=width, room=0, _choices={})

    def noted(self) -> Tokens:
        """Return the table with a list of notes of its own."""
        return replace(self, notes=[], _choices={})

    def with_tensors(self, change: Any) -> Tokens:
        """Return the table with each tensor replaced by ``change(tensor)``: a copy, as engines use buffers again."""
        return replace(self, ids=change(self.ids), positions=change(self.positions), _choices={})


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """Some tokens of a forward: where they are in a tensor, and whose they are."""

    tokens: Tokens
    rows: tuple[int, ...]
    """Which requests."""
    last: bool
    """Whether the last token of each alone is meant."""
    _on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows) if self.last else sum(self.tokens.lengths[row] for row in self.rows)

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """Where the tokens are among the entries of the batch."""
        begins, lengths = self.tokens.begins, self.tokens.lengths
        ranges = [
            np.arange(begins[row] + (lengths[row] - 1 if self.last else 0), begins[row] + lengths[row])
            for row in self.rows
        ]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)

    def owners(self) -> Iterator[tuple[str, int | None]]:
        """Yield the request and the position of each token."""
        for row in self.rows:
            first, length = self.tokens.firsts[row], self.tokens.lengths[row]
            for column in range(length - 1 if self.last else 0, length):
                yield self.tokens.requests[row], None if first is None else first + column

    def pick(self, tensor: Tensor) -> Tensor | None:
        """Return the entries of the tokens; None if `tensor` has not one for each entry of the batch."""
        entries = self.tokens.by_token(tensor)
        if entries is None or len(self) == len(entries):
            return entries
        places = self._on.get(entries.device)
        if places is None:
            with torch.inference_mode(False):
                places = self._on[entries.device] = torch.from_numpy(self.places).to(entries.device, non_blocking=True)
        return entries.index_select(0, places)

    def mask(self, tensor: Tensor) -> Tensor | bool | None:
        """Return which numbers of `tensor` belong to the tokens: a mask that broadcasts to it, or a bool.

        None if it has no entry for each token, nor, in a padded batch, one for each request.
        """
        if not self.rows:
            return False
        entries = self.tokens.by_token(tensor)
        if entries is not None:
            shape = tensor.shape[:2] if tensor.dim() > entries.dim() else tensor.shape[:1]
            return _mask(tensor, self.places, len(entries), shape)
        requests = len(self.tokens.requests)
        if self.tokens.width is not None and tensor.dim() >= 2 and len(tensor) == requests:
            return _mask(tensor, np.array(self.rows), requests, tensor.shape[:1])
        return None


def _mask(tensor: Tensor, places: npt.NDArray[np.int64], count: int, shape: Sequence[int]) -> Tensor | bool:
    if len(places) == count:
        return True
    flags = np.zeros(count, bool)
    flags[places] = True
    mask = torch.from_numpy(flags).to(tensor.device, non_blocking=True)
    return mask.view(*shape, *[1] * (tensor.dim() - len(shape)))


# Of the context, not of the process: two engines in two threads each run forwards of their own.
_CURRENT: Final[ContextVar[Tokens | None]] = ContextVar("hookline_tokens", default=None)


def current_tokens() -> Tokens | None:
    """Return the table of the forward that this thread, or task, is running; None without an engine."""
    return _CURRENT.get()


def set_tokens(tokens: Tokens | None) -> None:
    """Make ``tokens`` the current ones from now on, for an engine whose step begins and ends in two calls."""
    _CURRENT.set(tokens)


@contextmanager
def serving(tokens: Tokens | None) -> Iterator[None]:
    """Make ``tokens`` the current ones for as long as the block lasts."""
    token = _CURRENT.set(tokens)
    try:
        yield
    finally:
        _CURRENT.reset(token)
