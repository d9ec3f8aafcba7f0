"""Load a run back into Python: its records, its settings, and its metrics as arrays and tables.

Users call `load_run` and `load_runs`. These read folders and logs by `read_runs`, as the page does, and split values by
`values_in`, as the sinks do. pandas is imported when a table is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hookline.errors import MissingPackageError, OptionError
from hookline.messages import nearest_names
from hookline.records.sink import Record
from hookline.records.values import values_in
from hookline.report.metric_series import as_float, shown_names
from hookline.report.report_runs import FACTS, LOG, distinct_names, find_runs, read_runs

_BEFORE: Final = -1
"""The step of what was recorded before the first step."""
_OWN: Final = ("step", "epoch")
"""Columns of a table that are no metrics."""


def load_run(path: str | Path) -> LoadedRun:
    """Read a run back: its records, its settings, its metrics over steps.

    Recipe::

        run = hookline.load_run("runs/mod_arithmetic/stride")
        steps, losses = run.series("training_metrics/loss")
        run.to_pandas().plot(y="norms/total_norm")

    A run that is still going, or was killed, is read as far as it got; of a run that was resumed, each step counts
    once.

    Args:
        path: The folder of a run, or its log.

    Raises:
        OptionError: There is no run, or there are several: `load_runs` reads those.
    """
    found = _read(path)
    if len(found) > 1:
        names = ", ".join(repr(run.name) for run in found)
        raise OptionError(f"{path} holds {len(found)} runs ({names}); read them with load_runs({str(path)!r}).")
    return found[0]


def load_runs(paths: str | Path | Sequence[str | Path]) -> dict[str, LoadedRun]:
    """Read several runs back, by name.

    Recipe::

        for name, run in hookline.load_runs("runs/mod_arithmetic").items():
            print(name, run.settings["seed"], run.latest["training_metrics/loss"])

    Args:
        paths: A folder that holds runs, as ``runs`` or ``runs/mod_arithmetic``; or several, of runs or of logs.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [run for path in given for run in _read(path)]
    distinct_names(found)
    return {run.name: run for run in found}


def _read(path: str | Path) -> list[LoadedRun]:
    found = []
    for place in find_runs([path]):
        if place.is_dir() and not (place / LOG).exists() and not (place / FACTS).exists():
            raise OptionError(f"{place} is no folder of a run: it has neither {LOG} nor {FACTS}, nor have those below.")
        runs = read_runs(place, _RecordList)
        found += [LoadedRun(run.name, run.folder, run.facts, list(run.collected), run.remarks) for run in runs]
    return found


class _RecordList(list[Record]):
    """Collects records."""

    take = list.append


@dataclass(eq=False)
class LoadedRun:
    """A run, loaded.

    Recipe: ``run = hookline.load_run(folder); run.metrics; run.series(run.metrics[0]); run.to_pandas()``.

    Metrics are called ``hook/metric``; the parts of a dictionary ``hook/metric/part``; where one name was recorded at
    several moments, or by several ranks, ``hook/metric @ POST_EPOCH`` or ``hook/metric (rank 1)``, as on the page.
    """

    name: str
    """The experiment and its strategy."""
    folder: Path
    """Where it was read."""
    settings: dict[str, Any] = field(repr=False, default_factory=dict)
    """What ``run.json`` says: experiment, config, options, seed, versions, result, …; else what the log says."""
    records: list[Record] = field(repr=False, default_factory=list)
    """Every record, in order, with NaN, infinities and the steps of series."""
    remarks: list[str] = field(repr=False, default_factory=list)
    """Sentences about what is missing."""

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, in the order they were first recorded in."""
        return list(self._columns)

    @property
    def latest(self) -> dict[str, Any]:
        """The value of every metric at its last step."""
        return {name: by_step[max(by_step)] for name, by_step in self._columns.items()}

    def series(self, metric: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the steps at which `metric` was recorded, increasing, and its values there.

        Recipe: ``steps, values = run.series("norms/total_norm"); plt.plot(steps, values)``.

        Numbers come as float64; text, lists and other values as an array of objects. What was recorded before the first
        step is at -1.
        """
        by_step = self._columns.get(metric)
        if by_step is None:
            near = nearest_names(metric, self.metrics, n=3)
            nearest = f" Nearest: {', '.join(map(repr, near))}." if near else ""
            raise OptionError(f"The run {self.name!r} has no metric {metric!r}.{nearest} All of them: run.metrics.")
        steps = sorted(by_step)
        values = [by_step[step] for step in steps]
        return np.asarray(steps, dtype=np.int64), _array(values)

    def to_pandas(self) -> Any:
        """Return the metrics as a `pandas.DataFrame`: a row for each step, by which it is indexed, a column for each.

        ``epoch`` comes first, unless the run counted steps. Where nothing was recorded there is NaN, or None
        beside text and lists. For polars: ``polars.from_pandas(run.to_pandas().reset_index())``.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError:
            raise MissingPackageError(
                "run.to_pandas() needs the package 'pandas', which is not installed. Install it: pip install pandas. "
                "Without it: steps, values = run.series(name)."
            ) from None
        steps, columns = self._table()
        index = pandas.Index(steps, name="step", dtype="int64")
        return pandas.DataFrame(columns, index=index)

    # -- inside ----------------------------------------------------------------------------------------------

    @cached_property
    def _placed(self) -> list[Record]:
        """The records; those from before the first step at -1."""
        return [record if record.step is not None else replace(record, step=_BEFORE) for record in self.records]

    @cached_property
    def _columns(self) -> dict[str, dict[int, Any]]:
        """By metric, its value at each step; of a step that was recorded twice, the newest."""
        found: dict[tuple[str, str, int], dict[int, Any]] = {}
        for record in self._placed:
            for name, value, step in values_in(record, reserved=_OWN):
                found.setdefault((name, record.point, record.rank), {})[step] = value
        shown = shown_names(list(found))
        return {shown[key]: by_step for key, by_step in found.items()}

    def _table(self) -> tuple[list[int], dict[str, list[Any]]]:
        """Return all steps, and of each column the value at each of them; None where there is none."""
        counted = [record for record in self._placed if record.epoch is not None]
        epochs = {step: record.epoch for record in counted for _, _, step in values_in(record)}
        columns: dict[str, Mapping[int, Any]] = {**({"epoch": epochs} if epochs else {}), **self._columns}
        steps = sorted({step for by_step in self._columns.values() for step in by_step})
        return steps, {name: [by_step.get(step) for step in steps] for name, by_step in columns.items()}

    def __repr__(self) -> str:
        steps = [step for by_step in self._columns.values() for step in by_step]
        span = f", steps {min(steps)} to {max(steps)}" if steps else ""
        status = self.settings.get("status")
        said = f" {status}," if isinstance(status, str) else ""
        return f"<LoadedRun {self.name},{said} {len(self.records)} records, {len(self.metrics)} metrics{span}>"


def _array(values: list[Any]) -> NDArray[Any]:
    """Return an array of numbers, if all are; else of objects."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return np.asarray([as_float(value) for value in values], dtype=np.float64)
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made
