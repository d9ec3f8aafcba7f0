"""A file of settings, read by its ending: YAML, TOML, or JSON with comments.

Takes a path from the command line, hands a `Document` to `run_file`: plain values, and the line that each stands on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hookline.config.yaml_core import Lines, lines_of, load_yaml
from hookline.errors import ConfigError

__all__ = ["ENDINGS", "Document", "read_document", "spelled"]

ENDINGS: Final = (".yaml", ".yml", ".toml", ".json", ".jsonc")
"""What the name of such a file ends in."""
_STRING: Final = r'"(?:\\.|[^"\\\n])*"'
_COMMENT: Final = re.compile(_STRING + r"|//[^\n]*|/\*.*?\*/|\t", re.DOTALL)
_LAST_COMMA: Final = re.compile(_STRING + r"|,(?=\s*[\]}])")
_TOML_TABLE: Final = re.compile(r"^\s*\[{1,2}\s*([^\]]+?)\s*\]{1,2}")
_TOML_KEY: Final = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[\w\-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w\-]+))*)\s*=""")


@dataclass(frozen=True)
class Document:
    """What a file says, and where it says it."""

    path: Path
    values: Any
    lines: Lines = field(default_factory=dict)

    def line_of(self, path: Sequence[str | int]) -> int | None:
        """The line of a value, or of what it would stand in."""
        keys = tuple(path)
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines.get(keys)

    def place(self, path: Sequence[str | int]) -> str:
        """Where it is, for an error: ``run.yaml, line 7, at $.hooks.names[2]``."""
        line = self.line_of(path)
        return f"{self.path}{'' if line is None else f', line {line}'}, at {spelled(path)}"


def spelled(path: Sequence[str | int]) -> str:
    """A path as JSON's tools write it."""
    return "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def read_document(path: str | Path) -> Document:
    """Read a file of settings.

    Recipe: ``read_document("run.yaml").values``.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path} is no file of settings: its name ends in one of {', '.join(ENDINGS)}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    try:
        values, lines = reader(text)
    except Exception as error:
        raise ConfigError(f"{path}{_where(error)}: this is not {_KIND[path.suffix.lower()]}: {_said(error)}.") from None
    return Document(path, values, lines)


# -- the three languages ---------------------------------------------------------------------------------------


def _yaml(text: str) -> tuple[Any, Lines]:
    return load_yaml(text), lines_of(text)


def _json(text: str) -> tuple[Any, Lines]:
    plain = _LAST_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    values = json.loads(plain, object_pairs_hook=_once)
    return values, lines_of(plain)  # JSON is YAML once its tabs are blanks


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


def _toml(text: str) -> tuple[Any, Lines]:
    import tomllib

    return tomllib.loads(text), _toml_lines(text)


def _toml_lines(text: str) -> Lines:
    """Where keys stand; what is inside a value of several lines counts as where the value begins."""
    lines: Lines = {}
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _TOML_TABLE.match(line):
            table = tuple(_toml_keys(heading[1]))
            if line.lstrip().startswith("[["):
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            lines.setdefault(table, number)
        elif key := _TOML_KEY.match(line):
            names = tuple(_toml_keys(key[1]))
            for end in range(1, len(names) + 1):
                lines.setdefault((*table, *names[:end]), number)
    return lines


def _toml_keys(text: str) -> list[str]:
    return [part[0].strip().strip("\"'") for part in re.finditer(r"""\s*(?:"[^"]*"|'[^']*'|[^.]+)""", text)]


# -- what went wrong, in words ---------------------------------------------------------------------------------


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = getattr(error, "lineno", None) if mark is None else mark.line + 1
    if line is None and (match := re.search(r"at line (\d+)", str(error))):
        line = int(match[1])
    return "" if line is None else f", line {line}"


def _said(error: Exception) -> str:
    text = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error)
    return str(text).strip().rstrip(".")


_READERS: Final = {".yaml": _yaml, ".yml": _yaml, ".json": _json, ".jsonc": _json, ".toml": _toml}
_KIND: Final = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".jsonc": "JSON", ".toml": "TOML"}
