"""Where everything in a TOML text stands, which Python's own parser does not tell.

Takes text from `read` that is known to be TOML, hands back the line of every value: of tables, dotted keys, arrays of
tables, and what is inside inline tables and arrays.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from hookline.config.yaml_core import Lines

__all__ = ["TomlText"]

_BLANKS: Final = re.compile(r"(?:[\s,]|#[^\n]*)*")
_KEY: Final = re.compile(r"""[ \t]*("(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_\-]+)[ \t]*(\.?)""")
_TEXT: Final = re.compile(
    r'\"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'", re.DOTALL
)
_PLAIN: Final = re.compile(r"[^,\]}\n#]+")
Path = tuple[str | int, ...]


class TomlText:
    """A TOML text, parsed: its value, and where everything in it stands. Raises `tomllib.TOMLDecodeError`."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self.value = tomllib.loads(text)

    def lines(self) -> Lines:
        """Where each value begins, or its key if it has one."""
        return _Walk(self._text).found


class _Walk:
    """Goes through a text that is known to be TOML."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: Lines = {}
        self._counts: dict[Path, int] = {}
        """Of each array of tables, the place of the newest."""
        self._counted = (0, 1)
        table: Path = ()
        start = self._after_blanks(0)
        while start < len(text):
            start, table = self._heading(start) if text[start] == "[" else (self._pair(start, table), table)
            start = self._after_blanks(start)

    def _heading(self, start: int) -> tuple[int, Path]:
        is_array = self.text.startswith("[[", start)
        end, keys = self._keys(start + 1 + is_array)
        table: Path = ()
        for key in keys[:-1]:
            table = self._newest((*table, key))
        table = (*table, keys[-1])
        if is_array:
            self._counts[table] = self._counts.get(table, -1) + 1
            self._note(table, start)
        table = self._newest(table)
        self._note(table, start)
        return end + 1 + is_array, table

    def _newest(self, table: Path) -> Path:
        """An array of tables stands for the newest of them."""
        return (*table, self._counts[table]) if table in self._counts else table

    def _pair(self, start: int, table: Path) -> int:
        end, keys = self._keys(start)
        for count in range(1, len(keys) + 1):
            self._note((*table, *keys[:count]), start)
        return self._value(end + 1, (*table, *keys))

    def _keys(self, start: int) -> tuple[int, list[str]]:
        """The parts of a dotted key, and where the sign behind it stands."""
        keys: list[str] = []
        while True:
            match = _KEY.match(self.text, start)
            assert match is not None
            keys.append(_unquoted(match[1]))
            start = match.end()
            if not match[2]:
                return start, keys

    def _value(self, start: int, path: Path) -> int:
        start = self._after_blanks(start)
        self._note(path, start)
        if self.text[start] == "[":
            return self._array(start + 1, path)
        if self.text[start] == "{":
            return self._table(start + 1, path)
        match = _TEXT.match(self.text, start) or _PLAIN.match(self.text, start)
        assert match is not None
        return match.end()

    def _array(self, start: int, path: Path) -> int:
        place = 0
        while self.text[start := self._after_blanks(start)] != "]":
            start = self._value(start, (*path, place))
            place += 1
        return start + 1

    def _table(self, start: int, path: Path) -> int:
        while self.text[start := self._after_blanks(start)] != "}":
            start = self._pair(start, path)
        return start + 1

    def _after_blanks(self, start: int) -> int:
        match = _BLANKS.match(self.text, start)
        assert match is not None
        return match.end()

    def _note(self, path: Path, position: int) -> None:
        """The text is gone through once, so lines are counted on from the last one."""
        before, line = self._counted
        if position > before:
            self._counted = before, line = position, line + self.text.count("\n", before, position)
        self.found.setdefault(path, line)


def _unquoted(key: str) -> str:
    if key[0] not in "\"'":
        return key
    found: dict[str, Any] = tomllib.loads(f"{key} = 0")  # with its escapes
    return next(iter(found))
