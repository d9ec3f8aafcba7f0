"""Lines of snapshots: which columns there are, and when they change."""

from __future__ import annotations

from hookline.records.sink import Record
from hookline.sinks.console_metrics import MetricChoice, SnapshotLines

FIRST = {"eval/loss": 1.0, **{f"hook{number}/metric{number}": float(number) for number in range(7)}}


def lines_of(lines: SnapshotLines, metrics: dict[str, float], epoch: int) -> list[str]:
    return lines.lines(metrics, Record(metrics, epoch, "SNAPSHOT", step=10 * epoch + 9))


def test_hooks_that_yield_later_do_not_change_the_columns_of_a_full_line() -> None:
    """The first line has eight numbers; a hook that needs a second firing comes too late for a place."""
    lines = SnapshotLines(MetricChoice())
    names, _ = lines_of(lines, FIRST, 0)
    (row,) = lines_of(lines, {"early/cos_sim": 0.5, **FIRST}, 1)
    assert names.split() == ["epoch", "step", "loss", *(f"metric{number}" for number in range(7))]
    assert row.split() == ["1", "19", "1", *map(str, range(7))]


def test_an_accuracy_that_comes_later_gets_its_place() -> None:
    """Loss and accuracies are worth more than the numbers of hooks; the names are printed again."""
    lines = SnapshotLines(MetricChoice())
    lines_of(lines, FIRST, 0)
    names, _ = lines_of(lines, {**FIRST, "eval/val_acc": 0.9}, 1)
    assert names.split()[2:4] == ["loss", "val_acc"]
    assert "metric6" not in names


def test_a_column_that_does_not_come_any_more_gives_its_place_away() -> None:
    """A full line is not kept with a hole in it."""
    lines = SnapshotLines(MetricChoice())
    lines_of(lines, FIRST, 0)
    later = {key: value for key, value in FIRST.items() if key != "hook3/metric3"}
    names, _ = lines_of(lines, {**later, "other/cos_sim": 0.5}, 1)
    assert "metric3" not in names
    assert "cos_sim" in names
