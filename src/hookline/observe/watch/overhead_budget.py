"""Keep what instruments cost within a share of the time of a step: measure without waiting, stretch intervals.

`watch` takes ``budget=``. A `BudgetedSchedule` measures by `TimeMark`, and decides by `stretch`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from hookline.errors import OptionError

__all__ = ["Budget", "BudgetDecision", "LookInterval", "Need", "TimeMark", "first_interval", "stretch"]

_FIRST: Final = (2, 3, 5, 7, 11, 13)


class BudgetDecision(NamedTuple):
    """Say from which step on an instrument looks how often."""

    step: int
    """The first step that it is about."""
    name: str
    """``"watch"``."""
    every: int
    """The new interval, in steps that its schedule has; 1: as asked."""
    cost_ms: float
    """What one look takes."""
    step_ms: float
    """What a step takes without any."""


@dataclass(frozen=True)
class Budget:
    """What instruments may cost.

    Recipe: ``hookline.watch(model, budget=0.02)``, or ``budget=Budget(0.02, at_least_every=500)``.

    Intervals stretch until the cost is inside the budget, and shrink again when there is room. The times are those of
    the device where CUDA is in use, read when they have arrived; nothing waits for them.
    """

    share: float
    """The cost of all together, as a share of the time of a step without them."""
    at_least_every: int = 1000
    """How many steps may lie between two looks at most; an instrument that is asked for less often is not stretched."""
    window: int = 20
    """How many steps are measured before each decision."""
    clock: Callable[[], float] = time.perf_counter
    """Returns seconds."""
    decisions: Sequence[BudgetDecision] | None = None
    """Decisions of an earlier run, to be made again at the same steps; then nothing else is decided."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not is_number or not self.share > 0:
            raise OptionError(f"budget= is a share of the time of a step, such as 0.02; got {self.share!r}.")
        if self.share > 1:
            raise OptionError(f"budget= is a share of the time of a step: 0.02 is 2 %; got {self.share!r}.")
        for name in ("at_least_every", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name}= of a Budget is a number of steps of at least 1; got {value!r}.")


class LookInterval:
    """Say at which of the steps that an instrument is asked for it looks: one of ``every``, and never past the floor.

    Steps are counted from the last look. So a new interval holds from there, and the floor holds whatever is decided.
    """

    def __init__(self, at_least_every: int) -> None:
        self.every = 1
        self.num_asked = 0
        """How many steps it was asked for."""
        self._at_least_every = at_least_every
        self._waited: int | None = None
        """For how many steps it was asked since the last look; None before the first."""
        self._looked_at = self._asked_at = -1

    def ask(self, step: int) -> bool:
        """Return whether it looks at ``step``, which it is asked for."""
        next_step = step + max(1, step - self._asked_at) if self.num_asked else step + 1  # as far as one can tell
        is_late = next_step - self._looked_at > self._at_least_every
        is_due = self._waited is None or self._waited + 1 >= self.every or is_late
        self._waited = 0 if is_due or self._waited is None else self._waited + 1
        self._asked_at = step
        self._looked_at = step if is_due else self._looked_at
        self.num_asked += 1
        return is_due

    def state_dict(self) -> dict[str, int | None]:
        """Return what a resumed run has to know."""
        return {name: value for name, value in vars(self).items() if name != "_at_least_every"}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Go on from what ``state_dict`` returned."""
        vars(self).update(state)


def first_interval(number: int) -> int:
    """Return the interval at which a watch looks until its first decision.

    With a common divisor, two would look at the same steps, or one where the other does not, and their costs could not
    be told apart. The 2 is for number 0 alone: where it is not known which others look at a step, medians pass over a
    third of the steps, and not over a half.

    Args:
        number: Another one for each watch of a run; from 1 on if several are known to begin together.
    """
    return _FIRST[0] if number == 0 else _FIRST[1 + (number - 1) % (len(_FIRST) - 1)]


class TimeMark:
    """A moment, on the host, and in the stream of the current CUDA device where one is in use."""

    __slots__ = ("_event", "_seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._seconds = clock()
        self._event: Any = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def host_seconds(self) -> float:
        """When it was, by the clock of the host."""
        return self._seconds

    def seconds_until(self, later: TimeMark) -> float | None:
        """Return how long it took until ``later``; None as long as the device has not come so far."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        if not (self._event.query() and later._event.query()):
            return None
        try:
            return float(self._event.elapsed_time(later._event)) / 1e3
        except (RuntimeError, ValueError):  # on two devices
            return later._seconds - self._seconds


class Need(NamedTuple):
    """What an instrument would cost as it was asked for."""

    cost: float
    """Seconds of one look."""
    rate: float
    """Looks in a step: 1 for every step, 0.1 for every tenth."""


def stretch(
    needs: Mapping[str, Need], step_seconds: float, budget: Budget, before: Mapping[str, int]
) -> dict[str, int]:
    """Return for each instrument the interval at which it may look, in steps that it was asked for.

    Every instrument gets an equal part of the budget, and what one leaves goes to the others. An interval shrinks only
    if that is a quarter, so that it does not swing.

    Args:
        needs: What each would cost.
        step_seconds: A step without any.
        budget: The share, and how far intervals may be stretched.
        before: The intervals so far.
    """
    left = budget.share * step_seconds
    found = {}
    ordered = sorted(needs, key=lambda name: needs[name].cost * needs[name].rate)
    for place, name in enumerate(ordered):
        need = needs[name].cost * needs[name].rate
        part = min(need, left / (len(ordered) - place))
        left -= part
        longest = max(1, math.floor(budget.at_least_every * needs[name].rate))
        every = 1 if need <= part else min(longest, math.ceil(need / part)) if part > 0 else longest
        old = before.get(name, 1)
        found[name] = every if every > old or 4 * every <= 3 * old else old
    return found
