"""Find the runs that a page is about, and read their records and facts.

`report_page` and `loaded_run` call `find_runs` and `read_runs`; these read ``records.jsonl`` (by `read_log`) and
``run.json`` (written by the command line) of each folder. Either may be missing.

The last steps that a flight recorder has written in the folder of a run are the section "the minutes before".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from hookline.errors import OptionError
from hookline.records.log import Context, Entry, read_log
from hookline.records.sink import Record
from hookline.tables import ShownAsTable, Table, number_text

LOG: Final = "records.jsonl"
"""The name of the log in the folder of a run."""
FACTS: Final = "run.json"
"""The name of the file that says what was run, and how."""
BAD_STEPS: Final = "first_bad_operation.json"
"""The name of the file that the hook ``first_bad_operation`` leaves."""
_PARTS: Final = ("config", "git", "hooks", "model", "result", "sink_errors", "versions")
"""Facts that hold others."""
_DEPTH: Final = 3
"""How far below a folder runs are looked for: ``runs/experiment/strategy``."""


class _Collects(Protocol):
    """An object that collects records."""

    def take(self, record: Record) -> None: ...


T = TypeVar("T", bound=_Collects)


@dataclass(slots=True)
class RunData(Generic[T]):
    """One run of a folder or a log."""

    name: str
    """The name in the legend; no two runs of a page have the same."""
    folder: Path
    """Where it was read."""
    facts: dict[str, Any]
    """What ``run.json`` says, or else what the log says of the run."""
    collected: T
    """What has taken the records."""
    started: float | None
    """When, in seconds since 1970; None if nothing says so."""
    remarks: list[str]
    """Sentences about what is missing."""


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Return the folders of runs, and logs by themselves; for a folder that holds runs, these."""
    if not paths:
        raise OptionError("A page needs at least one run; give the folder of one, such as runs/mod_arithmetic/stride.")
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise OptionError(f"There is no run at {str(path)!r}: no such folder. {_nearby(path)}")
        found += [run for run in _below(path) if run not in found]
    return found


def _below(path: Path) -> list[Path]:
    if path.is_file() or (path / LOG).exists() or (path / FACTS).exists():
        return [path]
    for depth in range(1, _DEPTH + 1):
        inside = [path.glob("/".join(["*"] * depth) + f"/{name}") for name in (LOG, FACTS)]
        runs = sorted({file.parent for files in inside for file in files})
        if runs:
            return runs
    return [path]  # an empty folder is a run that has not written anything


def _nearby(path: Path) -> str:
    parent = next((folder for folder in path.parents if folder.is_dir()), Path())
    runs = [str(run) for run in _below(parent) if run != parent][:3]
    return f"There are: {', '.join(runs)}." if runs else "Runs lie below the --output-dir that they were given."


