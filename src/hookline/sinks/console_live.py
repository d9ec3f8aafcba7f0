"""Draw what changes on the screen while a run lasts: the column of metrics, and the progress bar.

`ConsoleSink` hands records to the `LiveColumn` of its live mode and makes the `RunProgress` that shares its screen; the
training loops and the command line advance the progress. Both draw by rich.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from hookline.sinks.console_metrics import (
    DOWN,
    UP,
    MetricChoice,
    format_value,
    has_nonfinite,
    printable,
    split_key,
    trend,
    typical,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress, TaskID
    from rich.table import Table
    from rich.text import Text

    from hookline.records.sink import Record

__all__ = ["LiveColumn", "NotebookOutput", "RunProgress", "can_redraw", "notebook_output", "screen_text"]

_WIDTH: Final = 50
_ROOM_BESIDE: Final = 56
"""Characters that the progress of the run needs; on a narrower screen it is drawn below the column."""
_MAX_ROWS: Final = 24
"""Rows of metrics where the user has chosen none."""
_FRAME: Final = 3
_FRAME_AND_BAR: Final = 5
"""Lines of the screen that are not metrics: the frame, the line of the cursor; the bar and its metrics."""
_REDRAWS_PER_SECOND: Final = 4

_BETWEEN_DRAWINGS: Final = 0.1
"""Seconds. A step may take less than a millisecond, and advancing a bar of rich takes 20 µs."""
_BETWEEN_LINES: Final = 10.0
"""Seconds, where there is no terminal."""
_ROOM_FOR_METRICS: Final = 72
"""Characters of a screen that has room for metrics beside the bar."""


def can_redraw(console: Console) -> bool:
    """Return whether ``console`` is a terminal on which lines can be drawn again."""
    return console.is_terminal and not console.is_dumb_terminal


def screen_text(console: Console, text: str, style: str = "") -> Text:
    """Return ``text`` for rich, in characters that ``console`` has, without markup."""
    from rich.text import Text

    return Text(printable(text, console.encoding), style=style)


class NotebookOutput:
    """One output below the cell of a notebook that is running, replaced each time. Needs no widgets.

    Args:
        display: ``IPython.display``.
    """

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, html: str) -> None:
        """Show ``html`` in place of what was shown before."""
        shown = self._display.HTML(html)
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def notebook_output(console: Console) -> NotebookOutput | None:
    """Return an output of its own if ``console`` prints to a notebook, where every line would be one more output."""
    if not console.is_jupyter:
        return None
    from IPython import display

    return NotebookOutput(display)


class LiveColumn:
    """Groups of metrics with their newest value and whether it rises or falls, always on the screen."""

    def __init__(
        self,
        console: Console,
        metrics: Mapping[str, Mapping[str, str]] | MetricChoice | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._chosen = metrics
        self._values: dict[str, Any] = {}
        self._history: dict[str, tuple[float | int, ...]] = {}
        self._beside: RenderableType | None = None
        self._live: Live | None = None
        self._clock = clock
        self._started = clock()
        self._title = "Hook Metrics"

    def update(self, record: Record, strategy: str | None = None) -> None:
        """Show the values of ``record``."""
        numbers = {key: number for key, value in record.metrics.items() if (number := typical(value)) is not None}
        history = {key: (*self._history.get(key, ())[-2:], number) for key, number in numbers.items()}
        # New dictionaries, as rich draws in a thread of its own, which may be reading the old ones.
        self._history = {**self._history, **history}
        self._values = {**self._values, **record.metrics}
        self._title = f"{record.strategy or strategy or 'Hook Metrics'} · {record.place_text(' · ')}"
        self.refresh()

    def clear(self, strategy: str | None = None) -> None:
        """Drop all values, as another run begins."""
        self._values, self._history = {}, {}
        self._started = self._clock()
        self._title = strategy or "Hook Metrics"
        if self._live is not None:
            self._live.update(self)

    def show_beside(self, renderable: RenderableType | None) -> None:
        """Draw something else on the screen: the progress of the run. None removes it."""
        self._beside = renderable
        self.refresh()

    def refresh(self) -> None:
        """Draw, if there is anything to show."""
        if self._live is None and (self._groups() or self._beside is not None):
            from rich.live import Live

            self._live = Live(self, console=self._console, refresh_per_second=_REDRAWS_PER_SECOND)
            self._live.start()
        elif self._live is not None:
            self._live.update(self)

    def close(self) -> None:
        """Stop drawing; the last state stays on the screen."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        panel = [self._panel()] if self._groups() else []
        beside = [] if self._beside is None else [self._beside]
        if not panel or not beside or not self._is_wide:
            return Group(*panel, *beside)
        screen = Table.grid(expand=True, padding=(0, 1))
        screen.add_column(ratio=1)
        screen.add_column(width=_WIDTH)
        screen.add_row(*beside, *panel)
        return screen

    def _panel(self) -> RenderableType:
        from rich.panel import Panel

        elapsed = timedelta(seconds=int(self._clock() - self._started))
        width = min(_WIDTH, self._console.width)
        return Panel(self._rows(), title=screen_text(self._console, self._title), subtitle=str(elapsed), width=width)

    def _rows(self) -> Table:
        from rich.table import Table

        rows = Table.grid(expand=True, padding=(0, 1))
        rows.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        rows.add_column(justify="right", no_wrap=True)
        rows.add_column(width=1)
        values, history = self._values, self._history
        frame = _FRAME if self._is_wide else _FRAME_AND_BAR
        shown, num_hidden = _cut_to(self._groups(), self._console.height - frame)
        for group, labels in shown.items():
            rows.add_row(screen_text(self._console, group, "bold"))
            for label, key in labels.items():
                value, mark = values.get(key), trend(history.get(key, ()))
                rows.add_row(
                    screen_text(self._console, f"  {label}"),
                    screen_text(self._console, format_value(value), "bold red" if has_nonfinite(value) else ""),
                    screen_text(self._console, mark, {UP: "green", DOWN: "magenta"}.get(mark, "dim")),
                )
        if num_hidden:
            rows.add_row(screen_text(self._console, f"… {num_hidden} more", "dim"))
        return rows

    @property
    def _is_wide(self) -> bool:
        """Whether there is room for the progress of the run beside the column."""
        return self._console.width >= _WIDTH + _ROOM_BESIDE

    def _groups(self) -> dict[str, dict[str, str]]:
        """Return, by group, the labels of the metrics that there are, each with its key."""
        if isinstance(self._chosen, MetricChoice):
            return _by_hook(self._chosen.choose(self._values))
        if self._chosen:
            found = {
                group: {label: key for label, key in labels.items() if key in self._values}
                for group, labels in self._chosen.items()
            }
            return {group: labels for group, labels in found.items() if labels}
        return _by_hook([key for key in self._values if key.count("/") == 1][:_MAX_ROWS])


