"""Collect everything that is wrong with a file of settings, and raise it as one error, in the order of its lines.

`run_file` and `spec_files` add what they find in the file itself; the command line adds what it finds when it looks up
the names in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hookline.errors import ConfigError, HooklineError
from hookline.runs.read import Document, KeyPath

__all__ = ["Mistakes"]


class Mistakes:
    """Collect what is wrong with a file.

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
        place: Callable[[KeyPath], str] | None = None,
        line: Callable[[KeyPath], int | None] = lambda path: None,
    ) -> None:
        self._place = place
        self._line = line
        self._found: list[tuple[int, str, KeyPath]] = []
        self._kept: dict[KeyPath, list[int]] = {}
        """Of lists that entries were dropped from, the original places of those that are left."""

    @classmethod
    def of(cls, document: Document) -> Mistakes:
        """Return an empty collection for `document`."""
        return cls(
            lambda path: document.place(_path_in_file(document, path)),
            lambda path: document.line_of(_path_in_file(document, path)),
        )

    def add(self, path: Sequence[str | int], text: str) -> None:
        """Add one, at the value that `path` leads to."""
        original = self.original(tuple(path))
        place = "" if self._place is None else f"{self._place(original)}: "
        self._add(self._line(original) or 0, f"{place}{text}", original)

    def add_all(self, faults: Sequence[tuple[KeyPath, str]]) -> None:
        """Add each of `faults`, a path and a sentence."""
        for path, text in faults:
            self.add(path, text)

    def add_text(self, text: str) -> None:
        """Add one that is about the file as a whole, and comes first."""
        self._add(0, text, ())

    def _add(self, line: int, text: str, path: KeyPath) -> None:
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
        """Return where a value stands, for another message."""
        original = self.original(tuple(path))
        return ".".join(map(str, original)) if self._place is None else self._place(original)

    def has_any(self, *paths: KeyPath) -> bool:
        """Return whether something is wrong at or below one of `paths`."""
        return any(found[: len(path)] == path for _, _, found in self._found for path in paths)

    def __len__(self) -> int:
        return len(self._found)

    def check(self) -> None:
        """Raise a ConfigError with all of them, by line; do nothing if there are none."""
        if self._found:
            raise ConfigError("\n".join(text for _, text, _ in sorted(self._found, key=lambda found: found[0])))

    def drop(self, values: dict[Any, Any], paths: Sequence[KeyPath]) -> None:
        """Delete what `paths` lead to from `values`, so that the rest can be checked; all, if one leads nowhere.

        Of a list the whole entry goes; the original places of the others are kept, so that lines stay right.
        """
        # The last entries of lists first, so that the places of those before stay.
        order = sorted({_entry(values, path) for path in paths}, key=lambda path: [-len(path), *_negated(path[-1:])])
        for path in order:
            if not path:
                values.clear()
                return
            above: Any = values
            for key in path[:-1]:
                above = above[key]
            if isinstance(above, list):
                self._kept.setdefault(path[:-1], list(range(len(above)))).pop(int(path[-1]))
            del above[path[-1]]

    def original(self, path: KeyPath) -> KeyPath:
        """Return the path that leads to a value in the file itself, from which nothing was dropped."""
        for length, key in enumerate(path):
            if isinstance(key, int) and path[:length] in self._kept:
                places = self._kept[path[:length]]
                return (*path[:length], places[key] if key < len(places) else key, *path[length + 1 :])
        return path


def _negated(keys: KeyPath) -> list[int]:
    return [-key if isinstance(key, int) else 0 for key in keys]


def _entry(values: Any, path: KeyPath) -> KeyPath:
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


def _path_in_file(document: Document, path: KeyPath) -> KeyPath:
    """Return the path by which the file has a value: there ``hooks`` may be a list, of names or of specs."""
    if isinstance(document.values, dict) and isinstance(document.values.get("hooks"), list):
        if path[:2] == ("hooks", "names"):
            return ("hooks", *path[2:])
        if path[:1] == ("specs",) and "specs" not in document.values:
            return ("hooks", *path[1:])
    return path
