"""The progress of a run on the screen: with a terminal, without one, beside the live column."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hookline.screen import RunProgress
from hookline.sinks.console_sink import ConsoleSink


class Clock:
    """Time that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def on_paper(clock: Clock) -> tuple[RunProgress, io.StringIO]:
    file = io.StringIO()
    return RunProgress(Console(file=file, width=80), clock=clock), file


def on_screen(width: int = 110) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end():
    """With rate, time left and the newest figures; no control codes."""
    clock = Clock()
    progress, file = on_paper(clock)
    progress.start(100, "epochs")
    for _ in range(50):
        clock.now += 0.5
        progress.advance(1, lambda: {"loss": 0.123456})
    clock.now += 0.5
    progress.advance()
    progress.stop({"loss": 0.5, "val_acc": 1.0})
    progress.stop()
    assert file.getvalue().splitlines() == [
        "20/100 epochs · 2.0/s · 0:00:40 left · loss 0.1235",
        "40/100 epochs · 2.0/s · 0:00:30 left · loss 0.1235",
        "51/100 epochs · 2.0/s · 0:00:24 left · loss 0.5  val_acc 1",
    ]


def test_on_a_terminal_there_is_a_bar_and_the_cursor_comes_back():
    """Drawn to its end although it is drawn ten times a second at most."""
    console, clock = on_screen(), Clock()
    progress = RunProgress(console, clock=clock)
    progress.start(1000, "steps")
    for _ in range(1000):
        clock.now += 0.001
        progress.advance(1, lambda: {"loss": 0.25})
    progress.stop()
    text = console.file.getvalue()
    assert "1000/1000" in text
    assert "1000.0/s" in text
    assert "loss 0.25" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("width", [110, 40])
def test_in_live_mode_the_bar_is_above_the_column(width):
    """One display for both, no wider than the screen."""
    sink = ConsoleSink("live", {"T": {"loss": "t/loss"}}, console=on_screen(width))
    sink.start(10, "epochs")
    sink.emit({"t/loss": 1.0}, 0, "POST_EPOCH")
    sink.advance(5)
    paper = Console(file=io.StringIO(), width=width)
    paper.print(sink)
    first, *rest = paper.file.getvalue().splitlines()
    assert "5/10" in first
    assert any("loss" in line for line in rest)
    assert all(len(line) <= width for line in (first, *rest))
    sink.close()