def read_bad_steps(folder: Path) -> list[dict[str, Any]]:
    """Return what the hook ``first_bad_operation`` left in the folder of a run, the first first."""
    try:
        found = json.loads((folder / BAD_STEPS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def read_runs(path: Path, make: Callable[[], T]) -> list[RunData[T]]:
    """Read a folder or a log; hand the records of each run in it, by strategy, to an object that ``make`` returns."""
    log = path if path.is_file() else path / LOG
    remarks: list[str] = []
    facts = _read_facts(log.parent / FACTS, remarks)
    by_strategy: dict[str | None, T] = {}
    contexts: dict[str | None, Context] = {}
    if not log.exists():
        remarks.append(f"There is no {log.name}: nothing was recorded, or the run has not begun.")
    else:
        try:
            _collect(read_log(log), make, by_strategy, contexts)
        except (OSError, ValueError) as error:
            remarks.append(f"{log.name} could be read only in part ({error}).")
        if not by_strategy:
            remarks.append("Nothing has been recorded yet.")
    runs = []
    is_alone = len(by_strategy) < 2
    for strategy, collected in by_strategy.items() or [(None, make())]:
        context = contexts.get(strategy, Context({}))
        own = dict(facts) or _without_unsound(context.context)
        if strategy and not (is_alone and own.get("strategy")):
            own["strategy"] = strategy
        started = (_seconds(facts.get("started")) if is_alone else None) or context.time or None
        name = _name(own, log.parent, is_alone=is_alone)
        runs.append(RunData(name, log.parent, own, collected, started, list(remarks)))
    return runs


def _collect(
    entries: Iterable[Entry],
    make: Callable[[], T],
    by_strategy: dict[str | None, T],
    contexts: dict[str | None, Context],
) -> None:
    """Hand the records of a log to an object for each strategy in it."""
    strategy: str | None = None
    for entry in entries:
        if isinstance(entry, Context):
            strategy = entry.context.get("strategy", strategy)
            contexts.setdefault(strategy, entry)  # a resumed run has several
        elif _is_sound(entry):
            key = entry.strategy or strategy  # a record without a strategy belongs to the last context
            if key not in by_strategy:
                by_strategy[key] = make()
            with suppress(TypeError, OverflowError):  # steps of a series that are no steps
                by_strategy[key].take(entry)


def _is_sound(record: Record) -> bool:
    """Return whether a record holds what one should; anybody may have written the line."""
    whole = (record.position, record.number, record.rank, 0 if record.step is None else record.step)
    are_whole = all(isinstance(each, int) and abs(each) < 2**53 for each in whole)
    is_named = record.strategy is None or isinstance(record.strategy, str)
    return are_whole and is_named and isinstance(record.metrics, Mapping) and isinstance(record.time, int | float)


def _read_facts(path: Path, remarks: list[str]) -> dict[str, Any]:
    if not path.exists():
        remarks.append(f"There is no {FACTS}, so versions, configuration and costs of hooks are not known.")
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remarks.append(f"{FACTS} could not be read ({error}).")
        return {}
    if not isinstance(facts, dict):
        remarks.append(f"{FACTS} holds no facts: it should be an object.")
        return {}
    return _without_unsound(facts)


def _without_unsound(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts without parts that are not what they should be: the page takes them apart."""
    found = {name: value for name, value in facts.items() if name not in _PARTS or isinstance(value, dict)}
    hooks = {name: dict(hook) for name, hook in found.get("hooks", {}).items() if isinstance(hook, dict)}
    for hook in hooks.values():
        metrics = hook.get("metrics")
        hook["metrics"] = [one for one in metrics if isinstance(one, dict)] if isinstance(metrics, list) else []
    return {**found, "hooks": hooks}


def _seconds(moment: Any) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError):
        return None


def _name(facts: dict[str, Any], folder: Path, *, is_alone: bool) -> str:
    experiment = facts.get("experiment") or facts.get("experiment_name")
    given = facts.get("name")  # by the user; of several strategies in one folder each has its own besides
    named = given or experiment or folder.resolve().name
    parts = [named, facts.get("strategy") if (experiment and not given) or not is_alone else None]
    return " / ".join(str(part) for part in parts if part)


class _Named(Protocol):
    """A run with a name that may be lengthened."""

    name: str
    folder: Path


def distinct_names(runs: Sequence[_Named]) -> None:
    """Lengthen equal names of runs: by where their folders differ, and by numbers in one folder."""
    for label_of in (_by_folder, _by_number):
        same: dict[str, list[_Named]] = {}
        for run in runs:
            same.setdefault(run.name, []).append(run)
        for twins in same.values():
            if len(twins) > 1:
                for run, label in zip(twins, label_of(twins), strict=True):
                    run.name += label


def _by_folder(runs: list[_Named]) -> list[str]:
    folders = [run.folder.resolve() for run in runs]
    shared = os.path.commonpath(folders)
    return [f" ({label})" if (label := os.path.relpath(folder, shared)) != "." else "" for folder in folders]


def _by_number(runs: list[_Named]) -> list[str]:
    return [f" {number}" for number in range(1, len(runs) + 1)]


# -- the minutes before -----------------------------------------------------------------------------------------------

FLIGHT_FILE: Final = "flight_recorder.json"
"""What a recorder writes in the folder of its run."""
FLIGHT_FORMAT: Final = "hookline flight"
"""What the file says it is."""
FLIGHT_VERSION: Final = 1
_AT_ONCE: Final = 6
"""Steps that are shown at once; the rest is folded away."""


@dataclass(frozen=True, repr=False)
class Flight(ShownAsTable):
    """The last steps of a run, as a recorder wrote them; prints as a table.

    Recipe: ``flight = hookline.debug.read_flight("runs/x/flight_recorder.json")``; then ``print(flight)``,
    ``flight.steps[-1]["statistics"]``.
    """

    reason: str
    """Why it was written."""
    steps: list[dict[str, Any]]
    """Each step: its number, epoch, time, loss, learning rate, batch, statistics by place."""

    def _table(self) -> Table:
        """Return a table of the steps; it is written when something has happened."""
        last = max((float(step["time"]) for step in self.steps), default=0.0)
        rows = [
            [
                str(step["step"]),
                f"{float(step['time']) - last:.1f} s",
                *("" if step[part] is None else number_text(float(step[part])) for part in ("loss", "lr")),
                str(step["batch"] or ""),
                str(step["bad"] or ""),
            ]
            for step in self.steps
        ]
        when = datetime.fromtimestamp(last).astimezone().isoformat(timespec="seconds") if rows else "before any step"
        title = f"The last {len(rows)} steps up to {when}, written because of {self.reason}"
        header = ("step", "before the end", "loss", "learning rate", "batch", "not finite at")
        return Table(header, rows, numbers=(0, 1, 2, 3), title=title)


def read_flight(path: str | Path) -> Flight:
    """Read what a `FlightRecorder` wrote.

    Recipe: ``print(hookline.debug.read_flight("runs/mod_arithmetic/random/flight_recorder.json"))``
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise OptionError(f"{str(path)!r} is no file of a flight recorder: {error}.") from None
    if not isinstance(found, dict) or found.get("format") != FLIGHT_FORMAT:
        raise OptionError(f"{str(path)!r} is no file of a flight recorder; FlightRecorder writes one.")
    version = found.get("version")
    if version != FLIGHT_VERSION:
        raise OptionError(f"{str(path)!r} has version {version!r}, and this hookline reads {FLIGHT_VERSION}.")
    return Flight(found["reason"], found["steps"])


def minutes_before(runs: Sequence[tuple[str, Path]]) -> str:
    """Return a section of the page for each run, given by name and folder, in which a recorder has written."""
    found = {folder: name for name, folder in runs}
    return "\n".join(
        _section(number, name, folder / FLIGHT_FILE) for number, (folder, name) in enumerate(found.items(), 1)
    )


def _section(number: int, name: str, path: Path) -> str:
    try:
        flight = read_flight(path)
        all_steps = f"<summary>All {len(flight.steps)} steps</summary>\n{flight._repr_html_()}"
        last = replace(flight, steps=flight.steps[-_AT_ONCE:])
        inside = f"{last._repr_html_()}\n<details>{all_steps}</details>"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        inside = f'<p class="empty">{escape(FLIGHT_FILE)} could not be read ({escape(str(error))}).</p>'
    return (
        f'  <section id="minutes-{number}" tabindex="-1">\n'
        f'    <h2>The minutes before · {escape(name)}</h2>\n    <div class="wide-table">\n{inside}\n    </div>\n'
        "  </section>"
    )
