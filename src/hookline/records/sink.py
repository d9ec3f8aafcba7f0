"""Define what a sink is: the record it receives, and the base classes of sinks.

The manager makes each `Record`; a `Reader` hands it to a sink, in the run's process or in that of slow sinks. A sink
that needs ``emit`` alone derives from `MetricSink`, one that writes for one run at a time from `RunSink`, and one that
writes a file of its own from `FileSink`.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hookline.error_policy import warn_user
from hookline.errors import MissingPackageError, OptionError
from hookline.messages import type_name
from hookline.records.append_file import AppendFile


class StepSeries(list[Any]):
    """The values of one metric over several steps; ``steps`` says which.

    Recipe: ``dict(zip(series.steps, series))``. A sink that does not look at ``steps`` sees a list.
    """

    def __init__(self, values: Iterable[Any] = (), steps: Iterable[int] = ()) -> None:
        super().__init__(values)
        self.steps: list[int] = list(steps)
        """The step of each value, counted from 0."""


@dataclass(frozen=True, slots=True)
class Record:
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

    @property
    def position(self) -> int:
        """The place on the axis of the run: the epoch; in a run that counts steps the step, 0 before the first."""
        return (self.step or 0) if self.epoch is None else self.epoch

    def place_text(self, separator: str = ", ") -> str:
        """Return ``"epoch 3, step 119"``; in a run that counts steps ``"step 119"``."""
        known = [f"{name} {value}" for name, value in (("epoch", self.epoch), ("step", self.step)) if value is not None]
        return separator.join(known) or "before the first step"


class MetricSink:
    """A destination of metrics; a subclass has to define ``emit`` alone.

    Recipe::

        class Printer(hookline.MetricSink):
            def emit(self, metrics, epoch, hook_point):
                print(epoch, metrics)

    A sink that needs more (the step, the steps of a series, the strategy) defines ``write`` instead. One that raises
    `OSError` gets the same record again later, and the following ones after it; any other error skips the record.
    """

    slow: ClassVar[bool] = False
    """Whether it would delay the training thread: then it runs in a process of its own, which reads the log. It is
    made there anew from ``options()``."""

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Take in the metrics of one record: numbers, lists and dictionaries, by ``"hook/metric"``.

        In a run that counts steps, ``epoch`` is the step; ``write`` tells the two apart.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say what becomes of metrics: define emit().")

    def write(self, record: Record) -> None:
        """Take in a record; a `Reader` calls this."""
        self.emit(dict(record.metrics), record.position, record.hook_point)

    def set_run_context(self, **context: Any) -> None:
        """Take in which run begins, or which strategy of it (``strategy=``, ``output_dir=``, …)."""

    def flush(self) -> None:
        """Write everything that is held back."""

    def close(self) -> None:
        """Flush, and release files and connections. May be called more than once."""
        self.flush()

    def restart(self) -> bool:
        """Forget everything, as the log is read again from its first record, and return True.

        A sink that returns False, as this one does, goes on with what it has not received yet.
        """
        return False

    def options(self) -> dict[str, Any]:
        """Return the arguments that make this sink again in another process, as JSON; slow sinks define it."""
        raise NotImplementedError(f"{type(self).__name__} is slow, so it has to say what it is made of: options().")


def check_sink(sink: Any, asked: str) -> None:
    """Raise unless ``sink`` is an object with ``emit``; ``asked`` begins the message."""
    if not callable(getattr(sink, "emit", None)) or isinstance(sink, type):
        call = f": call it, {sink.__name__}()" if isinstance(sink, type) else ""
        if isinstance(sink, str):
            call = f" {sink!r}: write hookline.sinks.CSVSink('metrics.csv'), TensorBoardSink(), JSONLSink() or another"
        raise OptionError(
            f"{asked} with emit(metrics, epoch, hook_point), such as MemorySink(); got {type_name(sink)}{call}."
        )


# -- which run it is ----------------------------------------------------------------------------------------------


class RunContext:
    """The arguments of ``set_run_context`` for the current run, and the places of its files.

    Recipe::

        context = RunContext()
        context.update({"strategy": "random", "run_dir": "runs/mod/random"})  # True: another run begins
        context.file(".csv")  # runs/mod/random/random.csv
    """

    def __init__(self, **known: Any) -> None:
        self.known: dict[str, Any] = {key: value for key, value in known.items() if value is not None}

    def update(self, context: Mapping[str, Any]) -> bool:
        """Take in ``context``; return whether another run begins.

        A run folder holds one run, so naming the same folder again continues it (a resumed run does that). Without a
        folder, each naming of a strategy begins another run.
        """
        before = self._identity()
        self.known |= {key: value for key, value in context.items() if value is not None}
        return self._identity() != before or ("run_dir" not in self.known and "strategy" in context)

    def _identity(self) -> tuple[str, ...]:
        where = ("run_dir",) if "run_dir" in self.known else ("output_dir", "experiment_name")
        return tuple(str(self.known.get(key)) for key in ("strategy", *where))

    @property
    def strategy(self) -> str | None:
        """Which run of an experiment that makes several."""
        found = self.known.get("strategy")
        return None if found is None else str(found)

    @property
    def folder(self) -> Path | None:
        """The folder of the run: ``run_dir``, else ``{output_dir}/{experiment_name}/{strategy}``; None if unknown."""
        if "run_dir" in self.known:
            return Path(self.known["run_dir"])
        output, experiment = self.known.get("output_dir"), self.known.get("experiment_name")
        if output is None or experiment is None or self.strategy is None:
            return None
        return Path(output) / file_name(str(experiment)) / file_name(self.strategy)

    def file(self, ending: str) -> Path | None:
        """Return ``{folder}/{strategy}{ending}``; None if the folder is unknown."""
        folder = self.folder
        return None if folder is None else folder / (file_name(self.strategy or "run") + ending)


def file_name(text: str) -> str:
    """Return ``text`` as the name of one file: separators become ``_``, as do the dots of a name that is all dots."""
    name = "".join("_" if sign in "/\\:\0" else sign for sign in text)
    name = name.encode("utf-8", "backslashreplace").decode()
    return name if name.strip(". ") else name.replace(".", "_") or "_"


def free_path(path: Path) -> Path:
    """Return ``path``; or, if there is such a file, the first free one with ``_1``, ``_2``, … before its ending."""
    numbered = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(1))
    return next(found for found in itertools.chain([path], numbered) if not found.exists())


# -- sinks that write for one run at a time -----------------------------------------------------------------------


class RunSink(MetricSink):
    """A sink with one run at a time; a subclass defines ``write`` and ``end_run``.

    Recipe: ``WandbSink.check()`` before training raises if the package is missing, with the line that installs it.
    """

    package: ClassVar[str | None] = None
    """The package that has to be installed, by its import name."""
    extra: ClassVar[str | None] = None
    """The name of hookline's extra that installs it."""

    def __init__(self, **known: Any) -> None:
        self._known = known
        self._context = RunContext(**known)
        self._has_warned = False
        self.files: list[Path] = []
        """The files and folders that it has made: they are deleted when the log is read again from its first record."""
        self.keep_files: Callable[[], None] = lambda: None
        """Called when ``files`` has grown: a reader of the log notes them, for a run that is killed and resumed."""

    @classmethod
    def check(cls) -> None:
        """Raise if the package of this sink is not installed; import nothing of it."""
        if cls.package is not None and importlib.util.find_spec(cls.package) is None:
            raise MissingPackageError(
                f"{cls.__name__} needs the package {cls.package!r}, which is not installed. "
                f"Install it: pip install 'hookline[{cls.extra}]'."
            )

    @classmethod
    def _import(cls, module: str) -> Any:
        cls.check()
        return importlib.import_module(module)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Take in metrics, if there are any, of which only the epoch is known; it counts as the step."""
        if metrics:
            self.write(Record(dict(metrics), epoch, hook_point, epoch, self._context.strategy, time=time.time()))

    def set_run_context(self, **context: Any) -> None:
        """Take in which run follows; close the one before if it is another."""
        after = RunContext(**self._context.known)
        if after.update(context):
            self.end_run()  # an OSError leaves all as it is: it is told again
        self._context = after

    def end_run(self) -> None:
        """Close what belongs to the run that is over; the next record opens anew."""

    def close(self) -> None:
        """Close what is open."""
        self.end_run()

    @property
    def _is_replay(self) -> bool:
        """Whether this is a replay, which must not continue what the run itself has written."""
        return bool(self._context.known.get("replay"))

    def _drop(self) -> None:
        """Warn, once, that records are dropped as no place to write is known."""
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{type(self).__name__} does not know where to write, and drops metrics until it does. Name a place "
                "when you make it, or call set_run_context(run_dir=..., strategy=...)."
            )


class FileSink(RunSink):
    """A sink with a file of its own for each run, which it makes again from the log when a run is resumed.

    A subclass has an ``ending``, and defines ``write``, which asks `_open_path` or `_open_file` where to, and ``flush``
    if it holds anything back.

    Recipe: ``CSVSink("metrics.csv")`` writes ``metrics.csv``, or ``metrics_1.csv`` where there is such a file already.
    """

    ending: ClassVar[str]
    """The ending of the file's name in the folder of a run."""
    is_folder: ClassVar[bool] = False
    """Whether the file is a folder of files."""

    def __init__(self, path: str | Path | None, **known: Any) -> None:
        super().__init__(**known)
        self._given_path = None if path is None else Path(path)
        self.path: Path | None = None
        """The file or folder of this run; None before its first record."""
        self._file: AppendFile | None = None

    def _wanted_path(self) -> Path | None:
        """Return the file of this run, if its name is free; None if its place is not known yet."""
        return self._given_path or self._context.file(self.ending)

    def _open_path(self) -> Path | None:
        """Return the file of this run, made under a name that is free; None if its place is not known yet."""
        wanted = self._wanted_path()
        if self.path is None and wanted is not None:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            path = free_path(wanted)
            self.files.append(path)
            self.keep_files()  # before it is made: whenever the run is killed, its files are known
            path.mkdir() if self.is_folder else path.touch(exist_ok=False)
            self.path = path
        return self.path

    def _open_file(self) -> AppendFile | None:
        """Return the file of this run, open; None if its place is not known yet."""
        if self._file is None and (path := self._open_path()) is not None:
            self._file = AppendFile(path)
        return self._file

    def _release(self) -> None:
        """Close the file, without what is held back."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _forget(self) -> None:
        """Forget the run: the next record makes another file. A subclass drops what it knows of the file, too."""
        self._release()
        self.path = None

    def close(self) -> None:
        """Write what is held back and close the file; a later record of the same run opens it again."""
        self.flush()
        self._release()

    def end_run(self) -> None:
        self.close()
        self._forget()

    def restart(self) -> bool:
        """Forget the files: they are written again."""
        self._forget()
        self.files.clear()
        self._context = RunContext(**self._known)
        return True
