"""Show metrics on the screen: a table or a line at every snapshot, or a column that is always up to date.

The fan-out hands records to `ConsoleSink`, which prints by rich; `console_metrics` chooses and formats the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, Final, Literal, get_args

from hookline.errors import OptionError
from hookline.records.sink import MetricSink, Record
from hookline.screen import RunProgress, can_redraw, screen_text
from hookline.sinks.console_metrics import (
    MetricChoice,
    SnapshotLines,
    format_value,
    has_nonfinite,
    split_key,
    trend,
    typical,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["ConsoleSink"]

Mode = Literal["normal", "live", "lines"]
_MAX_SLASHES: Final = 1
"""A name with more is that of one layer or parameter: hundreds, which are for files and the page."""
_COLUMN_WIDTH: Final = 50


class ConsoleSink(RunProgress, MetricSink):
    """Shows metrics on the screen; and how far the run is, if a loop is given it as ``progress=``.

    Recipe::

        sink = hookline.sinks.ConsoleSink()
        sink.emit({"norms/total": 0.5}, epoch=0, hook_point="POST_EPOCH")
        sink.emit({"phases/code": 1}, epoch=0, hook_point="SNAPSHOT")  # prints one table of both

    As the progress of a loop (``epoch_loop(…, manager=HookManager(sinks=[sink]), progress=sink)``) it prints when the
    step, or epoch, of the snapshot is over: metrics of hooks and of the evaluation are in one table.

    Args:
        mode: ``"normal"`` keeps the newest value of every metric and prints a table at a SNAPSHOT, and at the end.
            ``"live"`` shows a column with chosen metrics and whether they rise or fall, always up to date; where the
            screen cannot be redrawn it says so, and prints tables. ``"lines"`` prints a line where ``"normal"`` prints
            a table: eight numbers at most, or those of ``show``.
        live_metrics: The metrics of the column: ``{group: {label: metric}}``. If left out: all, by hook. In lines,
            these come before the metrics of other hooks.
        show: The metrics of the lines and the column: ``"hook/metric"``, a metric's name alone, or a pattern with
            ``*``. Overrides ``live_metrics``.
        snapshot_every: Print after every so many epochs as well, for runs where no hook fires at SNAPSHOT.
        console: A rich console to print to. If left out, one is made on ``file``.
        file: Where to print to; the standard output if left out.
        width: Characters of a line; those of the terminal if left out.
        clock: Returns the time, in seconds.
    """

    def __init__(
        self,
        mode: Mode = "normal",
        live_metrics: Mapping[str, Mapping[str, str]] | None = None,
        *,
        show: Sequence[str] = (),
        snapshot_every: int | None = None,
        console: Console | None = None,
        file: IO[str] | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if str(mode).lower() not in get_args(Mode):
            raise OptionError(f"mode= of ConsoleSink is 'normal', 'live' or 'lines', got {mode!r}.")
        if isinstance(show, str):
            raise OptionError(f"show= of ConsoleSink is a list of metrics, got {show!r}; write [{show!r}].")
        if console is not None and (file is not None or width is not None):
            raise OptionError("ConsoleSink takes either a console, which has a file and a width, or these; got both.")
        if console is None:
            from rich.console import Console

            # In a notebook rich prints there, whatever the file.
            console = Console(file=file, width=width, force_jupyter=None if file is None else False)
        super().__init__(console, clock=clock)
        self.mode = str(mode).lower()
        """As given; the column is drawn only where the screen can be redrawn."""
        self.choice = MetricChoice(show, live_metrics)
        """Which metrics are shown where there is room for few."""
        self.names: set[str] = set()
        """Every metric that has come."""
        self._snapshot_every = snapshot_every
        self._is_live = self.mode == "live" and can_redraw(console)
        if self.mode == "live" and not self._is_live:
            console.print(
                "The live view needs a terminal, or ipywidgets; metrics are printed as tables.", highlight=False
            )
        self._lines = SnapshotLines(self.choice)
        self._latest: dict[str, Any] = {}
        """The newest values: of the column all, else those that are not printed yet."""
        self._history: dict[str, tuple[float, ...]] = {}
        """The last three numbers of each metric of the column."""
        self._last: Record | None = None
        self._is_due = False
        self._strategy: str | None = None
        self._run_began = clock()

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Show the metrics, or keep them for the next table."""
        self.write(Record(metrics, epoch, hook_point))

    def write(self, record: Record) -> None:
        """Show ``record``, or keep it for the next table; in a distributed run, that of the first process alone."""
        if not record.metrics or record.rank != 0:
            return
        if self._last is not None and (record.epoch, record.step) != (self._last.epoch, self._last.step):
            self._print_due()
        self._last = record
        self._latest.update(record.metrics)
        self.names.update(record.metrics)
        if self._is_live:
            self._note_numbers(record.metrics)
            self.draw()
        elif self._is_snapshot(record):
            self._is_due = True
            if not self.is_running:  # nobody will say that the step is over
                self._print_due()

    def advance(self, n: int = 1, read: Callable[[], Mapping[str, float]] = dict) -> None:
        """Print the snapshot of the step, or epoch, that is over, and move the bar on."""
        self._print_due()
        super().advance(n, read)

    def set_run_context(self, **context: Any) -> None:
        """Drop what was kept of the run before; ``flush`` prints it."""
        self._latest, self._history, self._last, self._is_due = {}, {}, None, False
        self._lines = SnapshotLines(self.choice)
        self._strategy = context.get("strategy", self._strategy)
        self._run_began = self._clock()

    def flush(self) -> None:
        """Print what came since the last table or line."""
        if self._is_live:
            return
        latest, self._latest, self._is_due = self._latest, {}, False
        if not latest or self._last is None:
            return
        if self.mode == "lines":
            lines = self._lines.lines(latest, self._last)
            if lines:
                self.console.print(screen_text(self.console, "\n".join(lines)), soft_wrap=True)
        else:
            self.console.print(self._table(latest))

    def close(self) -> None:
        """Print what is left, and stop drawing."""
        self.flush()
        self.stop()

    def _is_snapshot(self, record: Record) -> bool:
        every = self._snapshot_every
        is_nth_epoch = record.point == "POST_EPOCH" and bool(every) and record.position % (every or 1) == 0
        return record.point == "SNAPSHOT" or is_nth_epoch

    def _print_due(self) -> None:
        if self._is_due:
            self.flush()

    def _title(self) -> list[str]:
        """Return which strategy the newest record is of, and its epoch and step."""
        if self._last is None:
            return [self._strategy] if self._strategy else []
        strategy = self._last.strategy or self._strategy
        return [*([strategy] if strategy else []), self._last.place_text(" · ")]

    # -- the table -------------------------------------------------------------------------------------------

    def _table(self, latest: Mapping[str, Any]) -> RenderableType:
        from rich.table import Table

        shown = {key: latest[key] for key in sorted(latest) if key.count("/") <= _MAX_SLASHES}
        hidden = f"{len(latest) - len(shown)} more by layer or parameter, not shown"
        title = screen_text(self.console, " · ".join(["Hook Metrics", *reversed(self._title())]))
        if not shown:
            return title.append(f": {hidden.replace(' more', '')}")
        table = Table(title=title, title_justify="left", caption_justify="left")
        table.caption = hidden if len(shown) < len(latest) else None
        table.min_width = min(title.cell_len + 2, self.console.width)  # a title is not wider than its table
        table.add_column("Hook", overflow="fold")
        table.add_column("Metric", overflow="fold")
        table.add_column("Value", justify="right", overflow="fold")
        for key, value in shown.items():
            name = [screen_text(self.console, part) for part in split_key(key)]
            table.add_row(*name, self._value(value))
        return table

    def _value(self, value: Any) -> RenderableType:
        return screen_text(self.console, format_value(value), "bold red" if has_nonfinite(value) else "")

    # -- the column ------------------------------------------------------------------------------------------

    def _note_numbers(self, metrics: Mapping[str, Any]) -> None:
        for key, value in metrics.items():
            number = typical(value)
            if isinstance(number, float):  # an integer is a count, which has no trend
                self._history[key] = (*self._history.get(key, ())[-2:], number)

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        bar = [super().__rich__()] if self.is_running else []
        column = [self._column()] if self._is_live and self.choice.groups(self._latest) else []
        return Group(*bar, *column)  # the bar is above: rich cuts what does not fit on the screen

    def _column(self) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table

        rows = Table.grid(expand=True, padding=(0, 1))
        rows.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        rows.add_column(justify="right", no_wrap=True)
        rows.add_column(width=1)
        for group, labels in self.choice.groups(self._latest).items():
            rows.add_row(screen_text(self.console, group, "bold"))
            for label, key in labels.items():
                mark = screen_text(self.console, trend(self._history.get(key, ())), "cyan")
                rows.add_row(screen_text(self.console, f"  {label}"), self._value(self._latest[key]), mark)
        title = screen_text(self.console, " · ".join(self._title()))
        elapsed = str(timedelta(seconds=int(self._clock() - self._run_began)))
        return Panel(rows, title=title, subtitle=elapsed, width=min(_COLUMN_WIDTH, self.console.width))
