"""Everything that is wrong with a file of settings, collected and told at once, in the order of its lines.

Filled by `run_file` and `spec_files` with what they find in the file itself, and by the command line with what it finds
when it looks up the names in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hookline.config.read_settings import Document
from hookline.errors import ConfigError, HooklineError

__all__ = ["Mistakes", "Path", "place_of", "written_at"]

Path = tuple[str | int, ...]
"""The keys and places that lead to a value of a file."""


class Mistakes:
    """Collects what is wrong with a file.

    Recipe::

        mistakes = Mistakes.of(document)
        with mistakes.at("hooks", "names", 2):
            look_up(name)  # a HooklineError in the block is collected, with its line
        mistakes.check()  # raises one ConfigError with all of them

    Args:
        place: Returns where a value stands, for messages. None if nothing was read from anywhere: errors in the blocks
            of ``at`` are then raised as they are.
        line: Returns the line of a value; None if there is none.
    """

    def __init__(
        self,
        place: Callable[[Path], str] | None = None,
        line: Callable[[Path], int | None] = lambda path: None,
    ) -> None:
        self._place = place
        self._line = line
        self._found: list[tuple[int, str, Path]] = []
        self._kept: dict[Path, list[int]] = {}
        """Of lists that entries were dropped from, the original places of those that are left."""

    @classmethod
    def of(cls, document: Document) -> Mistakes:
        """Return an empty collection for `document`."""
        return cls(lambda path: place_of(document, path), lambda path: document.line_of(written_at(document, path)))

    def add(self, path: Sequence[str | int], text: str) -> None:
        """Add one, at the value that `path` leads to."""
        original = self.original(tuple(path))
        place = "" if self._place is None else f"{self._place(original)}: "
        self._note(self._line(original) or 0, f"{place}{text}", original)

    def add_text(self, text: str) -> None:
        """Add one that is about the file as a whole, and comes first."""
        self._note(0, text, ())

    def _note(self, line: int, text: str, path: Path) -> None:
        if all(text != known for _, known, _ in self._found):
            self._found.append((line, text, path))

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Collect an error of hookline's that is raised in the block, as one about the value at `path`."""
        try:
            yield
        except HooklineError as error:
            if self._place is None:
                raise
            self.add(path, str(error))

    def place(self, path: Sequence[str | int]) -> str:
        """Return where a value stands, for a message of one's own."""
        original = self.original(tuple(path))
        return ".".join(map(str, original)) if self._place is None else self._place(original)

    def has_any(self, *paths: Path) -> bool:
        """Return whether something is wrong at or below one of `paths`."""
        return any(found[: len(path)] == path for _, _, found in self._found for path in paths)

    def __len__(self) -> int:
        return len(self._found)

    def check(self) -> None:
        """Raise a ConfigError with all of them, by line; do nothing if there are none."""
        if self._found:
            raise ConfigError("\n".join(text for _, text, _ in sorted(self._found, key=lambda found: found[0])))

    # -- the rest of a file that is wrong in parts -------------------------------------------------------------

    def drop(self, values: dict[Any, Any], paths: Sequence[Path]) -> None:
        """Take what `paths` lead to out of `values`, so that the rest can be checked; everything, if one leads nowhere.

        Of a list the whole entry goes; where the others stood is remembered, so that lines stay right.
        """
        for path in sorted({_entry(values, path) for path in paths}, key=_last_first):
            if not path:
                values.clear()
                return
            above = _value_at(values, path[:-1])
            if isinstance(above, list):
                self._kept.setdefault(path[:-1], list(range(len(above)))).pop(int(path[-1]))
            del above[path[-1]]

    def original(self, path: Path) -> Path:
        """Return the path that leads to a value in the file itself, where nothing was dropped."""
        for length, key in enumerate(path):
            if isinstance(key, int) and path[:length] in self._kept:
                places = self._kept[path[:length]]
                return (*path[:length], places[key] if key < len(places) else key, *path[length + 1 :])
        return path


def _entry(values: Any, path: Path) -> Path:
    """Return the path to what has to go: an entry of a list as a whole, or the last key that there is."""
    here = values
    for length, key in enumerate(path):
        there = key in here if isinstance(here, dict) else isinstance(here, list) and isinstance(key, int)
        if not there:
            return path[:length]
        if isinstance(here, list):
            return path[: length + 1]
        here = here[key]
    return path


def _value_at(values: Any, path: Path) -> Any:
    for key in path:
        values = values[key]
    return values


def _last_first(path: Path) -> tuple[int, int]:
    """Sort entries of lists from the last on, so that the places of those before stay."""
    return (-len(path), -path[-1] if path and isinstance(path[-1], int) else 0)


# -- where it was written --------------------------------------------------------------------------------------


def place_of(document: Document, path: Sequence[str | int]) -> str:
    """Return where a value stands; of one that was checked under another key, where it was written."""
    return document.place(written_at(document, path))


def written_at(document: Document, path: Sequence[str | int]) -> Path:
    """Return the path by which the file has a value: ``hooks`` may be a list, of names or of specs."""
    keys = tuple(path)
    if isinstance(document.values, dict) and isinstance(document.values.get("hooks"), list):
        if keys[:2] == ("hooks", "names"):
            keys = ("hooks", *keys[2:])
        elif keys[:1] == ("specs",) and "specs" not in document.values:
            keys = ("hooks", *keys[1:])
    return keys
