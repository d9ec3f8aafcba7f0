"""JSON as people write it, and where everything in it stands.

Takes text from `read`; comments and last commas become blanks, so that lines and columns stay, and the rest is JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from hookline.config.yaml_core import Lines

__all__ = ["JsonText"]

_QUOTED: Final = r'"(?:\\.|[^"\\\n])*"'
_COMMENT: Final = re.compile(_QUOTED + r"|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA: Final = re.compile(_QUOTED + r"|,(?=\s*[\]}])")
_STRING: Final = re.compile(_QUOTED)
_BLANKS: Final = re.compile(r"[\s,:]*")
_PLAIN: Final = re.compile(r"[^\s,:\[\]{}\"]+")


class JsonText:
    """A JSON text, parsed: its value, and where everything in it stands.

    Raises ValueError for what is no JSON, or has a key twice.
    """

    def __init__(self, text: str) -> None:
        self._text = _LAST_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
        self.value = json.loads(self._text, object_pairs_hook=_once)

    def lines(self) -> Lines:
        """Where each value begins; one of an object, where its key does."""
        found: Lines = {}
        _Walk(self._text, found).value(0, ())
        return found


class _Walk:
    """Goes through a text that is known to be JSON."""

    def __init__(self, text: str, found: Lines) -> None:
        self.text = text
        self.found = found
        self._counted = (0, 1)

    def value(self, start: int, path: tuple[str | int, ...]) -> int:
        """Note a value and all in it; where it ends."""
        start = self._after_blanks(start)
        self.found.setdefault(path, self._line(start))
        if self.text[start] == "{":
            return self._object(start + 1, path)
        if self.text[start] == "[":
            return self._array(start + 1, path)
        match = _STRING.match(self.text, start) or _PLAIN.match(self.text, start)
        assert match is not None
        return match.end()

    def _object(self, start: int, path: tuple[str | int, ...]) -> int:
        while self.text[start := self._after_blanks(start)] != "}":
            match = _STRING.match(self.text, start)
            assert match is not None
            key = str(json.loads(match[0]))
            self.found[(*path, key)] = self._line(start)
            start = self.value(match.end(), (*path, key))
        return start + 1

    def _array(self, start: int, path: tuple[str | int, ...]) -> int:
        place = 0
        while self.text[start := self._after_blanks(start)] != "]":
            start = self.value(start, (*path, place))
            place += 1
        return start + 1

    def _after_blanks(self, start: int) -> int:
        match = _BLANKS.match(self.text, start)
        assert match is not None
        return match.end()

    def _line(self, position: int) -> int:
        """Counted on from the last one asked for: the text is gone through once."""
        before, line = self._counted
        line += self.text.count("\n", before, position)
        self._counted = (position, line)
        return line


def _blank(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)  # lines stay where they are


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found
