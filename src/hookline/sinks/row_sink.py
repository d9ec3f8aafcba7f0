"""What sinks that write rows to a place of their own have in common: which place that is, and going on there.

Asked by `CSVSink` and `ParquetSink`; hands a resumed run the file, or folder, that it was writing, cut back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from hookline.errors import HooklineWarning
from hookline.sinks.run_sink import RunSink

__all__ = ["RowSink", "Rows"]


class Rows(Protocol):
    """Rows in a file, or in several."""

    path: Path
    rows: int

    def close(self) -> None:
        """Write what waits, and let go."""


Kind = TypeVar("Kind", bound=Rows)


class RowSink(RunSink, Generic[Kind]):
    """A sink whose position is a path and a number of rows."""

    ending: ClassVar[str]
    """Of the name that the file has in the folder of a run."""

    def __init__(self, path: str | Path | None, **known: Any) -> None:
        super().__init__(**known)
        self._wanted = None if path is None else Path(path)
        self._rows: Kind | None = None
        self._left: dict[str, Any] = {}  # where it was when it was closed

    @property
    def path(self) -> Path | None:
        """What is being written; None before the first record, or checkpoint."""
        return None if self._rows is None else self._rows.path

    def _new(self, wanted: Path) -> Kind:
        """A new file, there or beside it."""
        raise NotImplementedError

    def _again(self, path: Path, count: int) -> Kind:
        """The file as it was after that many rows."""
        raise NotImplementedError

    def _opened(self) -> Kind | None:
        """Where rows go; None if that is not known yet."""
        if self._rows is None and (wanted := self._place()) is not None:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            self._rows, self._left = self._new(wanted), {}
        return self._rows

    def _place(self) -> Path | None:
        return self._wanted or self._context.file(self.ending)

    def state_dict(self) -> dict[str, Any]:
        """Which file, and how many rows of it; before the first row the file is made, so that it is known later."""
        with suppress(OSError):  # on a full disk, as many as there are; that it is full is said by the next record
            self.flush()
        rows = self._rows if self._left else self._opened()
        return dict(self._left) if rows is None else {"path": str(rows.path), "rows": rows.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that file, after that many rows; later ones are cut off."""
        self._end_run()
        if not state:
            return
        path, count = self._kept(state["path"], self._place()), int(state["rows"])
        if not path.exists():
            warnings.warn(f"{path} is gone; the rows from now on go to a new file.", HooklineWarning, stacklevel=2)
            return
        self._rows = self._again(path, count)
        self._resumed = True
        if self._rows.rows < count:
            message = f"{path} was to have {count} rows and has {self._rows.rows}; the rows from now on follow these."
            warnings.warn(message, HooklineWarning, stacklevel=2)

    def _kept(self, path: str, place: Path | None) -> Path:
        """What a checkpoint calls ``path``, in the folder where it is now: a run may have been moved, or copied."""
        here = None if place is None else place.parent / Path(path).name
        return here if here is not None and here.exists() else Path(path)

    def _end_run(self) -> None:
        # Forgotten also if closing fails: the rows of another run must not follow.
        rows, self._rows, self._left = self._rows, None, {}
        if rows is not None:
            rows.close()

    def close(self) -> None:
        """No more will come; a checkpoint that is taken afterwards still says how many rows there are."""
        rows, left = self._rows, self._left
        self._end_run()
        self._left = left if rows is None else {"path": str(rows.path), "rows": rows.rows}
