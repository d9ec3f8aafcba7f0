"""Show how far a loop is: ``progress=`` of the loops.

The loops enter `shown_progress`; a `Run` says when a step or an epoch is over. The bar is that of `hookline.screen`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.screen import RunProgress

if TYPE_CHECKING:
    from hookline.training.run import Run

__all__ = ["LoopProgress", "shown_progress"]

_MOST_METRICS: Final = 5


@contextmanager
def shown_progress(
    asked: bool | RunProgress, run: Run, *, epochs: int | None = None, steps: int | None = None
) -> Iterator[None]:
    """Show how far ``run`` is while the block lasts, if that is ``asked`` for; it has so many epochs, or steps."""
    if not isinstance(asked, bool | RunProgress):
        raise OptionError(f"progress= is True, False or a ConsoleSink; got {type_name(asked)}.")
    if asked is False:
        yield
        return
    bar = RunProgress() if asked is True else asked
    run.progress = progress = LoopProgress(run, bar, epochs=epochs, steps=steps)
    try:
        yield
        bar.stop(progress.metrics())
    finally:
        run.progress = None
        bar.stop()  # after an error of the device, reading the loss would raise another


class LoopProgress:
    """Move a bar on as a run goes on: by steps, or by epochs where the loader does not say how many steps one has."""

    def __init__(self, run: Run, bar: RunProgress, *, epochs: int | None = None, steps: int | None = None) -> None:
        self._run, self._bar = run, bar
        self._epochs, self._steps = epochs, steps
        self._by_epoch = False

    def begin(self, first: int) -> None:
        """Show the bar; so many epochs, or steps, were over before ``first``."""
        if self._epochs is None:
            self._bar.start(self._steps or 0, "steps", done=first)
            return
        per_epoch = _steps_per_epoch(self._run.experiment)
        self._by_epoch = per_epoch is None
        if per_epoch is None:
            self._bar.start(self._epochs, "epochs", done=first)
        else:
            within = self._run.done if self._run.is_within else 0
            self._bar.start(self._epochs * per_epoch, "steps", done=first * per_epoch + within)

    def end_step(self) -> None:
        """Move on by a step, if steps are counted."""
        if not self._by_epoch:
            self._bar.advance(1, self.metrics)

    def end_epoch(self) -> None:
        """Move on by an epoch, if epochs are counted."""
        self._bar.advance(int(self._by_epoch), self.metrics)

    def metrics(self) -> dict[str, float]:
        """Return the loss and the newest evaluation; waits for the device."""
        found = ((name, _as_number(value)) for name, value in self._run.newest_metrics.items())
        return dict([(name, number) for name, number in found if number is not None][:_MOST_METRICS])


def _steps_per_epoch(experiment: Any) -> int | None:
    """Return how many steps an epoch has; None if only its end will tell."""
    try:
        batches = len(experiment.loader)
    except Exception:  # no loader, one without a length, or one whose length cannot be told
        return None
    return math.ceil(batches / max(1, experiment.accumulate or 1)) or None


def _as_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
