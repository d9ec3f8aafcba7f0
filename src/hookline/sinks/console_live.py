"""The column of the live view: groups of metrics with their newest value and whether it rises or falls.

Takes records from `ConsoleSink` and, from `RunProgress`, what else is to be on the screen; draws both by rich.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from hookline.sinks.console_choice import MetricChoice
from hookline.sinks.console_format import (
    DOWN,
    UP,
    format_value,
    is_troubled,
    printable,
    split_key,
    trend,
    typical,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from hookline.sinks.record import Record

__all__ = ["LiveColumn"]

_WIDTH: Final = 50
_ROOM_BESIDE: Final = 56
"""What the progress of the run needs at least; on a narrower screen it goes below."""
_MOST_ROWS: Final = 24
"""Of metrics that nobody has chosen."""
_FRAME: Final = 3
_FRAME_AND_BAR: Final = 5
"""Lines of the screen that are not metrics: the frame, the line of the cursor; the bar and its figures."""
_REDRAWS_PER_SECOND: Final = 4


class LiveColumn:
    """What is always on the screen."""

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
        self._began = clock()
        self._title = "Hook Metrics"

    def update(self, record: Record, strategy: str | None = None) -> None:
        """Newer values."""
        numbers = {key: number for key, value in record.metrics.items() if (number := typical(value)) is not None}
        history = {key: (*self._history.get(key, ())[-2:], number) for key, number in numbers.items()}
        # Others in their place, not changed: rich draws in a thread of its own, which may be reading them.
        self._history = {**self._history, **history}
        self._values = {**self._values, **record.metrics}
        name = record.strategy or strategy
        self._title = f"{name} · {record.epoch}" if name else f"Hook Metrics · {record.epoch}"
        self.refresh()

    def clear(self, strategy: str | None = None) -> None:
        """Another run begins."""
        self._values, self._history = {}, {}
        self._began = self._clock()
        self._title = strategy or "Hook Metrics"
        if self._live is not None:
            self._live.update(self)

    def show_beside(self, renderable: RenderableType | None) -> None:
        """Have something else on the screen: the progress of the run. None takes it off."""
        self._beside = renderable
        self.refresh()

    def refresh(self) -> None:
        """Draw, if there is anything to be seen yet."""
        if self._live is None and (self._groups() or self._beside is not None):
            from rich.live import Live

            self._live = Live(self, console=self._console, refresh_per_second=_REDRAWS_PER_SECOND)
            self._live.start()
        elif self._live is not None:
            self._live.update(self)

    def close(self) -> None:
        """The last state stays on the screen."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    # -- drawing ---------------------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        parts: list[RenderableType] = [self._panel()] if self._groups() else []
        if self._beside is None or not parts:
            return Group(*parts, *([self._beside] if self._beside is not None else []))
        if not self._is_wide:
            return Group(*parts, self._beside)
        from rich.table import Table

        screen = Table.grid(expand=True, padding=(0, 1))
        screen.add_column(ratio=1)
        screen.add_column(width=_WIDTH)
        screen.add_row(self._beside, parts[0])
        return screen

    def _panel(self) -> RenderableType:
        from rich.panel import Panel

        elapsed = timedelta(seconds=int(self._clock() - self._began))
        width = min(_WIDTH, self._console.width)
        return Panel(self._rows(), title=self._text(self._title), subtitle=str(elapsed), width=width)

    def _rows(self) -> Table:
        from rich.table import Table

        rows = Table.grid(expand=True, padding=(0, 1))
        rows.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        rows.add_column(justify="right", no_wrap=True)
        rows.add_column(width=1)
        values, history = self._values, self._history
        shown, num_hidden = _cut_to(
            self._groups(), self._console.height - (_FRAME if self._is_wide else _FRAME_AND_BAR)
        )
        for group, labels in shown.items():
            rows.add_row(self._text(group, "bold"))
            for label, key in labels.items():
                value, mark = values.get(key), trend(history.get(key, ()))
                style = "bold red" if is_troubled(value) else ""
                rows.add_row(
                    self._text(f"  {label}"),
                    self._text(format_value(value), style),
                    self._text(mark, {UP: "green", DOWN: "magenta"}.get(mark, "dim")),
                )
        if num_hidden:
            rows.add_row(self._text(f"… {num_hidden} more", "dim"))
        return rows

    @property
    def _is_wide(self) -> bool:
        """Whether there is room for the progress of the run beside the column."""
        return self._console.width >= _WIDTH + _ROOM_BESIDE

    def _groups(self) -> dict[str, dict[str, str]]:
        """What there is to show: of every group the metrics that have come."""
        if isinstance(self._chosen, MetricChoice):
            return _by_hook(self._chosen.choose(self._values))
        if self._chosen:
            found = {
                group: {label: key for label, key in labels.items() if key in self._values}
                for group, labels in self._chosen.items()
            }
            return {group: labels for group, labels in found.items() if labels}
        return _by_hook([key for key in self._values if key.count("/") == 1][:_MOST_ROWS])

    def _text(self, text: str, style: str = "") -> Text:
        from rich.text import Text

        return Text(printable(text, self._console.encoding), style=style)


def _cut_to(groups: Mapping[str, Mapping[str, str]], num_lines: int) -> tuple[dict[str, dict[str, str]], int]:
    """Return the groups that fit into so many lines, each with its heading, and how many metrics do not."""
    total = sum(map(len, groups.values()))
    if total + len(groups) <= num_lines:
        return {group: dict(labels) for group, labels in groups.items()}, 0
    shown: dict[str, dict[str, str]] = {}
    left = num_lines - 1  # the last says how many there are yet
    for group, labels in groups.items():
        if left >= 2:  # a heading alone says nothing
            shown[group] = dict(list(labels.items())[: left - 1])
            left -= 1 + len(shown[group])
    return shown, total - sum(map(len, shown.values()))


def _by_hook(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        hook, metric = split_key(key)
        found.setdefault(hook, {})[metric] = key
    return found
