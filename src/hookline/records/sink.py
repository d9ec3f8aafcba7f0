"""Define what a sink is: the record it receives, and the base classes of sinks.

The manager makes each `Record`; the fan-out, the helper process and ``replay`` hand it to a sink by `hand`. A sink that
needs ``emit`` alone derives from `MetricSink`, one that writes for one run at a time from `RunSink`, and one that
writes rows to a file of its own from `RowSink`.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from hookline.errors import HooklineWarning, HookSignatureError, MissingPackageError, OptionError
from hookline.messages import type_name
from hookline.records.run_identity import RunContext
from hookline.tables import Table, number_text

__all__ = [
    "MetricSink", "Record", "RowSink", "RunPlace", "RunSink", "StepSeries", "check_sink", "free_paths", "hand",
]  # fmt: skip


class StepSeries(list[Any]):
    """The values of one metric over several steps; ``steps`` says which.

    Recipe: ``dict(zip(series.steps, series))``. A sink that does not look at ``steps`` sees a list.
    """

    def __init__(self, values: Iterable[Any] = (), steps: Iterable[int] = ()) -> None:
        super().__init__(values)
        self.steps: list[int] = list(steps)
        """The step of each value, counted from 0."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StepSeries, (list(self), self.steps)


class RunPlace:
    """Where something is in its run: by the epoch and the step, or in a run that counts steps by the step alone."""

    __slots__ = ()
    epoch: int | None
    step: int | None

    @property
    def position(self) -> int:
        """The place on the axis of the run: the epoch; in a run that counts steps the step, 0 before the first."""
        return (self.step or 0) if self.epoch is None else self.epoch

    def place_text(self, separator: str = ", ") -> str:
        """Return ``"epoch 3, step 119"``; in a run that counts steps ``"step 119"``."""
        known = [f"{name} {value}" for name, value in (("epoch", self.epoch), ("step", self.step)) if value is not None]
        return separator.join(known) or "before the first step"


@dataclass(frozen=True, slots=True)
class Record(RunPlace):
    """Metrics of one point and step of a run; a step may have several records, which ``number`` tells apart.

    Recipe: ``def write(self, record): print(record.step, record.metrics)`` in a sink.
    """

    metrics: Mapping[str, Any]
    """By ``"hook/metric"``: numbers, strings, None, lists and dictionaries of these; no tensors. Metrics of single
    steps are a `StepSeries` each."""
    epoch: int | None
    """Counted from 0; None in a run that counts steps (``step_loop``, ``loop="step"``)."""
    hook_point: Any
    """A `HookPoint`, or the name of one."""
    step: int | None = None
    """The last step of the whole run, counted from 0; None before the first."""
    strategy: str | None = None
    """Which run of an experiment that makes several."""
    rank: int = 0
    """Which process of a distributed run."""
    time: float = 0.0
    """When it was made, in seconds since 1970."""
    number: int = field(default=-1, compare=False)
    """Its place in the log, counted from 0; -1 without a log."""

    @property
    def point(self) -> str:
        """The name of the hook point."""
        return str(getattr(self.hook_point, "name", self.hook_point))

    def _repr_html_(self) -> str:
        rows = [(name, number_text(value)) for name, value in self.metrics.items()]
        strategy = "" if self.strategy is None else f", {self.strategy}"
        title = f"{self.place_text()}, {self.point}{strategy}"
        return Table(("metric", "value"), rows, numbers=(1,), title=title).html()


