"""Show how far a run is: a bar where a screen can be redrawn, a line every ten seconds elsewhere.

The loops (training/loops.py) make a `RunProgress` for ``progress=True``, or take the one they are given, and stop it.
`LoopProgress` (training/run.py) starts it, calls `advance`, and gives it the loss and the newest evaluation to show.
The command line (cli/screen.py) gives the loops its own one. `ConsoleSink` (sinks/console_sink.py) is a subclass that
shows the metrics of hooks too: it overrides `advance` and `__rich__` and calls `draw`. Both draw by rich, which is
imported only when one is made.

Nothing here may start a thread (see `draw`). Nothing is read from the device unless it is shown (see `advance`). What
is drawn is in tests/training/loops/test_progress.py, tests/sinks/test_console.py and tests/cli.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

_ASCII: Final = {"▲": "^", "▼": "v", "━": "-", "·": "-", "–": "-"}
"""What stands for a character that a console does not have. The first three are marks of `ConsoleSink` (``trend``); a
mark that is not here is shown as its number, such as ``\\u25b2``."""
_BETWEEN_DRAWINGS: Final = 0.1
"""Seconds. A step may take less than a millisecond, and a drawing takes two."""
_BETWEEN_LINES: Final = 10.0
"""Seconds, where there is no terminal."""


def can_redraw(console: Console) -> bool:
    """Return whether rich can draw in place there: on a terminal, and in a notebook that has widgets."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def screen_text(console: Console, text: str, style: str = "") -> Text:
    """Return ``text`` for rich, without markup; if ``console`` cannot show all of it, in ASCII (see `_ASCII`)."""
    from rich.text import Text

    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        known = "".join(_ASCII.get(character, character) for character in text)
        text = known.encode("ascii", "backslashreplace").decode("ascii")
    return Text(text, style=style)


class RunProgress:
    """The progress of a run: a bar, or lines, with the rate, the time left and the newest metrics.

    Recipe::

        progress = RunProgress()
        progress.start(1000, "steps")
        for batch in batches:
            loss = train(batch)
            progress.advance(1, lambda: {"loss": loss.item()})
        progress.stop()

    Args:
        console: A rich console; one on the standard output if left out.
        clock: Returns the time, in seconds.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self.console = console or Console()
        """Where it is shown."""
        self.is_running = False
        """Whether it is between `start` and `stop`."""
        self._clock = clock
        self._live: Live | None = None
        self._total = self._done = self._before = 0
        self._unit = "steps"
        self._metrics: dict[str, float] = {}
        self._started = self._shown = clock()

    def start(self, total: int, unit: str = "steps", *, done: int = 0) -> None:
        """Begin a run of ``total`` steps, or epochs; a resumed run has some ``done``."""
        self.stop()
        self._total, self._unit = total, unit
        self._done = self._before = done
        self._metrics = {}
        self._started = self._shown = self._clock()
        self.is_running = True
        if can_redraw(self.console):
            self.draw()

    def advance(self, n: int = 1, read: Callable[[], Mapping[str, float]] = dict) -> None:
        """Count ``n`` more as done; if it is time to show that, show it with the metrics that ``read`` returns.

        ``read`` may wait for the device, so it is called only then.
        """
        self._done += n
        is_drawn = self._live is not None
        if self._clock() - self._shown >= (_BETWEEN_DRAWINGS if is_drawn else _BETWEEN_LINES):
            self._metrics.update(read())
            if is_drawn:
                self.draw()
            else:
                self._print_line()

    def stop(self, metrics: Mapping[str, float] | None = None) -> None:
        """End it, with the ``metrics`` of the end; what was drawn stays. May be called more than once."""
        self._metrics.update(metrics or {})
        live, self._live = self._live, None
        if live is not None:
            live.refresh()
            live.stop()
        elif self.is_running and self._done > self._before:
            self._print_line()  # a short run has printed nothing yet, and a log has to show where a run ended
        self.is_running = False

    def draw(self) -> None:
        """Draw what `__rich__` returns, in place of the drawing before."""
        from rich.live import Live

        self._shown = self._clock()
        if self._live is None:
            # No thread that draws: a data loader that forks while it holds a lock would hang in its workers.
            self._live = Live(self, console=self.console, auto_refresh=False)
            self._live.start()
        self._live.refresh()

    def __rich__(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar = Table.grid(padding=(0, 1))
        bar.add_column(width=20, min_width=20)
        bar.add_column(no_wrap=True, overflow="ellipsis")
        bar.add_row(ProgressBar(self._total, self._done), screen_text(self.console, self._line()))
        return bar

    def _print_line(self) -> None:
        self._shown = self._clock()
        self.console.print(screen_text(self.console, self._line()), soft_wrap=True)

    def _line(self) -> str:
        elapsed, left = self._clock() - self._started, self._total - self._done
        rate = (self._done - self._before) / elapsed if elapsed > 0 else 0.0
        parts = [f"{self._done}/{self._total} {self._unit}"]
        if rate > 0:
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each")
        if rate > 0 and left > 0:
            parts.append(f"{timedelta(seconds=round(left / rate))} left")
        if self._metrics:
            parts.append("  ".join(f"{name} {value:.4g}" for name, value in self._metrics.items()))
        return " · ".join(parts)
