"""Feeding a sink from the log of a run, later.

Takes the folder of a run or its log, hands contexts and records to any sink; what ``hookline replay`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.sinks.record_log import Context, read_log
from hookline.sinks.sink import check_sink, hand

__all__ = ["replay"]


def replay(
    run: str | Path,
    sink: Any,
    *,
    start: int = 0,
    context: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Give a sink everything that is in a log, in order, then close it; how many records that were.

    Recipe: ``hookline.sinks.replay("runs/digits/default", hookline.sinks.TensorBoardSink("events"))``.

    The sink runs in this process, and what it raises is raised. It is told ``replay=True`` besides.

    Args:
        run: The folder of a run, or its log.
        sink: Anything with ``emit(metrics, epoch, hook_point)``.
        start: The number of the first record wanted.
        context: What the sink is told of the run besides, or instead: ``{"run_dir": elsewhere}``.
        progress: Called after each record with how many there have been.
    """
    check_sink(sink, "replay() takes a sink, an object")
    count = 0
    tells = getattr(sink, "set_run_context", None)
    given = {"replay": True, **(context or {})}  # some sinks would go on with the run itself otherwise
    if tells is not None:
        tells(**given)
    for found in read_log(run, start):
        if isinstance(found, Context):
            if tells is not None:
                tells(**{**found.context, **given})
            continue
        hand(sink, found)
        count += 1
        if progress is not None:
            progress(count)
    for method in ("flush", "close"):
        if hasattr(sink, method):
            getattr(sink, method)()
    return count
