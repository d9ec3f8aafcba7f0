"""Write rows to a file per run, and continue that file when a run is resumed.

`CSVSink` and `ParquetSink` derive from `RowSink`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from hookline.errors import HooklineWarning
from hookline.sinks.sink import RunSink

__all__ = ["RowSink", "Rows"]


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