class MetricSink:
    """A destination of metrics; a subclass has to define ``emit`` alone.

    Recipe::

        class Printer(hookline.MetricSink):
            def emit(self, metrics, epoch, hook_point):
                print(epoch, metrics)

    A sink that needs more (the step, the steps of a series, the strategy) defines ``write`` instead.
    """

    slow: ClassVar[bool] = False
    """Whether it would delay the training thread: then it runs in a process of its own, which reads the log. It is
    made there anew from ``options()``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a class that lacks a method before the run begins."""
        missing = cls._missing_methods()
        if missing:
            raise HookSignatureError(f"{cls.__name__} has to say what becomes of metrics: define {missing}.")
        return super().__new__(cls)

    @classmethod
    def _missing_methods(cls) -> str:
        """Return what a subclass still has to define, for an error; nothing if it is complete."""
        if cls.emit is MetricSink.emit and cls.write is MetricSink.write:
            return "emit(self, metrics, epoch, hook_point), or write(self, record)"
        return ""

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Take in the metrics of one record: numbers, lists and dictionaries, by ``"hook/metric"``.

        In a run that counts steps, ``epoch`` is the step; ``write`` tells the two apart.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say what becomes of metrics: define emit().")

    def write(self, record: Record) -> None:
        """Take in a record; the fan-out calls this."""
        self.emit(dict(record.metrics), record.position, record.hook_point)

    def set_run_context(self, **context: Any) -> None:
        """Take in which run begins, or which strategy of it (``strategy=``, ``output_dir=``, …)."""

    def flush(self) -> None:
        """Write everything that is held back."""

    def close(self) -> None:
        """Flush, and release files and connections. May be called more than once."""
        self.flush()

    def options(self) -> dict[str, Any]:
        """Return the arguments that make this sink again in another process, as JSON; slow sinks define it."""
        raise NotImplementedError(f"{type(self).__name__} is slow, so it has to say what it is made of: options().")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, as JSON: for example how much of a file is written."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what ``state_dict`` returned: drop what was written later."""


def check_sink(sink: Any, asked: str) -> None:
    """Raise unless ``sink`` is an object with ``emit``; ``asked`` begins the message."""
    if not callable(getattr(sink, "emit", None)) or isinstance(sink, type):
        call = f": call it, {sink.__name__}()" if isinstance(sink, type) else ""
        if isinstance(sink, str):
            call = f" {sink!r}: write hookline.sinks.CSVSink('metrics.csv'), TensorBoardSink(), JSONLSink() or another"
        raise OptionError(
            f"{asked} with emit(metrics, epoch, hook_point), such as MemorySink(); got {type_name(sink)}{call}."
        )


def hand(sink: Any, record: Record) -> None:
    """Give ``record`` to ``sink``, which may be an object with ``emit`` alone."""
    if isinstance(sink, MetricSink):
        sink.write(record)
    else:
        sink.emit(dict(record.metrics), record.position, record.hook_point)


# -- sinks that write for one run at a time -----------------------------------------------------------------------


def free_paths(path: Path) -> Iterator[Path]:
    """Yield ``path``, then the same with ``_1``, ``_2``, … before its ending; the caller takes the first free one."""
    yield path
    for number in itertools.count(1):
        yield path.with_name(f"{path.stem}_{number}{path.suffix}")


class RunSink(MetricSink):
    """A sink with one run at a time; a subclass defines ``_write`` and ``_end_run``.

    Recipe: ``WandbSink.check()`` before training raises if the package is missing, with the line that installs it.
    """

    package: ClassVar[str | None] = None
    """The package that has to be installed, by its import name."""
    extra: ClassVar[str | None] = None
    """The name of hookline's extra that installs it."""

    def __init__(self, **known: Any) -> None:
        self._context = RunContext(**known)
        self._has_warned = False
        self._resumed = False  # set by load_state_dict: the next context is that of the same run

    @classmethod
    def check(cls) -> None:
        """Raise if the package of this sink is not installed; import nothing of it."""
        if cls.package is not None and not _is_installed(cls.package):
            raise MissingPackageError(
                f"{cls.__name__} needs the package {cls.package.partition('.')[0]!r}, which is not installed. "
                f"Install it: pip install 'hookline[{cls.extra}]'."
            )

    @classmethod
    def _import(cls, module: str) -> Any:
        cls.check()
        return importlib.import_module(module)

    @classmethod
    def _missing_methods(cls) -> str:
        if cls.write is RunSink.write and cls._write is RunSink._write:
            return "_write(self, record), which emit and write of a RunSink call"
        return ""

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Take in metrics of which only the epoch is known; it counts as the step."""
        self.write(Record(dict(metrics), epoch, hook_point, epoch, self._context.strategy, time=time.time()))

    def write(self, record: Record) -> None:
        """Take in a record, unless it is empty."""
        if record.metrics:
            self._write(record)

    def _write(self, record: Record) -> None:
        raise NotImplementedError(f"{type(self).__name__} has to say what becomes of a record: define _write().")

    def set_run_context(self, **context: Any) -> None:
        """Take in which run follows; close the one before if it is another."""
        before = self._context.identity()
        begins = self._context.update(context)
        continues = all(old in (None, new) for old, new in zip(before, self._context.identity(), strict=True))
        if begins and not (self._resumed and continues):
            self._end_run()
        self._resumed = False

    def _end_run(self) -> None:
        """Close what belongs to the run that is over; the next record opens anew."""

    def close(self) -> None:
        """Close what is open."""
        self._end_run()

    @property
    def _is_replay(self) -> bool:
        """Whether this is a replay, which must not append to what the run itself has written."""
        return bool(self._context.known.get("replay"))

    def _drop(self, remedy: str) -> None:
        """Warn, once, that a record is dropped as no place to write is known."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(self).__name__} does not know yet where to write, and drops metrics until it does. {remedy}",
                HooklineWarning,
                stacklevel=4,
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a submodule whose package is missing
        return False
    except ValueError:  # a module that was put into sys.modules by hand, without a spec
        return True


