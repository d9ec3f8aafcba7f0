"""Pair the calls of one site in two runs: by row, by step and call, or, where the counts differ, in order.

`align_runs` calls `CallMatcher.match` with the values of a site on both sides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hookline.debug.compare.row_matching import (
    has_other_columns,
    has_same_rows,
    has_unique_rows,
    match_rows,
    why_no_rows,
)
from hookline.debug.compare.run_values import RunValue
from hookline.debug.trace.trace_record import RowKey

__all__ = ["CallMatcher", "LostGradient", "UnpairedValue", "ValuePair"]


@dataclass(slots=True)
class ValuePair:
    """A value of A and the one of B that belongs to it."""

    a: RunValue
    b: RunValue
    how: str = ""
    """How they were found, where it was not by name and call alone."""
    keys: list[RowKey] = field(default_factory=list)
    """Whose the rows are, where rows were paired."""
    is_sure: bool = True
    """Whether it is known that they belong together, so that a difference may be blamed on the site."""

    @property
    def has_tensors(self) -> bool:
        """Whether both can be read, not only estimated."""
        return self.a.read is not None and self.b.read is not None


@dataclass(frozen=True, slots=True)
class UnpairedValue:
    """A value of both runs that cannot be compared."""

    site: str
    kind: str
    leaf: str
    step: int
    call: int
    why: str
    order: int = -1
    """Its place in A."""
    rank: int = 0
    is_other_shape: bool = False
    """Whether it has another shape in B than in A."""
    is_difference: bool = True
    """Whether it makes the runs differ; not a mask or the like, of runs whose rows lie in other places."""


@dataclass(frozen=True, slots=True)
class LostGradient:
    """A gradient of A that no gradient of B belongs to, of a module that both runs call."""

    site: str
    step: int
    rank: int
    order: int
    """Its place in A."""
    taker: str
    """The module that takes what the site returns, so that the gradient comes from it; empty if that is not known."""


@dataclass(slots=True)
class CallMatcher:
    """Collects pairs, and what cannot be paired."""

    pairs: list[ValuePair]
    unpaired: list[UnpairedValue]
    steps_left: list[str]
    """Notes on steps that only one run has."""
    calls_left: list[str]
    """Notes on sites that one run calls more often."""
    used: set[int]
    """The ids of values that have found a partner."""

    def use(self, values: Iterable[RunValue]) -> None:
        """Note that values have a partner."""
        self.used.update(id(value) for value in values)

    def match(self, a: Sequence[RunValue], b: Sequence[RunValue]) -> None:
        """Pair the values of one site, kind and leaf."""
        self.use(a)
        self.use(b)
        by_call_a = {(value.step, value.call): value for value in a}
        by_call_b = {(value.step, value.call): value for value in b}
        same = by_call_a.keys() == by_call_b.keys() and all(
            has_same_rows(by_call_a[key], by_call_b[key]) for key in by_call_a
        )
        if not same and has_other_columns(a, b):
            self._refuse(a[0], b[0], "it has a column for each token, and those are padded in another way")
            return
        if not same and has_unique_rows(a) and has_unique_rows(b):
            self._match_rows(a, b)
            return
        self._match_steps(a, b)

    def _match_rows(self, a: Sequence[RunValue], b: Sequence[RunValue]) -> None:
        found = match_rows(a, b)
        if found is None:
            self._refuse(a[0], b[0], why_no_rows(a, b))
            return
        left = [f"{count} only in {side}" for side, count in (("A", found.left_a), ("B", found.left_b)) if count]
        rest = f" ({', '.join(left)})" if left else ""
        how = f"{len(found.keys)} rows by request and position{rest}"
        self.pairs.append(ValuePair(found.a, found.b, _joined(found.a.note, found.b.note, how), found.keys))

    def _match_steps(self, a: Sequence[RunValue], b: Sequence[RunValue]) -> None:
        steps_a, steps_b = _by_step(a), _by_step(b)
        left = steps_a.keys() ^ steps_b.keys()
        if left:
            have = "A" if left & steps_a.keys() else "B"
            note = f"Only some steps: {sorted(left)[:6]} are only in {have} for some sites; the others are compared."
            self.steps_left += [note] if note not in self.steps_left else []
        for step in (step for step in steps_a if step in steps_b):
            self._match_calls(steps_a[step], steps_b[step])

    def _match_calls(self, a: list[RunValue], b: list[RunValue]) -> None:
        if {value.call for value in a} == {value.call for value in b}:
            for one, other in zip(a, b, strict=True):
                self._pair(one, other)
            return
        site = a[0].site or "(the model)"
        pairs = list(zip(a, b, strict=False))
        self.calls_left.append(
            f"{site} ({a[0].kind}) was called {len(a)} time(s) in step {a[0].step} of A and {len(b)} in B; "
            "they are compared in order, and are not blamed."
        )
        for one, other in pairs:
            self._pair(one, other, how=f"call {one.call} of A with call {other.call} of B", is_sure=False)

    def _pair(self, a: RunValue, b: RunValue, how: str = "", *, is_sure: bool = True) -> None:
        padded = a.rows is not None and b.rows is not None and not has_same_rows(a, b)
        rows = match_rows([a], [b]) if padded else None
        text = _joined(a.note, b.note, how)
        if rows is not None:
            self.pairs.append(ValuePair(rows.a, rows.b, _joined(text, f"{len(rows.keys)} rows"), rows.keys, is_sure))
        elif a.shape != b.shape:
            self._refuse(a, b, f"its shape is {a.shape} in A and {b.shape} in B{_advice(a, b)}")
        else:
            self.pairs.append(ValuePair(a, b, text, is_sure=is_sure))

    def _refuse(self, a: RunValue, b: RunValue, why: str) -> None:
        rank, differs = max(a.rank, b.rank), a.shape != b.shape
        self.unpaired.append(
            UnpairedValue(b.site, b.kind, b.leaf, b.step, b.call, why, a.order, rank, is_other_shape=differs)
        )


def _advice(a: RunValue, b: RunValue) -> str:
    if math.prod(a.shape) == math.prod(b.shape):
        return ", though both have as many numbers: if rows lie in other places, give rows="
    if len(a.shape) == len(b.shape):
        return "; if ranks hold parts of it give dims=, if the runs have other rows give rows="
    return ""


def _joined(*parts: str) -> str:
    return "; ".join(dict.fromkeys(filter(None, parts)))


def _by_step(values: Sequence[RunValue]) -> dict[int, list[RunValue]]:
    found: dict[int, list[RunValue]] = defaultdict(list)
    for value in values:
        found[value.step].append(value)
    for of_step in found.values():
        of_step.sort(key=lambda value: value.call)
    return found
