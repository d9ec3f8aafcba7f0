"""Sort places by their first bad call, as far as that is known.

`StepAlarm` and `StepRows` ask. Statistics are added up per place, and a module may be called several times in one
forward, a shared dropout for instance. On a CPU a row notes when it got its first bad call. Elsewhere only the counts
are known, so several places may have been the first; they are told as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from hookline.observe.watch.place import DeviceRows

__all__ = ["CallOrder", "CalledPlace", "FirstCalls", "name_doubts"]

_NAMED: Final = 3


class CalledPlace(NamedTuple):
    """A place that something was found at."""

    label: str
    device: torch.device
    number: int
    """The number of its row: its position in the order in which places first had a tensor."""
    is_first_call: bool
    """Whether it is known to have been found in the first call of the place: in all of them, or in the only one."""


class FirstCalls(NamedTuple):
    """Places by their first bad call."""

    places: list[CalledPlace]
    """The first first."""
    num_candidates: int
    """How many of them, from the beginning of the list, may have been the first; 1 where the order is known."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """The places that may have been the first beside the one that is named; none where the order is known."""
        return tuple(place.label for place in self.places[1 : self.num_candidates])

    @property
    def first(self) -> str:
        """The place that is named, and in words which others may have been the first; empty if there is none."""
        named = self.places[0].label if self.places else ""
        return f"{named}, the first among it and {name_doubts(self.doubts)}" if self.doubts else named


@dataclass
class CallOrder:
    """What is known of the order of calls in a step or a micro-batch."""

    bad_rows: dict[torch.device, list[int]] = field(default_factory=dict)
    """The rows in the order of their first bad calls, on devices where that is noted."""
    ordered_rows: dict[torch.device, int] = field(default_factory=dict)
    """How many rows are numbered in the order of calls: those of the first step. A later one may be called anywhere."""

    @classmethod
    def take(cls, rows: Mapping[torch.device, DeviceRows], ordered_rows: dict[torch.device, int]) -> CallOrder:
        """Return the order since the last call; notes begin anew."""
        return cls({device: found for device, of in rows.items() if (found := of.take_bad_order())}, ordered_rows)

    def sort(self, places: Iterable[CalledPlace]) -> FirstCalls:
        """Return places by their first bad calls."""
        by_device: dict[torch.device, list[CalledPlace]] = {}
        for place in places:
            by_device.setdefault(place.device, []).append(place)
        first: list[CalledPlace] = []
        after: list[CalledPlace] = []
        for device, some in by_device.items():
            found = self._sort_noted(device, some) or self._sort_counted(device, some)
            first += found.places[: found.num_candidates]
            after += found.places[found.num_candidates :]
        return FirstCalls([*first, *after], len(first))

    def _sort_noted(self, device: torch.device, places: list[CalledPlace]) -> FirstCalls | None:
        """Return the order that was noted, if it was noted for all."""
        position = {number: place for place, number in enumerate(self.bad_rows.get(device, ()))}
        if any(place.number not in position for place in places):
            return None
        return FirstCalls(sorted(places, key=lambda place: position[place.number]), 1)

    def _sort_counted(self, device: torch.device, places: list[CalledPlace]) -> FirstCalls:
        """Return the order as far as it follows from the order of first calls.

        The place that comes first is the first one whose first call was bad. One whose first call came before that may
        have been bad earlier, in a later call; it is most often one that a bad tensor has come to.
        """
        ordered = self.ordered_rows.get(device)
        by_number = sorted(places, key=lambda place: place.number)
        late = [place for place in by_number if ordered is not None and place.number >= ordered]
        sure = next((place for place in by_number if place.is_first_call and place not in late), None)
        doubtful = [
            place
            for place in by_number
            if place in late or (not place.is_first_call and (sure is None or place.number < sure.number))
        ]
        first = doubtful if sure is None else [sure, *doubtful]
        return FirstCalls([*first, *(place for place in by_number if place not in first)], len(first))


def name_doubts(doubts: tuple[str, ...]) -> str:
    """Return the other places that may have been the first, in words."""
    more = len(doubts) - _NAMED
    named = ", ".join(map(repr, doubts[:_NAMED]))
    return f"{named} and {more} more" if more > 0 else named