# -- sinks that write rows ----------------------------------------------------------------------------------------


class Rows(Protocol):
    """Rows in a file, or in several."""

    path: Path
    rows: int

    def close(self) -> None: ...


RowsType = TypeVar("RowsType", bound=Rows)


class RowSink(RunSink, Generic[RowsType]):
    """A sink whose state is a path and a number of rows; a subclass has an ``ending``.

    It also defines ``_write``, ``_create`` and ``_reopen``.
    """

    ending: ClassVar[str]
    """The ending of the file's name in the folder of a run."""

    def __init__(self, path: str | Path | None, **known: Any) -> None:
        super().__init__(**known)
        self._given_path = None if path is None else Path(path)
        self._rows: RowsType | None = None
        self._closed_state: dict[str, Any] = {}

    @property
    def path(self) -> Path | None:
        """The file or folder that is being written; None before the first record, or checkpoint."""
        return None if self._rows is None else self._rows.path

    @classmethod
    def _missing_methods(cls) -> str:
        base: type[RowSink[Any]] = RowSink
        has = {
            "ending": hasattr(cls, "ending"),
            "_create(self, wanted)": cls._create is not base._create,
            "_reopen(self, path, count)": cls._reopen is not base._reopen,
        }
        missing = [super()._missing_methods(), *(name for name, is_there in has.items() if not is_there)]
        return "; ".join(filter(None, missing))

    def _create(self, wanted: Path) -> RowsType:
        """Return a new file at ``wanted``, or beside it."""
        raise NotImplementedError

    def _reopen(self, path: Path, count: int) -> RowsType:
        """Return the file at ``path``, cut back to ``count`` rows."""
        raise NotImplementedError

    def _wanted_path(self) -> Path | None:
        return self._given_path or self._context.file(self.ending)

    def _open(self) -> RowsType | None:
        """Return the open file; None if its place is not known yet."""
        if self._rows is None and (wanted := self._wanted_path()) is not None:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            self._rows, self._closed_state = self._create(wanted), {}
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        """Return the file and how many rows it has; before the first row the file is made, so that it is known."""
        with suppress(OSError):  # on a full disk, as many rows as there are; the next record reports that it is full
            self.flush()
        rows = self._rows if self._closed_state else self._open()
        return dict(self._closed_state) if rows is None else {"path": str(rows.path), "rows": rows.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the file of ``state`` after its rows; cut later ones off."""
        self._end_run()
        if not state:
            return
        path, count = Path(state["path"]), int(state["rows"])
        place = self._wanted_path()
        if place is not None and (place.parent / path.name).exists():  # the run's folder was moved, or copied
            path = place.parent / path.name
        if not path.exists():
            warnings.warn(f"{path} is gone; the rows from now on go to a new file.", HooklineWarning, stacklevel=2)
            return
        self._rows = self._reopen(path, count)
        self._resumed = True
        if self._rows.rows < count:
            message = f"{path} was to have {count} rows and has {self._rows.rows}; the rows from now on follow these."
            warnings.warn(message, HooklineWarning, stacklevel=2)

    def _end_run(self) -> None:
        # Forgotten also if closing fails: the rows of another run must not follow.
        rows, self._rows, self._closed_state = self._rows, None, {}
        if rows is not None:
            rows.close()

    def close(self) -> None:
        """Close the file; a later ``state_dict`` still says how many rows there are."""
        rows, state = self._rows, self._closed_state
        self._end_run()
        self._closed_state = state if rows is None else {"path": str(rows.path), "rows": rows.rows}
