"""Show the last steps that a flight recorder has written in the folder of a run: "the minutes before".

`write_report` puts what `minutes_before` returns on the page. The file is that of ``hookline.debug.FlightRecorder``;
one that cannot be read is said to be so, and costs the page nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final

from hookline.tables import Table, number_text

__all__ = ["FLIGHT_FILE", "FLIGHT_FORMAT", "FLIGHT_VERSION", "minutes_before"]

FLIGHT_FILE: Final = "flight_recorder.json"
"""What a recorder writes in the folder of its run."""
FLIGHT_FORMAT: Final = "hookline flight"
"""What the file says it is."""
FLIGHT_VERSION: Final = 1
_AROUND: Final = 6
"""Steps that are shown at once; the rest is folded away."""
_MOST: Final = 40
"""Places that a row of statistics is shown for."""


def minutes_before(runs: Sequence[tuple[str, Path]]) -> str:
    """Return a section of the page for each run, given by name and folder, in which a recorder has written."""
    found = {folder: name for name, folder in runs}
    return "\n".join(
        _section(number, name, folder / FLIGHT_FILE) for number, (folder, name) in enumerate(found.items(), 1)
    )


def _section(number: int, name: str, path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FLIGHT_FORMAT or found["version"] != FLIGHT_VERSION:
            raise ValueError(f"format {found['format']!r}, version {found['version']!r}")
        inside = f"{_steps(found, _AROUND).html()}\n{_folded(found)}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        inside = f'<p class="empty">{escape(FLIGHT_FILE)} could not be read ({escape(str(error))}).</p>'
    return (
        f'  <section id="minutes-{number}" tabindex="-1">\n'
        f'    <h2>The minutes before · {escape(name)}</h2>\n    <div class="wide-table">\n{inside}\n    </div>\n'
        "  </section>"
    )


def _folded(found: dict[str, Any]) -> str:
    """Return what is seen at a press: all steps, and the norms of the blocks in the last ones."""
    count = len(found["steps"])
    parts = {f"All {count} steps": _steps(found, count), "What each block returned, and its gradient": _places(found)}
    return "\n".join(f"<details><summary>{name}</summary>\n{each.html()}</details>" for name, each in parts.items())


def _steps(found: dict[str, Any], count: int) -> Table:
    """Return the last ``count`` steps; the file is written at the step that something happened in."""
    steps = found["steps"][-count:]
    last = max((float(step["time"]) for step in steps), default=0.0)
    rows = [
        [
            str(step["step"]),
            f"{float(step['time']) - last:.1f} s",
            _cell(step["loss"]),
            _cell(step["lr"]),
            str(step["batch"] or ""),
            str(step["bad"] or ""),
            str(step["random"].get("torch", ""))[:8],
        ]
        for step in steps
    ]
    when = datetime.fromtimestamp(last).astimezone().isoformat(timespec="seconds") if steps else "before any step"
    title = f"The last {len(steps)} steps up to {when}, written because of {found['reason']}"
    header = ("step", "before the end", "loss", "learning rate", "batch", "not finite at", "random stream of torch")
    return Table(header, rows, numbers=(0, 1, 2, 3), title=title)


def _places(found: dict[str, Any]) -> Table:
    """Return the norm of each place in the last steps; one column per step."""
    steps = found["steps"][-8:]
    places = list(dict.fromkeys(place for step in steps for place in step["statistics"]))
    rows = [
        [place, *(_cell(step["statistics"].get(place, {}).get("norm")) for step in steps)] for place in places[:_MOST]
    ]
    more = len(places) - len(rows)
    foot = (f"… and {more} more places; the file has all",) if more > 0 else ()
    header = ("norm", *(f"step {step['step']}" for step in steps))
    return Table(header, rows, numbers=range(1, len(header)), foot=foot)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    number = float(value)  # numbers that are not finite are text in the file
    return number_text(number) if math.isfinite(number) else str(number)
