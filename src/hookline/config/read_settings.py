"""A file of settings, read by its ending: YAML, TOML, or JSON with comments.

Takes a path from the command line or a server, hands a `Document` to `run_file` and `spec_files`: plain values, and,
once something is wrong with one, the line that it stands on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from hookline.config.json_lines import JsonText
from hookline.config.toml_lines import TomlText
from hookline.config.yaml_core import Lines, YamlText
from hookline.errors import ConfigError

__all__ = ["ENDINGS", "Document", "read_document", "spelled"]

ENDINGS: Final = (".yaml", ".yml", ".toml", ".json", ".jsonc")
"""What the name of such a file ends in."""


@dataclass(frozen=True)
class Document:
    """What a file says, and where it says it."""

    path: Path
    values: Any
    find_lines: Callable[[], Lines] = dict
    """Goes through the text once more; only for errors, since a large file takes its time."""

    @cached_property
    def lines(self) -> Lines:
        """The line of each value; of brackets so deep that nobody could follow, none."""
        try:
            return self.find_lines()
        except RecursionError:
            return {}

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
    kind, reader = _KINDS.get(path.suffix.lower(), ("", None))
    if reader is None:
        raise ConfigError(f"{path} is no file of settings: its name ends in one of {', '.join(ENDINGS)}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not text.strip():
        return Document(path, None)
    try:
        parsed = reader(text)
    except Exception as error:
        raise ConfigError(f"{path}{_where(error)}: this is not {kind}: {_said(error)}.") from None
    return Document(path, parsed.value, parsed.lines)


# -- what went wrong, in words ---------------------------------------------------------------------------------


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = getattr(error, "lineno", None) if mark is None else mark.line + 1
    if line is None and (match := re.search(r"at line (\d+)", str(error))):
        line = int(match[1])
    return "" if line is None else f", line {line}"


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its brackets are nested too deeply"
    text = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error)
    return str(text).strip().rstrip(".")


_KINDS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    ".yaml": ("YAML", YamlText),
    ".yml": ("YAML", YamlText),
    ".json": ("JSON", JsonText),
    ".jsonc": ("JSON", JsonText),
    ".toml": ("TOML", TomlText),
}
