"""Metrics on the screen: a table or a line at every snapshot, or a column beside the progress that is always there.

Takes records from the fan-out, hands text to rich. Several sinks and the progress bar share one screen through the same
rich ``Console``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Final, Literal, get_args

from hookline.errors import OptionError
from hookline.sinks.console_choice import MetricChoice
from hookline.sinks.console_format import format_value, is_troubled, printable, split_key
from hookline.sinks.console_lines import SnapshotLines
from hookline.sinks.record import Record
from hookline.sinks.sink import MetricSink

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hookline.sinks.console_live import LiveColumn
    from hookline.sinks.console_progress import RunProgress

__all__ = ["ConsoleSink", "Mode"]

Mode = Literal["normal", "live", "lines"]
_MOST_SLASHES: Final = 1
"""A name with more is that of one layer or parameter: hundreds, which are for files and the page."""


class ConsoleSink(MetricSink):
    """Shows metrics on the screen.

    Recipe::

        sink = hookline.sinks.ConsoleSink()
        sink.emit({"norms/total": 0.5}, epoch=0, hook_point="POST_EPOCH")
        sink.emit({"phases/code": 1}, epoch=0, hook_point="SNAPSHOT")  # prints one table of both

    Args:
        mode: ``"normal"`` keeps the newest value of every metric and prints a table when a SNAPSHOT has come, and at
            the end; while `progress_bar` moves, when the snapshot is over, so that what hooks and the evaluation say
            of it is in one. ``"live"`` shows a column with chosen metrics and whether they rise or fall, always up to
            date; on what is no terminal it says so once, and prints tables. ``"lines"`` prints a line where
            ``"normal"`` prints a table: eight numbers at most, or those of ``show``.
        live_metrics: What is in the column: ``{group: {label: metric}}``. If left out: what comes, by hook. In lines,
            what goes before the metrics of other hooks.
        show: Which metrics are in the lines and in the column: ``"hook/metric"``, a metric's name alone, or a pattern
            with ``*``. Goes before ``live_metrics``.
        snapshot_every: How many epochs from one line to the next where no hook says that a snapshot has come.
        console: A rich console to print to. If left out, one is made on ``file``.
        file: Where to print to; the standard output if left out.
        width: How many characters fit in a line; as the terminal says if left out.
        clock: What tells the time, in seconds.
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
        """As asked for; `live` tells what came of it."""
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
        self._is_due = False
        """Whether a snapshot waits for what else is told of it."""
        self._strategy: str | None = None

    # -- the screen ------------------------------------------------------------------------------------------

    @property
    def console(self) -> Console:
        """The rich console; made when first used."""
        if self._console is None:
            console, file, width = self._given
            if console is None:
                from rich.console import Console

                console = Console(file=file, width=width)
            self._console = console
            if self.mode == "live" and not _can_be_redrawn(console):
                console.print("The live view needs a terminal; metrics are printed as tables.", highlight=False)
        return self._console

    @property
    def live(self) -> LiveColumn | None:
        """The column, in live mode on a terminal."""
        if self._column is None and self.mode == "live" and _can_be_redrawn(self.console):
            from hookline.sinks.console_live import LiveColumn

            chosen = self.choice if self.choice.asked else self._live_metrics
            self._column = LiveColumn(self.console, chosen, clock=self._clock)
        return self._column

    def progress_bar(self) -> RunProgress:
        """A bar for the progress of the run that shares the screen with the metrics."""
        from hookline.sinks.console_progress import RunProgress

        self._bar = RunProgress(self.console, self.live, clock=self._clock, on_advance=self._settle)
        return self._bar

    # -- metrics ---------------------------------------------------------------------------------------------

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Show the metrics, or keep them for the next table."""
        self.write(Record(metrics, epoch, hook_point))

    def write(self, record: Record) -> None:
        """Show a record, or keep it for the next table; of a distributed run, that of the first process alone."""
        if not record.metrics or record.rank != 0:
            return
        if self.live is not None:
            self.live.update(record, self._strategy)
            return
        if self._last is not None and self._moment(record) != self._moment(self._last):
            self._settle()
        self._latest |= record.metrics
        self._last = record
        if record.point == "SNAPSHOT":
            self._is_due = True
            if self._bar is None or not self._bar.is_running:
                self._settle()
        elif self.mode == "lines" and record.point == "POST_EPOCH" and self._snapshot_every:
            self._is_due = self._is_due or record.epoch % self._snapshot_every == 0

    def _moment(self, record: Record) -> tuple[Any, ...]:
        """What records of one table or line have in common; a line has the end of the epoch and its snapshot."""
        return (record.epoch, record.step) if self.mode == "lines" else (record.point, record.step)

    def _settle(self) -> None:
        """A snapshot is over: the next step is made, or something else is told."""
        if self._is_due:
            self._print_table()

    def set_run_context(self, **context: Any) -> None:
        """Another run begins: what was kept of the last one is forgotten; ``flush`` is what prints it."""
        self._latest.clear()
        self._lines.clear()
        self._is_due = False
        self._strategy = context.get("strategy", self._strategy)
        if self._column is not None:
            self._column.clear(self._strategy)

    def flush(self) -> None:
        """Print what has come since the last table or line."""
        self._print_table()
        if self._column is not None:
            self._column.refresh()

    def close(self) -> None:
        """Print what is left, and leave the screen to others."""
        self.flush()
        if self._column is not None:
            self._column.close()

    # -- the table -------------------------------------------------------------------------------------------

    def _print_table(self) -> None:
        latest, self._latest, self._is_due = self._latest, {}, False
        if latest and self._last is not None and self.mode == "lines":
            for line in self._lines.lines(latest, self._last):
                self.console.print(self._text(line), soft_wrap=True)
        elif latest and self._last is not None:
            shown = {key: latest[key] for key in sorted(latest) if key.count("/") <= _MOST_SLASHES}
            num_hidden = len(latest) - len(shown)
            if shown:
                self.console.print(self._table(shown, num_hidden, self._last))
            else:
                self.console.print(
                    self._text(f"{self._title(self._last)}: {num_hidden} by layer or parameter, not shown")
                )

    def _table(self, shown: Mapping[str, Any], num_hidden: int, record: Record) -> Table:
        from rich.table import Table

        caption = f"{num_hidden} more by layer or parameter, not shown" if num_hidden else None
        title = self._text(self._title(record))
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        table.min_width = min(title.cell_len + 2, self.console.width)  # a title is not wider than its table
        table.add_column("Hook", overflow="fold")
        table.add_column("Metric", overflow="fold")
        table.add_column("Value", justify="right", overflow="fold")
        for key, value in shown.items():
            hook, metric = split_key(key)
            style = "bold red" if is_troubled(value) else ""
            table.add_row(self._text(hook), self._text(metric), self._text(format_value(value), style))
        return table

    def _title(self, record: Record) -> str:
        # In the step loop the axis is the step.
        where = [f"step {record.step}"] if record.step is not None else []
        if record.step is None or record.epoch != record.step:
            where.insert(0, f"epoch {record.epoch}")
        strategy = record.strategy or self._strategy
        return " · ".join(["Hook Metrics", *where, *([strategy] if strategy else [])])

    def _text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        return Text(printable(text, self.console.encoding), style=style)


def _can_be_redrawn(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal
