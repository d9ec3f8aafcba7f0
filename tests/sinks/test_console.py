"""What is printed: tables, the live column and the progress of a run, with a terminal and without."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from hookline.records.sink import Record, StepSeries
from hookline.screen import RunProgress
from hookline.sinks.console_sink import ConsoleSink, format_value

NAN, INF = float("nan"), float("inf")


def printed(*records: Record, context: dict[str, Any] | None = None, width: int = 80, flush: bool = False) -> str:
    """What a sink prints of these."""
    file = io.StringIO()
    sink = ConsoleSink(console=Console(file=file, width=width))
    if context:
        sink.set_run_context(**context)
    for record in records:
        sink.write(record)
    if flush:
        sink.flush()
    return file.getvalue()


def test_metrics_are_kept_until_a_snapshot_prints_them_in_one_sorted_table():
    """Latest value per key; the title says epoch, step and strategy; nothing is printed before."""
    before = [
        Record({"norms/total": 1.0, "loss/train": 9.0}, 3, "POST_EPOCH", step=38),
        Record({"loss/train": 0.25}, 3, "POST_EPOCH", step=39),
    ]
    assert printed(*before) == ""
    text = printed(*before, Record({"phases/code": 2}, 3, "SNAPSHOT", step=39), context={"strategy": "stride"})
    assert "".join(f"{line.rstrip()}\n" for line in text.splitlines()) == (
        "Hook Metrics · epoch 3 · step 39 · stride\n"
        "┏━━━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┓\n"
        "┃ Hook       ┃ Metric     ┃         Value ┃\n"
        "┡━━━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━━┩\n"
        "│ loss       │ train      │      0.250000 │\n"
        "│ norms      │ total      │      1.000000 │\n"
        "│ phases     │ code       │             2 │\n"
        "└────────────┴────────────┴───────────────┘\n"
    )


def test_names_of_layers_are_hidden_and_counted():
    """Two slashes or more are for the files."""
    text = printed(Record({"norms/total": 1.0, "stats/0.weight/param/norm": 2.0, "n/a/b": 3.0}, 0, "SNAPSHOT"))
    assert "2 more by layer or parameter" in text
    assert "param" not in text.replace("parameter", "")
    assert "more" not in printed(Record({"norms/total": 1.0}, 0, "SNAPSHOT"))
    assert printed(Record({"n/a/b": 3.0}, 0, "SNAPSHOT")) == (
        "Hook Metrics · epoch 0: 1 by layer or parameter, not shown\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.500000"),
        (0.001, "0.001000"),
        (0.00099, "9.9000e-04"),
        (10_000.0, "10000.000000"),
        (10_001.0, "1.0001e+04"),
        (-12345.678, "-1.2346e+04"),
        (0.0, "0"),
        (-0.0, "0"),
        ([0.0, 0.0], "0 (n=2)"),
        (7, "7"),
        (True, "True"),
        (None, "–"),
        (NAN, "nan"),
        (-INF, "-inf"),
        ([1.0, 2.0], "1.500000 (n=2)"),
        ([1.0, NAN], "nan (n=2)"),
        ([INF, -INF], "nan (n=2)"),
        ([], "(n=0)"),
        ([[1.0, 2.0], [3.0]], "(n=2)"),
        ([10**400, 1], "inf (n=2)"),
        (10**400, "1" + "0" * 58 + "…"),
        (StepSeries([1, 2, 3], [0, 1, 2]), "2.000000 (n=3)"),
        (["a"], "(n=1)"),
        ({"a": 1.0, "b": 2}, "a: 1.000000, b: 2"),
        ("two\nlines", "two lines"),
        ("x" * 100, "x" * 59 + "…"),
    ],
)
def test_values_read_in_a_few_characters(value, text):
    """OrderedLearning's formats; NaN is to be seen, also in a list."""
    assert format_value(value) == text


def terminal(width: int = 110) -> Console:
    """A terminal without colours, which a test can read."""
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})


LIVE = {"Training": {"loss": "t/loss", "steps": "t/steps"}, "Absent": {"x": "no/x"}}


def drawn(console: Console, sink: ConsoleSink) -> list[str]:
    """The lines of the column as it is now."""
    return [line.rstrip() for line in as_text(sink, console.width).splitlines() if line.strip()]


def as_text(renderable: object, width: int) -> str:
    """What rich makes of it."""
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def test_the_live_column_has_groups_labels_values_and_trends():
    """50 wide, groups without data left out."""
    console = terminal()
    sink = ConsoleSink("live", LIVE, console=console)
    sink.set_run_context(strategy="stride")
    for epoch, loss in enumerate([0.1, 1.0, 0.5, 0.25]):  # the last three have the trend; whole numbers have none
        sink.write(Record({"t/loss": loss, "t/steps": epoch, "other/x": 1.0}, epoch, "POST_EPOCH"))
    assert drawn(console, sink) == [
        "╭─────────────── stride · epoch 3 ───────────────╮",
        "│ Training                                       │",
        "│   loss                              0.250000 ▼ │",
        "│   steps                                    3   │",
        "╰────────────────────────────────────────────────╯",
    ]
    sink.close()


def test_without_a_choice_the_live_column_shows_what_comes_by_hook():
    """Names of layers are left out there as well."""
    console = terminal()
    sink = ConsoleSink("live", console=console)
    sink.emit({"norms/total": 1.0, "stats/a/b": 2.0}, 0, "POST_EPOCH")
    text = "\n".join(drawn(console, sink))
    assert "norms" in text
    assert "total" in text
    assert "stats" not in text
    sink.close()


def test_without_a_terminal_live_is_normal_said_once_and_without_control_codes():
    """In a pipe, in a log file."""
    file = io.StringIO()
    sink = ConsoleSink("live", LIVE, console=Console(file=file, width=80))
    for epoch in range(3):
        sink.emit({"t/loss": 1.0}, epoch, "SNAPSHOT")
    sink.close()
    text = file.getvalue()
    assert text.count("needs a terminal") == 1
    assert text.count("Hook Metrics") == 3
    assert "\x1b" not in text


class Clock:
    """Time that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def on_paper(clock: Clock) -> tuple[RunProgress, io.StringIO]:
    file = io.StringIO()
    return RunProgress(Console(file=file, width=80), clock=clock), file


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
    console, clock = terminal(), Clock()
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
    sink = ConsoleSink("live", {"T": {"loss": "t/loss"}}, console=terminal(width))
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
