"""Show metrics on the screen: a table or a line at every snapshot, or a column beside the progress bar.

The fan-out hands records to `ConsoleSink`, which prints by rich. Several sinks and the progress bar share one screen
through the same rich ``Console``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import IO, TYPE_CHECKING, Any, Final, Literal, get_args

from hookline.errors import OptionError
from hookline.records.sink import MetricSink, Record
from hookline.sinks.console_live import (
    LiveColumn,
    NotebookOutput,
    RunProgress,
    can_redraw,
    notebook_output,
    screen_text,
)
from hookline.sinks.console_metrics import MetricChoice, SnapshotLines, format_value, has_nonfinite, split_key
from hookline.tables import Table as PlainTable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["ConsoleSink"]

Mode = Literal["normal", "live", "lines"]
_NOTEBOOK_LINES: Final = 30
_MAX_SLASHES: Final = 1
"""A name with more is that of one layer or parameter: hundreds, which are for files and the page."""


class ConsoleSink(MetricSink):
    """Shows metrics on the screen.

    Recipe::

        sink = hookline.sinks.ConsoleSink()
        sink.emit({"norms/total": 0.5}, epoch=0, hook_point="POST_EPOCH")
        sink.emit({"phases/code": 1}, epoch=0, hook_point="SNAPSHOT")  # prints one table of both

    Args:
        mode: ``"normal"`` keeps the newest value of every metric and prints a table at a SNAPSHOT, and at the end;
            while `progress_bar` runs, after the snapshot, so that metrics of hooks and of the evaluation are in one
            table. ``"live"`` shows a column with chosen metrics and whether they rise or fall, always up to date;
            without a terminal it says so once, and prints tables. ``"lines"`` prints a line where ``"normal"`` prints
            a table: eight numbers at most, or those of ``show``. Below the cell of a notebook there is one table, or
            the newest thirty lines, drawn in place.
        live_metrics: The metrics of the column: ``{group: {label: metric}}``. If left out: all, by hook. In lines,
            these come before the metrics of other hooks.
        show: The metrics of the lines and the column: ``"hook/metric"``, a metric's name alone, or a pattern with
            ``*``. Overrides ``live_metrics``.
        snapshot_every: How many epochs from one line to the next where no hook fires at SNAPSHOT.
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
        self.mode: Mode = next(known for known in get_args(Mode) if known == str(mode).lower())
        """As given; `live` is None where there is no terminal."""
        self._live_metrics = live_metrics
        declared = [key for labels in (live_metrics or {}).values() for key in labels.values()]
        self.choice = MetricChoice(show, declared)
        """Which metrics are shown where there is room for few."""
        self._lines = SnapshotLines(self.choice)
        self._snapshot_every = snapshot_every
        self._given = (console, file, width)
        self._clock = clock
        self._console: Console | None = None
        self._column: LiveColumn | None = None
        self._latest: dict[str, Any] = {}
        self._last: Record | None = None
        self._bar: RunProgress | None = None
        self._is_due = False  # a snapshot waits for the other metrics of its step
        self._strategy: str | None = None
        self._output: NotebookOutput | None = None
        self._names: list[str] = []  # of the columns, above the newest lines
        self._newest: deque[str] = deque(maxlen=_NOTEBOOK_LINES)

    @property
    def console(self) -> Console:
        """The rich console; made when first used."""
        if self._console is None:
            console, file, width = self._given
            if console is None:
                from rich.console import Console

                # In a notebook rich prints there, whatever the file.
                console = Console(file=file, width=width, force_jupyter=None if file is None else False)
            self._console = console
            if self.mode == "live" and not can_redraw(console) and not console.is_jupyter:
                console.print("The live view needs a terminal; metrics are printed as tables.", highlight=False)
        return self._console

    @property
    def live(self) -> LiveColumn | None:
        """The column, in live mode on a terminal."""
        if self._column is None and self.mode == "live" and can_redraw(self.console):
            chosen = self.choice if self.choice.asked else self._live_metrics
            self._column = LiveColumn(self.console, chosen, clock=self._clock)
        return self._column

    def progress_bar(self) -> RunProgress:
        """Return a progress bar that shares the screen with the metrics."""
        self._bar = RunProgress(self.console, self.live, clock=self._clock, on_advance=self._print_due)
        return self._bar

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Show the metrics, or keep them for the next table."""
        self.write(Record(metrics, epoch, hook_point))

    def write(self, record: Record) -> None:
        """Show ``record``, or keep it for the next table; in a distributed run, that of the first process alone."""
        if not record.metrics or record.rank != 0:
            return
        if self.live is not None:
            self.live.update(record, self._strategy)
            return
        if self._last is not None and self._moment(record) != self._moment(self._last):
            self._print_due()
        self._latest |= record.metrics
        self._last = record
        if record.point == "SNAPSHOT":
            self._is_due = True
            if self._bar is None or not self._bar.is_running:
                self._print_due()
        elif self.mode == "lines" and record.point == "POST_EPOCH" and self._snapshot_every:
            self._is_due = self._is_due or record.position % self._snapshot_every == 0

    def _moment(self, record: Record) -> tuple[Any, ...]:
        """Return what the records of one table or line share; a line has the end of the epoch and its snapshot."""
        return (record.epoch, record.step) if self.mode == "lines" else (record.point, record.step)

    def set_run_context(self, **context: Any) -> None:
        """Drop what was kept of the run before; ``flush`` prints it."""
        self._latest.clear()
        self._lines.clear()
        self._is_due, self._output = False, None
        self._newest.clear()
        self._strategy = context.get("strategy", self._strategy)
        if self._column is not None:
            self._column.clear(self._strategy)

    def flush(self) -> None:
        """Print what came since the last table or line."""
        self._print()
        if self._column is not None:
            self._column.refresh()

    def close(self) -> None:
        """Print what is left, and stop drawing."""
        self.flush()
        if self._column is not None:
            self._column.close()

    def _print_due(self) -> None:
        """Print the snapshot that waits, as another step begins or a record of another moment comes."""
        if self._is_due:
            self._print()

    def _print(self) -> None:
        latest, self._latest, self._is_due = self._latest, {}, False
        if not latest or self._last is None:
            return
        if self.mode == "lines":
            self._print_lines(self._lines.lines(latest, self._last))
            return
        shown = {key: latest[key] for key in sorted(latest) if key.count("/") <= _MAX_SLASHES}
        num_hidden = len(latest) - len(shown)
        if self._in_notebook is not None:
            self._in_notebook.show(self._html(shown, num_hidden, self._last))
        elif shown:
            self.console.print(self._table(shown, num_hidden, self._last))
        else:
            text = f"{self._title(self._last)}: {num_hidden} by layer or parameter, not shown"
            self.console.print(screen_text(self.console, text))

    @property
    def _in_notebook(self) -> NotebookOutput | None:
        """The output below the cell of a notebook, one for each run; None elsewhere."""
        if self._output is None:
            self._output = notebook_output(self.console)
        return self._output

    def _print_lines(self, lines: Sequence[str]) -> None:
        if lines and self._in_notebook is not None:
            *names, row = lines
            if names and names != self._names:
                self._names = names
                self._newest.clear()  # they stood under other names
            self._newest.append(row)
            text = "\n".join([*self._names, *self._newest])
            self._in_notebook.show(f"<pre>{escape(text)}</pre>")
            return
        for line in lines:
            self.console.print(screen_text(self.console, line), soft_wrap=True)

    def _html(self, shown: Mapping[str, Any], num_hidden: int, record: Record) -> str:
        rows = [(*split_key(key), format_value(value)) for key, value in shown.items()]
        foot = [f"{num_hidden} more by layer or parameter, not shown"] if num_hidden else []
        return PlainTable(("Hook", "Metric", "Value"), rows, (2,), self._title(record), foot).html()

    def _table(self, shown: Mapping[str, Any], num_hidden: int, record: Record) -> Table:
        from rich.table import Table

        caption = f"{num_hidden} more by layer or parameter, not shown" if num_hidden else None
        title = screen_text(self.console, self._title(record))
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        table.min_width = min(title.cell_len + 2, self.console.width)  # a title is not wider than its table
        table.add_column("Hook", overflow="fold")
        table.add_column("Metric", overflow="fold")
        table.add_column("Value", justify="right", overflow="fold")
        for key, value in shown.items():
            name = [screen_text(self.console, part) for part in split_key(key)]
            style = "bold red" if has_nonfinite(value) else ""
            table.add_row(*name, screen_text(self.console, format_value(value), style))
        return table

    def _title(self, record: Record) -> str:
        strategy = record.strategy or self._strategy
        return " · ".join(["Hook Metrics", record.place_text(" · "), *([strategy] if strategy else [])])
