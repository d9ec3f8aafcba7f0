"""Show how far a loop is: a bar on a terminal and in a notebook, a line now and then elsewhere.

The loops enter `shown_progress` for ``progress=True``; a `Run` says when a step is over. Reads the loss and the newest
evaluation when it draws, ten times a second at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Final

import torch

from hookline.errors import OptionError
from hookline.messages import type_name
from hookline.sinks.console_live import NotebookOutput, RunProgress, notebook_output

if TYPE_CHECKING:
    from hookline.training.run import Run

__all__ = ["LoopProgress", "NotebookBar", "shown_progress"]

_MOST_METRICS: Final = 5
_BETWEEN_DRAWINGS: Final = 0.1
"""Seconds; reading the loss waits for the device, and a step may take less than a millisecond."""


@contextmanager
def shown_progress(
    asked: bool | RunProgress, run: Run, *, epochs: int | None = None, steps: int | None = None
) -> Iterator[None]:
    """Show how far ``run`` is while the block lasts, if that is ``asked`` for; it has so many epochs, or steps."""
    if not isinstance(asked, bool | RunProgress):
        raise OptionError(f"progress= is True or False; got {type_name(asked)}.")
    if asked is False:
        yield
        return
    bar = _bar() if asked is True else asked
    run.progress = progress = LoopProgress(run, bar, epochs=epochs, steps=steps)
    try:
        yield
        progress.note_metrics()
    finally:
        run.progress = None
        progress.stop()


class LoopProgress:
    """Move a bar on as a run goes on."""

    def __init__(
        self,
        run: Run,
        bar: RunProgress | NotebookBar,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._bar, self._clock = run, bar, clock
        self._epochs, self._steps = epochs, steps
        self._is_started = self._by_epoch = False
        self._drawn = -math.inf

    def begin(self, first: int) -> None:
        """Show the bar, with what an earlier run has done: so many epochs, or steps, were over before ``first``."""
        total, unit, done = self._steps, "steps", first
        if self._epochs is not None:
            per_epoch = _steps_per_epoch(self._run.experiment)
            self._by_epoch = per_epoch is None
            unit = "epochs" if self._by_epoch else "steps"
            total, done = self._epochs * (per_epoch or 1), first * (per_epoch or 1)
            if self._run.is_within and not self._by_epoch:
                done += self._run.done
        self._bar.start(total or 0, unit, done=done)
        self._is_started = True

    def end_step(self) -> None:
        """Move on by a step, if steps are counted."""
        if not self._by_epoch:
            self._advance()

    def end_epoch(self) -> None:
        """Move on by an epoch, if epochs are counted; show its metrics."""
        if self._by_epoch:
            self._advance()
        self.note_metrics()

    def note_metrics(self) -> None:
        """Give the bar the newest metrics, to be shown when it is drawn next."""
        self._bar.note(**self._metrics())

    def stop(self) -> None:
        """Leave the bar as it is. Reads no metric: after an error of the device that would raise another."""
        if self._is_started:
            self._bar.stop()

    def _advance(self) -> None:
        now = self._clock()
        if now - self._drawn >= _BETWEEN_DRAWINGS:
            self._drawn = now
            self.note_metrics()
        self._bar.advance()

    def _metrics(self) -> dict[str, float]:
        found = ((name, _as_number(value)) for name, value in self._run.newest_metrics.items())
        return dict([(name, number) for name, number in found if number is not None][:_MOST_METRICS])


class NotebookBar:
    """Show a bar below a cell of a notebook: one output, updated in place. Needs no widgets.

    Args:
        output: Where to show it.
        clock: What tells the time, in seconds.
    """

    def __init__(self, output: NotebookOutput, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._total = self._done = self._before = 0
        self._unit = "steps"
        self._metrics: dict[str, float] = {}
        self._began = self._drawn = 0.0

    def start(self, total: int, unit: str = "steps", *, done: int = 0) -> None:
        """Show an empty bar for ``total`` steps or epochs, of which some may be done."""
        self._total, self._unit, self._done, self._before = total, unit, done, done
        self._began = self._drawn = self._clock()
        self._output.show(self.html())

    def advance(self, n: int = 1) -> None:
        """Count ``n`` more; draw them if the last drawing is long enough ago."""
        self._done += n
        if self._clock() - self._drawn >= _BETWEEN_DRAWINGS:
            self._draw()

    def note(self, **metrics: float) -> None:
        """Keep newer metrics, to be shown when it is drawn next."""
        self._metrics |= metrics

    def stop(self) -> None:
        """Draw where it ended."""
        self._draw()

    def _draw(self) -> None:
        self._drawn = self._clock()
        self._output.show(self.html())

    def html(self) -> str:
        """Return the bar as it stands."""
        elapsed, made = self._drawn - self._began, self._done - self._before
        rate = f"{made / elapsed:.1f}/s" if elapsed > 0 and made else ""
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in self._metrics.items())
        words = [f"{self._done}/{self._total} {self._unit}", rate, metrics]
        text = escape(" · ".join(word for word in words if word))
        return f'<progress value="{self._done}" max="{max(self._total, 1)}"></progress> <code>{text}</code>'


def _bar() -> RunProgress | NotebookBar:
    from rich.console import Console

    console = Console()
    output = notebook_output(console)
    return RunProgress(console) if output is None else NotebookBar(output)


def _steps_per_epoch(experiment: Any) -> int | None:
    """Return how many steps an epoch has; None if only its end will tell."""
    try:
        batches = len(experiment.loader)
    except Exception:  # no loader, one without a length, or one whose length cannot be told
        return None
    return math.ceil(batches / max(1, experiment.accumulate or 1)) or None


def _as_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None  # waits for the device
    return float(value) if isinstance(value, int | float) else None
