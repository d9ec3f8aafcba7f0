"""Which metrics belong side by side: those that differ only in the layer.

Takes the names of metrics, hands `Place` objects to `page`: rows and statistics of the layer × step map.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["KINDS", "Place", "places"]

KINDS: Final = ("forward", "backward", "param", "param_grad")
"""What a watch looks at; ``hook/{layer}/{kind}/{statistic}``."""
_THE_RUN: Final = ("train", "eval", "initial")
"""Metrics of the loop itself: ``eval/top1`` is no layer."""
_MIN_ROWS: Final = 3
"""Two curves are better looked at as two curves."""
_LOOKS_LIKE_A_LAYER: Final = 0.5
"""The share of the names in one place that have a dot or a digit in them, as names of layers do."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a metric is on the map.

    Recipe: ``places(["stats/0/forward/mean", "stats/1/forward/mean"])["stats/0/forward/mean"].layer`` is ``"0"``.
    """

    group: str
    """The map: the hook and what it looked at, ``stats/forward``."""
    statistic: str
    """The statistic: ``mean``."""
    layer: str
    """The row."""


def places(names: Iterable[str]) -> dict[str, Place]:
    """Where each metric is that has its like for other layers; the rest is left out.

    Recipe: ``places(curve.name for curve in series.curves)``.
    """
    found: dict[str, Place] = {}
    others: dict[int, list[tuple[str, list[str]]]] = {}
    for name in names:
        parts = name.split("/")
        # A layer's name may hold slashes of its own, so what is around it decides.
        if len(parts) >= 4 and parts[-2] in KINDS:
            found[name] = Place(f"{parts[0]}/{parts[-2]}", parts[-1], "/".join(parts[1:-2]))
        elif len(parts) >= 3 and parts[0] not in _THE_RUN:
            others.setdefault(len(parts), []).append((name, parts))
    known = {place.layer for place in found.values()}
    for same_length in others.values():
        found |= _by_place(same_length, known)
    return found


def _by_place(metrics: Sequence[tuple[str, list[str]]], known: set[str]) -> dict[str, Place]:
    """Of metrics with as many parts each, the part that looks most like a layer."""
    siblings: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for _, parts in metrics:
        for index in range(1, len(parts)):
            siblings.setdefault((index, _without(parts, index)), []).append(parts[index])
    share = {key: _likeness(found, known) for key, found in siblings.items() if len(found) >= _MIN_ROWS}
    placed: dict[str, Place] = {}
    for name, parts in metrics:
        keys = [(index, _without(parts, index)) for index in range(1, len(parts))]
        keys = [key for key in keys if share.get(key, 0.0) >= _LOOKS_LIKE_A_LAYER]
        if keys:
            # Units of a layer look like layers as well: of two, the one that has more of its like is the row.
            index, rest = max(keys, key=lambda key: (len(siblings[key]), share[key]))
            placed[name] = Place("/".join(rest[:-1]), rest[-1], parts[index])
    return placed


def _without(parts: list[str], index: int) -> tuple[str, ...]:
    return (*parts[:index], *parts[index + 1 :])


def _likeness(found: list[str], known: set[str]) -> float:
    return sum(part in known or "." in part or any(map(str.isdigit, part)) for part in found) / len(found)
