"""Rows about `HookManager`: what a firing costs when nothing is due, and when one observer is.

Takes nothing but hooks that do nothing, hands `Row`s to ``rows``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from measure import Row, Samples, Spread, interleave, ratios, spread, trial, typical
from subject import Setting

import hookline as hl
from hookline import HookPoint, RunDataContext

__all__ = ["managing"]

POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint.POST_STEP, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT
BATCH = 1000
MILLION = 10**6


class Constant(hl.TrainingHook):
    """Returns the same number each time."""

    hook_points = frozenset({POST_EPOCH, POST_STEP})

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        return {"one": 1.0}


class Draws(Constant):
    """Draws from torch's stream, so that the streams have to be given back."""

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        torch.rand(1)
        return {"one": 1.0}


class Pure(Constant):
    """The same, with the promise to draw nothing."""

    pure = True


def managing(setting: Setting) -> Iterator[Row]:
    """With a function that makes the context, as the loops have it."""
    nothing, now_and_then = hl.HookManager(hooks=[Constant()]), hl.HookManager(hooks=[*_scheduled()])
    one, pure = hl.HookManager(hooks=[Constant()]), hl.HookManager(hooks=[Pure()])
    now_and_then.advance_step()
    now_and_then.advance_step()
    make = partial(RunDataContext, POST_EPOCH, 0)
    calls: dict[str, Callable[[], object]] = {
        "nothing at the point": lambda: nothing.fire(SNAPSHOT, make),
        "ten hooks, none due": lambda: now_and_then.fire(POST_STEP, make),
        "one observer": lambda: one.fire(POST_EPOCH, make),
        "one pure observer": lambda: pure.fire(POST_EPOCH, make),
        "context": make,
        "context again": make,
    }
    samples = interleave([trial(name, call, inner=5, batch=BATCH) for name, call in calls.items()], setting.rounds(40))
    yield _row(samples, "nothing at the point", "`fire` at a point that no hook has", 1.0)
    yield _row(samples, "ten hooks, none due", "`fire` at a step at which none of ten scheduled hooks is due", 1.0)
    yield _row(samples, "one observer", "one observer that returns a constant, random streams kept", 40.0)
    yield _row(samples, "one pure observer", "the same, declared pure")
    yield _row(samples, "context", "making the context that is not made when nothing is due")
    yield _drawing(setting, make)
    yield _growth(now_and_then, make)


def _scheduled() -> Iterator[hl.TrainingHook]:
    for number in range(10):
        hook = Constant()
        hook.name = f"hook{number}"
        hook.step_schedule = hl.StepSchedule("stride", stride=10**9)
        yield hook


def _row(samples: Samples, name: str, words: str, at_most: float | None = None) -> Row:
    return Row(
        f"firing, {name} (µs)",
        words,
        "1 µs",
        "no model",
        spread([seconds * 1e6 for seconds in samples[name]]),
        spread(ratios(samples, "context again", "context")),
        f"{typical(samples, name) * 1e6:.2f} µs, a context alone {typical(samples, 'context') * 1e6:.2f} µs",
        at_most=at_most,
    )


def _drawing(setting: Setting, make: Callable[[], RunDataContext]) -> Row:
    """By itself: a stream that was given back is read anew by the next firing, which may be that of another row."""
    draws = hl.HookManager(hooks=[Draws()])
    name = "one observer that draws"
    calls = {name: lambda: draws.fire(POST_EPOCH, make), "context": make, "context again": make}
    samples = interleave([trial(name, call, inner=5, batch=BATCH) for name, call in calls.items()], setting.rounds(40))
    return _row(samples, name, "one observer that draws a number from torch's stream", 130.0)


def _growth(manager: hl.HookManager, make: Callable[[], RunDataContext]) -> Row:
    """A million firings with nothing due, in a run that goes on."""
    manager.fire(POST_STEP, make)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(MILLION):
        manager.advance_step()
        manager.fire(POST_STEP, make)
    gc.collect()
    grown = float(sys.getallocatedblocks() - before)
    return Row(
        "firing, a million times with nothing due (blocks of memory)",
        "blocks that are in use afterwards and were not before",
        "1 block",
        "no model",
        Spread(grown, grown, grown),
        Spread(1.0, 1.0, 1.0),
        f"{grown:.0f} blocks",
        at_most=50.0,
    )
