"""What could stand where the cursor is: asked by the shell's script of `completion` at every Tab.

Takes the words of the line up to the cursor, hands back candidates, and whether file names are some as well. Neither
torch nor anything of the user's is imported (0.1 s).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from hookline.cli.source_look import Looked, look, names_in

__all__ = ["Candidates", "candidates", "command"]

_SETS: Final = ("all", "observers", "interventions", "with_debug", "none")
_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")
_LOOP: Final = ("--epochs", "--steps", "--snapshot-every", "--eval-every")
_FILES: Final = ("FILE", "DIR", "PATH", "RUN", "RUN ...", "FILE:MODEL", "EXPERIMENT", "PKG.MOD:CLASS ...")
"""What stands for a file in the help of a flag."""
_BREAKS: Final = ":="
"""Where bash begins another word: it replaces only what stands behind."""


@dataclasses.dataclass
class Candidates:
    """What could stand there."""

    words: list[str] = dataclasses.field(default_factory=list)
    has_files: bool = False
    """Whether file names could, too."""


def command(arguments: Sequence[str]) -> int:
    """Print candidates for ``LINE POINT BREAKS``, one in a line, after a line that says whether files are some."""
    line, point, breaks = arguments
    words = _words(line.encode()[: int(point)].decode(errors="ignore"))  # bash counts bytes
    found = candidates(words[1:])
    start = max((words[-1].rfind(sign) for sign in _BREAKS if sign in breaks), default=-1) + 1
    print("files" if found.has_files else "words")
    for word in dict.fromkeys(found.words):
        if word.startswith(words[-1]):
            print(word[start:])
    return 0


def _words(line: str) -> list[str]:
    """The words of a line, the last being the one under the cursor, which may be empty."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quote that is still open
        words = line.split()
    return words if words and not line[-1:].isspace() else [*words, ""]


def candidates(words: Sequence[str]) -> Candidates:
    """Return what could stand in place of the last of the words behind ``hookline``."""
    from hookline.cli.main import COMMANDS

    if len(words) <= 1:
        return Candidates([*COMMANDS, "--help", "--version", "--debug"])
    options = _options_of(words[0])
    if options is None:
        return Candidates()
    return _Command(words[0], options).candidates(words[1:-1], words[-1])


class _Command:
    """The flags of one command, and what each takes."""

    def __init__(self, name: str, options: type) -> None:
        self.name = name
        self.flags: dict[str, Any] = {}
        self.positional: list[Any] = []
        self._collect(options)

    def _collect(self, cls: type) -> None:
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                self._collect(hint)
            elif _is_positional(hint):
                self.positional.append((name, hint))
            else:
                self.flags[f"--{name.replace('_', '-')}"] = hint

    def candidates(self, before: Sequence[str], word: str) -> Candidates:
        """Of the word after those, before which the command stands."""
        looked = self._experiment(before)
        flag = next((one for one in reversed(before) if one.startswith("-")), None)
        if word.startswith("-"):
            own = [*looked.flags, *(_LOOP if self.name == "run" and not looked.flags else ())]
            return Candidates([*own, *self.flags, "--help"])
        behind = list(reversed(before)).index(flag) if flag is not None else len(before)
        hint = self.flags.get(flag or "")
        if hint is not None and _takes(hint, behind):
            return self._values(flag or "", hint, looked, word)
        if flag is not None and hint is None and behind == 0 and flag in looked.flags:
            return Candidates()
        return self._position(len(self._without_values(before)), word)

    def _without_values(self, before: Sequence[str]) -> list[str]:
        """The words that are neither flags nor their values."""
        found: list[str] = []
        flag, since = "", 0
        for word in before:
            if word.startswith("-"):
                flag, since = word, 0
            elif flag and (_takes(self.flags[flag], since) if flag in self.flags else since == 0):
                since += 1
            else:
                found.append(word)
        return found

    def _experiment(self, before: Sequence[str]) -> Looked:
        found = self._without_values(before)
        return look(found[0]) if self.name == "run" and found else Looked()

    def _position(self, place: int, word: str) -> Candidates:
        if place >= len(self.positional):
            last = self.positional[-1:] if self.positional and "..." in _metavar(self.positional[-1][1]) else []
        else:
            last = [self.positional[place]]
        if not last:
            return Candidates()
        name, hint = last[0]
        if self.name == "hooks":
            return _in_file(word) or Candidates([*_hooks(), *_SETS[:-1]])
        if name == "experiment" or (self.name == "find" and name == "model"):
            from hookline.experiments import EMBEDDED

            return _in_file(word) or Candidates([*EMBEDDED], has_files=True)
        return _words_of(hint)

    def _values(self, flag: str, hint: Any, looked: Looked, word: str) -> Candidates:
        known: dict[str, Callable[[], list[str]]] = {
            "--hooks": lambda: [*_hooks(), *_SETS],
            "--hooks-describe": lambda: [*_hooks(), *_SETS[:-1]],
            "--with-hooks": lambda: [*(looked.groups or ["none"])],
            "--strategy": lambda: [*looked.strategies, "all"],
            "--hook-config": lambda: [f"{name}." for name in _hooks()],
            "--dtype": lambda: [*_DTYPES],
            "--device": lambda: ["cpu", "cuda", "mps"],
            "--to": lambda: [*_sinks()],
        }
        if flag in known and (self.name != "serve" or flag not in ("--hooks",)):
            words = known[flag]()
            # A hook may be in a file; a word that begins no hook may begin a file's name.
            return _in_file(word) or Candidates(words, has_files=not any(one.startswith(word) for one in words))
        return _in_file(word) or _words_of(hint)


def _options_of(name: str) -> type | None:
    import importlib

    from hookline.cli.main import COMMANDS

    if name == "run":
        name, module = "run", "hookline.cli.run_options"
    elif name in COMMANDS:
        module = COMMANDS[name][0]
    else:
        return None
    found: type = getattr(importlib.import_module(module), f"{name.capitalize()}Options")
    return found


def _is_positional(hint: Any) -> bool:
    from tyro.conf import Positional

    marker = get_args(Positional[str])[1]
    return any(one is marker for one in _marks(hint))


def _marks(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _metavar(hint: Any) -> str:
    found = [getattr(mark, "metavar", None) for mark in _marks(hint)]
    return next((one for one in found if isinstance(one, str)), "")


def _takes(hint: Any, place: int) -> bool:
    """Whether a flag takes a value at that place behind it."""
    if bool in get_args(hint) or hint is bool:
        return False
    return place == 0 or "..." in _metavar(hint)


def _words_of(hint: Any) -> Candidates:
    """The words that a value may be, by its type or by what help calls it."""
    metavar = _metavar(hint)
    if metavar in _FILES:
        return Candidates(has_files=True)
    literal = [word for one in (hint, *get_args(hint)) for word in get_args(one) if get_origin(one) is Literal]
    if literal:
        return Candidates([str(word) for word in literal])
    words = metavar.strip("[]").split("|")
    return Candidates(words if len(words) > 1 else [])


def _in_file(word: str) -> Candidates | None:
    """``file.py:`` is followed by what the file defines."""
    where, colon, _ = word.rpartition(":")
    if not colon or not where.endswith(".py"):
        return None
    return Candidates([f"{where}:{name}" for name in names_in(Path(where))])


def _hooks() -> list[str]:
    from importlib.metadata import entry_points

    from hookline.analyses import BUILT_IN

    return [*BUILT_IN, *(point.name for point in entry_points(group="hookline.hooks"))]


def _sinks() -> list[str]:
    from hookline.cli.destinations import BUILT_IN

    return list(BUILT_IN)