def _cut_to(groups: Mapping[str, Mapping[str, str]], num_lines: int) -> tuple[dict[str, dict[str, str]], int]:
    """Return the groups that fit into ``num_lines``, each with its heading, and how many metrics do not."""
    total = sum(map(len, groups.values()))
    if total + len(groups) <= num_lines:
        return {group: dict(labels) for group, labels in groups.items()}, 0
    shown: dict[str, dict[str, str]] = {}
    left = num_lines - 1  # the last line says how many are hidden
    for group, labels in groups.items():
        if left >= 2:  # no heading without a metric
            shown[group] = dict(list(labels.items())[: left - 1])
            left -= 1 + len(shown[group])
    return shown, total - sum(map(len, shown.values()))


def _by_hook(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        hook, metric = split_key(key)
        found.setdefault(hook, {})[metric] = key
    return found


class RunProgress:
    """The progress of a run: a bar with rate and time left on a terminal, else a line every ten seconds.

    Recipe::

        progress = RunProgress()
        progress.start(1000, "steps")
        for loss in train():
            progress.advance(loss=loss)
        progress.stop()

    Args:
        console: A rich console; one on the standard output if left out.
        live: The column of a `ConsoleSink` in live mode, which then draws the bar as well.
        clock: Returns the time, in seconds.
        on_advance: Called at each `advance`, before anything else.
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
        """Whether it is between `start` and `stop`."""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = self._done = self._before = 0
        self._unit = "steps"
        self._metrics: dict[str, float] = {}
        self._started = self._drawn_at = self._printed_at = 0.0

    def start(self, total: int, unit: str = "steps", *, done: int = 0) -> None:
        """Begin a run of ``total`` steps, or epochs; a resumed run has some ``done``."""
        self.stop()
        self._total, self._unit = total, unit
        self._done = self._before = done
        self._metrics = {}
        self._started = self._drawn_at = self._printed_at = self._clock()
        self.is_running = True
        if can_redraw(self._console):
            self._start_bar()

    def advance(self, n: int = 1, **metrics: float) -> None:
        """Count ``n`` more as done; show ``metrics`` such as the loss beside the bar."""
        self._on_advance()
        self._done += n
        if metrics:
            self._metrics |= metrics
        now = self._clock()
        if self._bar is not None and now - self._drawn_at >= _BETWEEN_DRAWINGS:
            self._drawn_at = now
            self._draw()
        elif self._bar is None and now - self._printed_at >= _BETWEEN_LINES:
            self._printed_at = now
            self._print_line()

    def note(self, **metrics: float) -> None:
        """Keep newer metrics for the next drawing."""
        self._metrics |= metrics

    def stop(self) -> None:
        """End the progress wherever it is; the bar stays as it is. May be called more than once."""
        if self._bar is not None:
            self._draw()
            if self._column is None:
                self._bar.stop()
        elif self._done > self._before:
            self._print_line()  # a short run has printed nothing yet, and a log has to show where a run ended
        self._bar = None
        self.is_running = False
        self._before = self._done

    def __rich__(self) -> str:
        """Return the newest metrics, for the live column to draw below the bar."""
        from rich.markup import escape

        return escape(self._metrics_text())

    def _start_bar(self) -> None:
        from rich.console import Group
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        has_room = self._column is None and self._console.width >= _ROOM_FOR_METRICS
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            *([TextColumn("{task.fields[metrics]}", markup=False)] if has_room else []),
            console=self._console,
            # No thread that draws: a data loader that forks while it holds a lock would hang in its workers.
            auto_refresh=False,
        )
        self._task = self._bar.add_task(self._unit, total=self._total, completed=self._done, rate="", metrics="")
        if self._column is None:
            self._bar.start()
        else:
            self._column.show_beside(Group(self._bar, self))

    def _draw(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, rate=self._rate_text(), metrics=self._metrics_text())
            if self._column is None:
                self._bar.refresh()

    def _print_line(self) -> None:
        rate, left = self._rate(), self._total - self._done
        time_left = f"{timedelta(seconds=round(left / rate))} left" if rate > 0 and left > 0 else ""
        parts = [f"{self._done}/{self._total} {self._unit}", self._rate_text(), time_left, self._metrics_text()]
        line = printable(" · ".join(part for part in parts if part), self._console.encoding)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _rate(self) -> float:
        elapsed = self._clock() - self._started
        return (self._done - self._before) / elapsed if elapsed > 0 else 0.0

    def _rate_text(self) -> str:
        rate = self._rate()
        return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each" if rate > 0 else ""

    def _metrics_text(self) -> str:
        return "  ".join(f"{name} {float(value):.4g}" for name, value in self._metrics.items())
