"""What a run shows while it lasts: a live view, lines, tables, a progress bar; or nothing.

Takes the flags, hands the console sink and the bar to `session`. Warnings of hookline are shown as lines, its log
messages too.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final

from hookline.cli.printing import console
from hookline.cli.run_options import OutputOptions

__all__ = ["Screen", "messages", "mode_of"]

_BY_FLAGS: Final = {
    "HookManager(reference_weights=...)": "--hook-config reference_weights.path=FILE",
    "manager.hook_errors": "run.json",
}
"""What the remedy of a message is called on the command line."""


class Screen:
    """The console of a run."""

    def __init__(self, options: OutputOptions, live_metrics: Mapping[str, Mapping[str, str]]) -> None:
        self._console = console()
        self.mode = mode_of(options, can_redraw=self._console.is_terminal and not self._console.is_dumb_terminal)
        """One of `CONSOLES`."""
        self._asked_live = options.live or options.console == "live"
        self._live_metrics = live_metrics
        self._show = options.show
        self._sink: Any = None

    def sinks(self, snapshot_every: int | None = None) -> list[Any]:
        """The console sink, for the next strategy; none if it is to be quiet.

        Args:
            snapshot_every: How many epochs from one snapshot to the next; None or 0 if epochs do not count them.
        """
        if self.mode in ("none", "silent"):
            return []
        if self.mode == "lines" and self._asked_live:
            self.say("The live view needs a terminal; metrics are printed as lines.")
            self._asked_live = False
        from hookline.sinks.console_sink import ConsoleSink

        mode: Any = "normal" if self.mode == "tables" else self.mode
        self._sink = ConsoleSink(
            mode,
            self._live_metrics or None,
            show=self._show,
            snapshot_every=snapshot_every,
            console=self._console,
        )
        return [self._sink]

    def bar(self) -> Any:
        """A progress bar; None where nothing is shown."""
        if self.mode == "none":
            return None
        if self._sink is not None:
            return self._sink.progress_bar()
        from hookline.sinks.console_live import RunProgress

        return RunProgress(self._console)

    def say_what_is_missing(self, known: Iterable[str]) -> None:
        """Tell of metrics that ``--show`` asked for and that have not come; ``known`` are those that have."""
        if self._sink is None or self.mode == "tables":
            return
        names = sorted({*known, *(key.partition("/")[2] for key in known)} - {""})
        for pattern in self._sink.choice.unmatched():
            near = get_close_matches(pattern, names, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            self.say(f"--show {pattern}: no metric of that name has come.{meant} All of them: --console tables.")

    def say(self, text: str) -> None:
        """A line, unless nothing is to be shown."""
        if self.mode != "none":
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def mode_of(options: OutputOptions, *, can_redraw: bool) -> str:
    """Return what is shown: ``"none"`` goes before ``"silent"`` goes before ``"live"`` goes before ``--console``.

    If nothing is said, or ``"live"`` where the screen cannot be redrawn: lines.
    """
    flags = (("none", options.no_console_output), ("silent", options.silent), ("live", options.live))
    mode = next((mode for mode, is_on in flags if is_on), options.console) or "live"
    return "lines" if mode == "live" and not can_redraw else mode


def _is_news(record: logging.LogRecord) -> bool:
    """That a checkpoint was saved is none: there may be one every second. Nor is where an error came from, if it is
    logged for information: a warning has told it in a sentence."""
    is_known = record.name.startswith("hookline.training.checkpoints") or record.exc_info is not None
    return record.levelno > logging.INFO or not is_known


def _by_flags(text: str) -> str:
    """The text with the remedies of the command line."""
    for said, flag in _BY_FLAGS.items():
        text = text.replace(said, flag)
    return text


class _Format(logging.Formatter):
    """A line; of an error, the frames that are the user's."""

    def formatException(self, ei: Any) -> str:
        """The text of an error."""
        from hookline.cli.error_messages import own_text

        return own_text(ei[1])


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
    handler.setFormatter(_Format("hookline: %(message)s"))
    handler.addFilter(_is_news)
    level = logger.level
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, HooklineWarning):
            print(f"hookline: warning: {_by_flags(str(message))}", file=sys.stderr)
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
