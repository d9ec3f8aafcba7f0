"""Show metrics on the screen: a table at every snapshot, or a column that is always up to date.

A `Reader` hands records to `ConsoleSink`, which prints by rich.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from hookline.errors import OptionError
from hookline.records.sink import MetricSink, Record
from hookline.screen import RunProgress, can_redraw, screen_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Mode = Literal["normal", "live"]
_MAX_SLASHES: Final = 1
"""A name with more is that of one layer or parameter: hundreds, which are for files and the page."""
_COLUMN_WIDTH: Final = 50
_LEAST_CHANGE: Final = 0.01
"""A change of less than one percent is no trend."""
_LONGEST: Final = 60
"""Characters of a text that are shown."""
_MAX_ROWS: Final = 24
"""Metrics in a column where the user has chosen none."""


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
            screen cannot be redrawn it says so, and prints tables.
        live_metrics: The metrics of the column: ``{group: {label: metric}}``. If left out: all, by hook.
        snapshot_every: Print after every so many epochs as well, for runs where no hook fires at SNAPSHOT.
        console: A rich console to print to: ``Console(file=…, width=…)``; one on the standard output if left out.
    """

    def __init__(
        self,
        mode: Mode = "normal",
        live_metrics: Mapping[str, Mapping[str, str]] | None = None,
        *,
        snapshot_every: int | None = None,
        console: Console | None = None,
    ) -> None:
        if str(mode).lower() not in get_args(Mode):
            raise OptionError(f"mode= of ConsoleSink is 'normal' or 'live', got {mode!r}.")
        super().__init__(console)
        self.mode = str(mode).lower()
        """As given; the column is drawn only where the screen can be redrawn."""
        self._live_metrics = live_metrics or {}
        self._snapshot_every = snapshot_every
        self._is_live = self.mode == "live" and can_redraw(self.console)
        if self.mode == "live" and not self._is_live:
            self.console.print(
                "The live view needs a terminal, or ipywidgets; metrics are printed as tables.", highlight=False
            )
        self._latest: dict[str, Any] = {}
        """The newest values: of the column all, else those that are not printed yet."""
        self._history: dict[str, tuple[float, ...]] = {}
        """The last three numbers of each metric of the column."""
        self._last: Record | None = None
        self._is_due = False
        self._strategy: str | None = None

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
        self._strategy = context.get("strategy", self._strategy)

    def flush(self) -> None:
        """Print what came since the last table."""
        if self._is_live:
            return
        latest, self._latest, self._is_due = self._latest, {}, False
        if latest:
            self.console.print(self._table(latest))

    def close(self) -> None:
        """Print what is left, and stop drawing."""
        self.flush()
        self.stop()

    def _is_snapshot(self, record: Record) -> bool:
        every = self._snapshot_every if record.point == "POST_EPOCH" else None
        return record.point == "SNAPSHOT" or bool(every and record.position % every == 0)

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
            name = [screen_text(self.console, part) for part in _split_key(key)]
            table.add_row(*name, self._value(value))
        return table

    def _value(self, value: Any) -> RenderableType:
        return screen_text(self.console, format_value(value), "bold red" if _has_nonfinite(value) else "")

    # -- the column ------------------------------------------------------------------------------------------

    def _note_numbers(self, metrics: Mapping[str, Any]) -> None:
        for key, value in metrics.items():
            number = _typical(value)
            if isinstance(number, float):  # an integer is a count, which has no trend
                self._history[key] = (*self._history.get(key, ())[-2:], number)

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        bar = [super().__rich__()] if self.is_running else []
        column = [self._column()] if self._is_live and self._groups() else []
        return Group(*bar, *column)  # the bar is above: rich cuts what does not fit on the screen

    def _column(self) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table

        rows = Table.grid(expand=True, padding=(0, 1))
        rows.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        rows.add_column(justify="right", no_wrap=True)
        rows.add_column(width=1)
        for group, labels in self._groups().items():
            rows.add_row(screen_text(self.console, group, "bold"))
            for label, key in labels.items():
                mark = screen_text(self.console, trend(self._history.get(key, ())), "cyan")
                rows.add_row(screen_text(self.console, f"  {label}"), self._value(self._latest[key]), mark)
        title = screen_text(self.console, " · ".join(self._title()))
        return Panel(rows, title=title, width=min(_COLUMN_WIDTH, self.console.width))

    def _groups(self) -> dict[str, dict[str, str]]:
        """Return the metrics of the column: by group, the labels of those that have come, each with its key."""
        if self._live_metrics:
            found = {
                group: {label: key for label, key in labels.items() if key in self._latest}
                for group, labels in self._live_metrics.items()
            }
            return {group: labels for group, labels in found.items() if labels}
        keys = [key for key in self._latest if key.count("/") == 1][:_MAX_ROWS]
        by_hook: dict[str, dict[str, str]] = {}
        for key in keys:
            hook, metric = _split_key(key)
            by_hook.setdefault(hook, {})[metric] = key
        return by_hook


# -- values -------------------------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """Return ``value`` in few characters: ``.6f``, or ``.4e`` below 0.001 and over 10,000, 0 as 0; a list as its mean.

    Recipe: ``format_value([1.0, 2.0])`` is ``"1.500000 (n=2)"``.
    """
    if isinstance(value, float):
        return _format_float(value)
    if value is None:
        return "–"
    if isinstance(value, bool | int):
        return _shorten(str(value))
    if isinstance(value, Mapping):
        return _shorten(", ".join(f"{key}: {format_value(item)}" for key, item in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        middle = _typical(value)
        return f"(n={len(value)})" if middle is None else f"{_format_float(float(middle))} (n={len(value)})"
    return _shorten(" ".join(str(value).split()))


def _format_float(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.4e}" if abs(value) < 0.001 or abs(value) > 10_000 else f"{value:.6f}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _typical(value: Any) -> float | int | None:
    """Return the number that represents ``value``: itself, the mean of a list (with its NaN), or None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [item for item in value if isinstance(item, int | float)]
        try:
            # Not `math.fsum`, which raises for infinities of different sign.
            return sum(numbers) / len(numbers) if numbers else None
        except OverflowError:  # integers that no float can hold
            return math.inf
    return None


def _has_nonfinite(value: Any) -> bool:
    """Return whether ``value`` holds a NaN or an infinity."""
    if isinstance(value, Mapping):
        return any(map(_has_nonfinite, value.values()))
    middle = _typical(value)
    return isinstance(middle, float) and not math.isfinite(middle)


def trend(values: Sequence[float]) -> str:
    """Return ▲, ▼ or ━ by the first and the last of ``values``; nothing for a single one."""
    if len(values) < 2 or math.isnan(values[-1] - values[0]):
        return ""
    before, change = values[0], values[-1] - values[0]
    is_flat = change == 0 if before == 0 else abs(change) / abs(before) < _LEAST_CHANGE
    return "━" if is_flat else "▲" if change > 0 else "▼"


def _split_key(key: str) -> tuple[str, str]:
    """Return hook and metric of ``"hook/metric"``."""
    hook, slash, metric = key.partition("/")
    return (hook, metric) if slash else ("–", key)
