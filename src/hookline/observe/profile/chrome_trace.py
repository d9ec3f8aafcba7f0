"""A profile as a file for chrome://tracing and ui.perfetto.dev.

Takes what was measured from ``profile``, writes it in the Trace Event Format.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookline.observe.profile.profile_rows import Measured, Span

__all__ = ["write_trace"]


def write_trace(path: Path, measured: Measured) -> Path:
    """Write the events, so that whoever looks finds the whole file or what was there before; the path."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"Cannot write the trace {str(path)!r}: there is no folder {str(path.parent)!r}.")
    if path.is_dir():
        raise IsADirectoryError(f"Cannot write the trace {str(path)!r}: that is a folder; add a file name.")
    text = json.dumps({"traceEvents": list(_events(measured)), "displayTimeUnit": "ms"})
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


class _Lines:
    """The lines of the trace, one per thread and direction: a number each, as the format wants it."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}

    def number(self, direction: str, thread: int) -> int:
        """The line for what goes that way in that thread."""
        return self.numbers.setdefault((direction, thread), len(self.numbers) + 1)

    def labels(self) -> Iterator[dict[str, Any]]:
        """What is written beside the lines."""
        threads = list(dict.fromkeys(thread for _, thread in self.numbers))
        for (direction, thread), number in self.numbers.items():
            label = direction if len(threads) == 1 else f"{direction}, thread {threads.index(thread) + 1}"
            for key, value in (("thread_name", {"name": label}), ("thread_sort_index", {"sort_index": number})):
                yield {"name": key, "ph": "M", "ts": 0, "pid": os.getpid(), "tid": number, "args": value}


def _events(measured: Measured) -> Iterator[dict[str, Any]]:
    lines = _Lines()
    for span, (start, end) in measured.forwards.items():
        yield _event(span, "forward", start, end, lines.number("forward", span.thread))
    for visit, start, end, _ in measured.backwards:
        category = "recompute" if visit.repeats else "backward"
        yield _event(visit.span, category, start, end, lines.number("backward", visit.thread))
    yield from lines.labels()


def _event(span: Span, category: str, start: float, end: float, line: int) -> dict[str, Any]:
    details = {"step": span.step, "call": span.call, "type": span.kind, "output_bytes": span.output_bytes}
    if span.where is not None:
        details["module"] = span.where
    return {
        "name": span.name or "(the model)",
        "cat": category,
        "ph": "X",
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
        "pid": os.getpid(),
        "tid": line,
        "args": details,
    }
