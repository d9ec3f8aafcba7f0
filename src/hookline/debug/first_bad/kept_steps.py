"""Keep the state in which steps began, cheaply: a snapshot every so many steps, batch and random streams of each.

`BadOperationFinder` calls `KeptSteps` at the beginning of each step. To go back to a step, the snapshot before it is
restored and the steps in between are run again: they are the same steps, so the state is the same, bit for bit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hookline.debug.first_bad.bad_operation import describe_batch
from hookline.guard.rng import RandomStates
from hookline.guard.snapshot import Snapshot, roots_of
from hookline.guard.tensors import Where
from hookline.sites import _torch

__all__ = ["FollowedBatch", "KeptForward", "KeptStep", "KeptSteps", "RunParts", "SecondRun", "StateMarks"]

RunParts = tuple[Any, Any, Any, Any, Any]
"""What a guard saves: model, optimizer, scheduler, scaler, loader."""


@dataclass(slots=True)
class KeptStep:
    """How one step began."""

    number: int
    batch: Any
    """The batch itself, not a copy."""
    ids: Any
    """What names the batch."""
    random: RandomStates
    marks: StateMarks | None = None
    """The state, in a few numbers; None where a snapshot has all of it."""


class SecondRun(NamedTuple):
    """How a step can be run again."""

    run: Callable[[KeptStep], Any] | None
    """Makes the step again, from the state in which it began; returns its loss, or whatever it returns."""
    note: str = ""
    """What of the step it leaves out, for the report; why there is none."""
    is_step: bool = True
    """Whether it is the whole step, so that it ends as the first run did."""


@dataclass(slots=True)
class _Window:
    """A snapshot, and the steps since."""

    snapshot: Snapshot
    put_back: Callable[[], None] | None = None
    """Puts back what the snapshot does not have: the plain attributes of an experiment."""
    steps: list[KeptStep] = field(default_factory=list)


class KeptSteps:
    """The last steps, of two snapshots or three; ``every`` is how many steps one snapshot serves.

    More than one, because a NaN in a gradient shows in the forward of the next step: then the step before is asked for.
    """

    def __init__(self, parts: Callable[[], RunParts], *, every: int, where: Where) -> None:
        self._parts = parts
        self._every = every
        self._most = 2 if every > 1 else 3
        self._where: Where = where
        self._windows: list[_Window] = []

    @property
    def needs_verdict_until(self) -> int:
        """The step up to which it has to be known that all was well before the next step may begin; -1 for none."""
        is_full = len(self._windows) == self._most and len(self._windows[-1].steps) >= self._every
        return self._windows[1].steps[0].number if is_full else -1

    def begin(self, number: int, batch: Any, ids: Any, attributes: Callable[[], Callable[[], None]] | None) -> None:
        """Keep the beginning of a step; ``attributes`` saves what else it may change, and returns what puts it back."""
        if not self._windows or len(self._windows[-1].steps) >= self._every:
            self._begin_window(attributes)
        steps = self._windows[-1].steps
        steps.append(KeptStep(number, batch, ids, RandomStates(), StateMarks(self._parts()[0]) if steps else None))

    def _begin_window(self, attributes: Callable[[], Callable[[], None]] | None) -> None:
        roots = roots_of(*self._parts())
        window = self._windows.pop(0) if len(self._windows) == self._most else None
        # The memory of the older one is used again, unless the run has other parts now (another loader, say).
        same = window is not None and window.snapshot.roots == roots
        snapshot = window.snapshot if window is not None and same else Snapshot(roots, self._where)
        snapshot.take()
        self._windows.append(_Window(snapshot, None if attributes is None else attributes()))

    def has(self, number: int) -> bool:
        """Return whether the beginning of that step is kept."""
        return any(step.number == number for window in self._windows for step in window.steps)

    def get(self, number: int) -> KeptStep | None:
        """Return how that step began."""
        return next((step for window in self._windows for step in window.steps if step.number == number), None)

    def back_to(self, number: int, run: Callable[[KeptStep], Any]) -> KeptStep:
        """Bring the run to the beginning of a step; ``run`` makes the steps between the snapshot and it again."""
        window = next(each for each in self._windows if any(step.number == number for step in each.steps))
        window.snapshot.go_back("A step that was run again")
        if window.put_back is not None:
            window.put_back()
        for step in window.steps:
            step.random.restore()
            if step.number == number:
                return step
            run(step)
        raise AssertionError("the step is in the window")  # pragma: no cover

    def clear(self) -> None:
        """Let go of everything."""
        self._windows.clear()


_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUNDING: Final = 1e-3
"""Up to this relative difference of norms a step that is not deterministic has repeated."""


@dataclass(slots=True)
class KeptForward:
    """One forward of the model."""

    args: Any
    kwargs: Any
    autocast: list[tuple[str, torch.dtype]]
    backwards: list[dict[str, Tensor | None]] = field(default_factory=list)
    """For each backward pass, the gradients that came back, by the leaves of the output."""


class FollowedBatch:
    """The forwards of one step, and its batches with their ids; a step that accumulates gradients has several."""

    def __init__(self) -> None:
        self.forwards: dict[int, KeptForward] = {}
        """By the number that the site has of each."""
        self.batches: list[Any] = []
        self.ids: list[Any] = []
        """What names each batch; None for one without a name."""
        self.starts: list[int] = []
        """How many operators the second run had made when it began with each forward."""

    def add(self, batch: Any, ids: Any) -> None:
        """Take the batch of the forward that follows."""
        self.batches.append(batch)
        self.ids.append(ids)

    def describe(self, number: int | None = None) -> str:
        """Return in words the batch in which the operator of that ``number`` ran; without a number, all of them."""
        shown = self.batches or [forward.args for forward in self.forwards.values()]
        ids = self.ids or [None] * len(shown)
        if number is not None and len(shown) > 1 and len(self.starts) == len(shown):
            at = max(bisect_right(self.starts, number) - 1, 0)
            return f"{describe_batch(shown[at], ids[at])}, micro-batch {at + 1} of {len(shown)}"
        if len(shown) == 1:
            return describe_batch(shown[0], ids[0])
        return describe_batch(tuple(shown), None if any(each is None for each in ids) else ids)


class StateMarks:
    """The norms of parameters and buffers at one moment, in 64 bits: one bit of a float32 in 1e6 numbers shows."""

    __slots__ = ("_norms",)

    def __init__(self, model: nn.Module) -> None:
        self._norms: list[Tensor] = []
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                local = _torch.local_tensor(tensor.detach())
                if local is not None and local.dtype in _TYPES and local.layout is torch.strided:
                    self._norms.append(torch.linalg.vector_norm(local, dtype=torch.float64))

    def difference(self, model: nn.Module) -> str:
        """Return how the model differs now: ``""``, ``"rounding"`` or ``"other"``; waits for the device."""
        before, now = ([float(norm) for norm in marks._norms] for marks in (self, StateMarks(model)))
        if len(before) != len(now):
            return "other"
        pairs = [pair for pair in zip(before, now, strict=True) if not _is_same(*pair)]
        if not pairs:
            return ""
        return "rounding" if all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in pairs) else "other"


def _is_same(before: float, now: float) -> bool:
    return before == now or (math.isnan(before) and math.isnan(now))
