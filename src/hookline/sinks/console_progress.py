"""How far a run is: a bar with rate and time left on a terminal, now and then a line where there is none.

Moved on by the command line; shares the screen with `ConsoleSink` through its console and its live column.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from hookline.sinks.console_format import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from hookline.sinks.console_live import LiveColumn

__all__ = ["RunProgress"]

_BETWEEN_DRAWINGS: Final = 0.1
"""Seconds. A step may take less than a millisecond, and moving a bar of rich on takes 20 µs."""
_ROOM_FOR_FIGURES: Final = 72
"""Characters of a line."""
_BETWEEN_LINES: Final = 10.0
"""Seconds, where there is no terminal."""


class RunProgress:
    """The progress of a run, on the screen.

    Recipe::

        progress = RunProgress()
        progress.start(1000, "steps")
        for loss in train():
            progress.advance(loss=loss)
        progress.stop()

    Args:
        console: A rich console; one on the standard output if left out.
        live: The column of a `ConsoleSink` in live mode, which then draws the bar as well.
        clock: What tells the time, in seconds.
        on_advance: Called whenever it moves on, before that.
    """

    def __init__(
        self,
        console: Console | None = None,
        live: LiveColumn | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_advance: Callable[[], None] = lambda: None,
    ) -> None:
        if console is None:
            from rich.console import Console

            console = Console()
        self._console = console
        self._column = live
        self._clock = clock
        self._on_advance = on_advance
        self.is_running = False
        """Between `start` and `stop`."""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = self._done = self._before = 0
        self._unit = "steps"
        self._figures: dict[str, float] = {}
        self._began = self._drawn = self._told = 0.0

    def start(self, total: int, unit: str = "steps", *, done: int = 0) -> None:
        """A run of so many steps, or epochs, begins; of one that goes on, some are done."""
        self.stop()
        self._total, self._unit = total, unit
        self._done = self._before = done
        self._figures = {}
        self._began = self._drawn = self._told = self._clock()
        self.is_running = True
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._start_bar()

    def advance(self, n: int = 1, **figures: float) -> None:
        """So many more are done; figures such as the loss are shown beside."""
        self._on_advance()
        self._done += n
        if figures:
            self._figures |= figures
        now = self._clock()
        if self._bar is not None and now - self._drawn >= _BETWEEN_DRAWINGS:
            self._drawn = now
            self._draw()
        elif self._bar is None and now - self._told >= _BETWEEN_LINES:
            self._told = now
            self._print_line()

    def note(self, **figures: float) -> None:
        """Newer figures, to be shown when it is drawn next."""
        self._figures |= figures

    def stop(self) -> None:
        """The run is over, wherever it is; the bar stays as it is. More than once is no matter."""
        if self._bar is not None:
            self._draw()
            if self._column is None:
                self._bar.stop()
        elif self._done > self._before:
            self._print_line()  # short runs have told nothing yet, and a log has to show where a run ended
        self._bar = None
        self.is_running = False
        self._before = self._done

    # -- on a terminal ---------------------------------------------------------------------------------------

    def _start_bar(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            *([TextColumn("{task.fields[figures]}", markup=False)] if self._has_room else []),
            console=self._console,
            # No thread that draws: a data loader that forks while it holds a lock would hang in its workers.
            auto_refresh=False,
        )
        self._task = self._bar.add_task(self._unit, total=self._total, completed=self._done, rate="", figures="")
        if self._column is None:
            self._bar.start()
        else:
            from rich.console import Group

            self._column.show_beside(Group(self._bar, _Figures(self)))

    @property
    def _has_room(self) -> bool:
        """For figures beside the bar; where the live column is, they go below."""
        return self._column is None and self._console.width >= _ROOM_FOR_FIGURES

    def _draw(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, rate=self._rate_text(), figures=self.figures_text())
            if self._column is None:
                self._bar.refresh()

    # -- without one -----------------------------------------------------------------------------------------

    def _print_line(self) -> None:
        parts = [f"{self._done}/{self._total} {self._unit}", self._rate_text(), self._left_text(), self.figures_text()]
        line = printable(" · ".join(part for part in parts if part), self._console.encoding)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _rate(self) -> float:
        elapsed = self._clock() - self._began
        return (self._done - self._before) / elapsed if elapsed > 0 else 0.0

    def _rate_text(self) -> str:
        rate = self._rate()
        return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each" if rate > 0 else ""

    def _left_text(self) -> str:
        rate, left = self._rate(), self._total - self._done
        return f"{timedelta(seconds=round(left / rate))} left" if rate > 0 and left > 0 else ""

    def figures_text(self) -> str:
        """The newest figures, in one line."""
        return "  ".join(f"{name} {float(value):.4g}" for name, value in self._figures.items())


class _Figures:
    """The newest figures, whenever they are drawn."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def __rich__(self) -> str:
        from rich.markup import escape

        return escape(self._progress.figures_text())
