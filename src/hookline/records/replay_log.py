"""Feed a sink from the log of a run, later.

``hookline replay`` calls `replay`, which reads the log by `read_log` and hands contexts and records to any sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.records.log import Context, read_log
from hookline.records.sink import check_sink, hand

__all__ = ["replay"]


def replay(
    run: str | Path,
    sink: Any,
    *,
    start: int = 0,
    context: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Give ``sink`` everything that is in a log, in order, then close it; return how many records there were.

    Recipe: ``hookline.records.replay("runs/digits/default", hookline.sinks.TensorBoardSink("events"))``.

    The sink runs in this process, and what it raises is raised. Its context has ``replay=True`` besides.

    Args:
        run: The folder of a run, or its log.
        sink: Anything with ``emit(metrics, epoch, hook_point)``.
        start: The number of the first record wanted.
        context: Replaces parts of the run's context: ``{"run_dir": elsewhere}``.
        progress: Called after each record with how many there have been.
    """
    check_sink(sink, "replay() takes a sink, an object")
    count = 0
    set_run_context = getattr(sink, "set_run_context", lambda **_: None)
    own_context = {"replay": True, **(context or {})}  # some sinks would continue the run itself otherwise
    set_run_context(**own_context)
    for found in read_log(run, start):
        if isinstance(found, Context):
            set_run_context(**{**found.context, **own_context})
            continue
        hand(sink, found)
        count += 1
        if progress is not None:
            progress(count)
    for method in ("flush", "close"):
        getattr(sink, method, lambda: None)()
    return count
