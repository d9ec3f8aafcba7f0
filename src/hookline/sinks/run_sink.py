"""What the sinks of this folder that write for one run at a time have in common.

Takes records and contexts from the fan-out; says which package is missing, which run is on, and once if there is
nowhere to write.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from hookline.errors import HooklineWarning, MissingPackageError
from hookline.sinks.record import Record
from hookline.sinks.sink import MetricSink
from hookline.sinks.sink_paths import RunContext

__all__ = ["RunSink"]


class RunSink(MetricSink):
    """A sink with one run at a time.

    Recipe: ``WandbSink.check()`` before training raises if the package is missing, with the line that installs it.
    """

    package: ClassVar[str | None] = None
    """What has to be installed, as it is imported; None: nothing."""
    extra: ClassVar[str | None] = None
    """The name of the extra that brings it."""

    def __init__(self, **known: Any) -> None:
        self._context = RunContext(**known)
        self._told = False
        self._resumed = False  # set by load_state_dict: the next context is that of the run which goes on

    @classmethod
    def check(cls) -> None:
        """Raise if what this sink needs is not installed; imports nothing of it."""
        if cls.package is not None and not _installed(cls.package):
            raise MissingPackageError(
                f"{cls.__name__} needs the package {cls.package.partition('.')[0]!r}, which is not installed. "
                f"Install it: pip install 'hookline[{cls.extra}]'."
            )

    @classmethod
    def _import(cls, module: str) -> Any:
        cls.check()
        return importlib.import_module(module)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: Any) -> None:
        """Take in metrics without more than their epoch, which counts as the step."""
        self.write(Record(dict(metrics), epoch, hook_point, epoch, self._context.strategy, time=time.time()))

    def write(self, record: Record) -> None:
        """Take in a record, unless it is empty."""
        if record.metrics:
            self._write(record)

    def _write(self, record: Record) -> None:
        raise NotImplementedError(f"{type(self).__name__} has to say what becomes of a record: define _write().")

    def set_run_context(self, **context: Any) -> None:
        """Another run may begin: then the one before is closed."""
        before = self._context.which()
        begins = self._context.update(context)
        if begins and not (self._resumed and self._context.adds_to(before)):
            self._end_run()
        self._resumed = False

    def _end_run(self) -> None:
        """Close what belongs to the run that is over; the next record opens anew."""

    def close(self) -> None:
        """No more will come."""
        self._end_run()

    @property
    def _is_copy(self) -> bool:
        """Whether this is a replay (a context with ``replay=True``): then nothing that the run itself has written to is
        gone on with."""
        return bool(self._context.known.get("replay"))

    def _drop(self, remedy: str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"{type(self).__name__} does not know yet where to write, and drops metrics until it does. {remedy}",
                HooklineWarning,
                stacklevel=4,
            )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a submodule whose package is missing
        return False
    except ValueError:  # a module that was put into sys.modules by hand, without a spec
        return True
