"""What a run shows while it lasts: tables, a live view, a progress bar, lines; or nothing.

Takes the flags, hands the console sink and the bar to `session`. Warnings of hookline are shown as lines, its log
messages too.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from hookline.cli.options import OutputOptions
from hookline.cli.show import console

__all__ = ["Screen", "messages"]

_MODES: Final = ("none", "silent", "live", "normal")


class Screen:
    """The console of a run."""

    def __init__(self, options: OutputOptions, live_metrics: Mapping[str, Mapping[str, str]]) -> None:
        chosen = (options.no_console_output, options.silent, options.live, True)
        self.mode = next(mode for mode, on in zip(_MODES, chosen, strict=True) if on)
        """``"none"`` goes before ``"silent"`` goes before ``"live"``."""
        self._live_metrics = live_metrics
        self._console = console()
        self._sink: Any = None

    def sinks(self) -> list[Any]:
        """The console sink, for the next strategy; none if it is to be quiet."""
        if self.mode in ("none", "silent"):
            return []
        from hookline.sinks.console import ConsoleSink

        mode: Any = self.mode
        self._sink = ConsoleSink(mode, self._live_metrics or None, console=self._console)
        return [self._sink]

    def bar(self) -> Any:
        """A progress bar; None where nothing is shown."""
        if self.mode == "none":
            return None
        if self._sink is not None:
            return self._sink.progress_bar()
        from hookline.sinks.console_progress import RunProgress

        return RunProgress(self._console)

    def say(self, text: str) -> None:
        """A line, unless nothing is to be shown."""
        if self.mode != "none":
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _is_news(record: logging.LogRecord) -> bool:
    """That a checkpoint was saved is none: there may be one every second. Nor is where an error came from, if it is
    logged for information: a warning has told it in a sentence."""
    is_known = record.name.startswith("hookline.loops.checkpoint") or record.exc_info is not None
    return record.levelno > logging.INFO or not is_known


class _Lines(logging.Handler):
    """Prints to what is the standard error by then: while a progress bar is drawn, that is the bar's."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        print(self.format(record), file=sys.stderr)


@contextmanager
def messages() -> Iterator[None]:
    """Have warnings and log messages of hookline shown as lines on the standard error, while the block lasts."""
    from hookline.errors import HooklineWarning

    logger = logging.getLogger("hookline")
    handler = _Lines()
    handler.setFormatter(logging.Formatter("hookline: %(message)s"))
    handler.addFilter(_is_news)
    level = logger.level
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, HooklineWarning):
            print(f"hookline: warning: {message}", file=sys.stderr)
        else:
            shown(message, category, filename, lineno, file, line)

    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
        logger.setLevel(level)
        logger.removeHandler(handler)
