"""Show the statistics of a watch as a table, if asked for with the largest first.

`Watch` calls `watch_table`; `stat_columns` makes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from hookline.errors import OptionError
from hookline.messages import suggest
from hookline.observe.watch.rank_stats import rank_in_words
from hookline.observe.watch.stat_columns import table_of
from hookline.tables import Table

if TYPE_CHECKING:
    from hookline.observe.watch.stats_engine import StatsEngine
    from hookline.observe.watch.steps import Passes

__all__ = ["watch_table"]

_REPORTED: Final = "nothing since the last report or reset: the numbers before it went to whoever asked, to sinks say"


def watch_table(
    metrics: Mapping[str, Any], engine: StatsEngine, passes: Passes, sort: str | None, top: int | None
) -> Table:
    """Return the table of a watch.

    Args:
        metrics: Its statistics, by ``"place/statistic"``.
        engine: Where its places are.
        passes: Which passes count.
        sort: The statistic by which rows are sorted, the largest first and NaN before it; None: as in the model.
        top: How many rows are shown; None for all.
    """
    table = table_of(metrics, {one.label: one.name for one in engine.places.values()})
    if not table.header:
        has_counted = any(place.rows for place in engine.places.values())
        return Table(title=_REPORTED) if has_counted else table
    if sort is not None:
        table = _sorted(table, metrics, sort)
    if top is not None and top < 1:
        raise OptionError(f"top= is how many rows are shown, 10 for instance; got {top!r}.")
    return replace(table, most=top, foot=(*table.foot, *passes.in_words(), *rank_in_words()))


def _sorted(table: Table, metrics: Mapping[str, Any], sort: str) -> Table:
    names = list(table.header[1:])
    if sort not in names:
        raise OptionError(f"sort={sort!r} is no column of this watch{suggest(sort, names) or '.'} {', '.join(names)}.")

    def key(row: Any) -> tuple[int, float]:
        value = metrics.get(f"{row[0]}/{sort}" if row[0] else sort)
        if value is None:
            return 2, 0.0
        return (1, -float(value)) if value == value else (0, 0.0)

    return replace(table, rows=sorted(table.rows, key=key), rest=f" more, none with a larger {sort}")
